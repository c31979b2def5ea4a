"""Measure what a quantization loses: the loss on text that the demo model was not trained on.

    python loadtests/quantization_loss.py                 # float32, bfloat16; int8 weights, W8A8

Every setting predicts the same tokens, those of the files of the standard library that are held out
from the demo model's training, in windows of one context. Reported are nats per token and how often
the most likely token is that of float32.
"""

import math
from pathlib import Path
from typing import Any

from tqdm import tqdm

from charonia import LLM, SamplingParams
from charonia.config import DEMO_CHECKPOINT
from charonia.demo.corpus import load_corpus, standard_library
from charonia.text.tokenizer import Tokenizer
from command_line import make_parser
from report import markdown_table

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, int8 weights": {"dtype": "float32", "quantization": "int8"},
    "float32, W8A8": {"dtype": "float32", "quantization": "w8a8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, W8A8": {"dtype": "bfloat16", "quantization": "w8a8"},
}


def windows(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """Cut the beginnings of held-out files into windows of so many tokens."""
    found: list[list[int]] = []
    for text in load_corpus(standard_library()).held_out:
        ids = tokenizer.encode(text)
        found += [ids[at : at + length] for at in range(0, len(ids) - length, length)]
    step = max(1, len(found) // count)
    return found[::step][:count]


def predictions(model: Path, settings: dict[str, Any], prompts: list[list[int]], name: str) -> Any:
    """Log-probability of each token but the first, and the most likely token there."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0)
    logprobs: list[float] = []
    best: list[int] = []
    with LLM(model=str(model), max_num_seqs=8, **settings) as llm:
        for start in tqdm(range(0, len(prompts), 8), desc=name, unit="batch"):
            some = prompts[start : start + 8]
            outputs = llm.generate(some, params, use_tqdm=False)
            for ids, output in zip(some, outputs, strict=True):
                for token_id, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
                    logprobs.append(entry[token_id].logprob)
                    best.append(max(entry, key=lambda other: entry[other].logprob))
    return logprobs, best


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    options = parser.parse_args()
    prompts = windows(Tokenizer.from_dir(options.model), options.length, options.windows)
    print(f"{len(prompts)} windows of {options.length} tokens\n")
    rows = []
    base: tuple[float, list[int]] | None = None
    for name, settings in SETTINGS.items():
        logprobs, best = predictions(options.model, settings, prompts, name)
        loss = -math.fsum(logprobs) / len(logprobs)
        base = base or (loss, best)
        same = sum(a == b for a, b in zip(best, base[1], strict=True)) / len(best)
        rows.append([name, f"{loss:.4f}", f"{loss - base[0]:+.4f}", f"{100 * same:.2f} %"])
    head = ["setting", "nats per token", "change", "same most likely token as float32"]
    print(f"\n{markdown_table(head, rows)}")


if __name__ == "__main__":
    main()
