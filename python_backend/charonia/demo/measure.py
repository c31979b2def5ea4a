"""Quality of the two checkpoints, measured on files that neither was trained on.

Owns the measurements for the model cards: how often the draft's token is the target's, and
how faithfully the target copies in an edit. Must not know how the models are trained.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from charonia import SamplingParams
from charonia.demo.distil import write
from charonia.demo.edits import Edit, edit_prompt, edited, make_edits
from charonia.demo.shapes import load_model
from charonia.demo.vocabulary import END_OF_TEXT_ID

TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
PROMPT_TOKENS, NEW_TOKENS = 200, 150
NUM_PROMPTS = 64
# Pieces to edit: tokens, and about the same in characters.
PIECE_TOKENS = (150, 450)
PIECE_CHARS = (500, 1500)


def held_out_edits(tokenizer: Tokenizer, texts: list[str], *, seed: int) -> list[Edit]:
    """Return NUM_PROMPTS edits of undisguised pieces with PIECE_TOKENS tokens."""
    lengths = range(PIECE_TOKENS[0], PIECE_TOKENS[1] + 1)
    edits = make_edits(
        texts, min_chars=PIECE_CHARS[0], max_chars=PIECE_CHARS[1], max_disguises=0, seed=seed
    )
    fitting = (edit for edit in edits if len(tokenizer.encode(edit.source).ids) in lengths)
    return list(itertools.islice(fitting, NUM_PROMPTS))


def spaced_prompts(documents: list[list[int]]) -> list[list[int]]:
    """Return NUM_PROMPTS stretches of PROMPT_TOKENS tokens, evenly spaced over the documents."""
    size = PROMPT_TOKENS + NEW_TOKENS
    stretches = [
        document[start : start + PROMPT_TOKENS]
        for document in documents
        for start in range(0, len(document) - size, size)
    ]
    return [stretches[index * len(stretches) // NUM_PROMPTS] for index in range(NUM_PROMPTS)]


def generate(
    folder: Path, prompts: list[list[int]], *, max_tokens: int, temperature: float
) -> list[list[int]]:
    """Return what the checkpoint in `folder` adds to each prompt, seeded by its index."""
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index)
        for index in range(len(prompts))
    ]
    return write(folder, prompts, params)


@torch.no_grad()
def agreement(
    target: Path, draft: Path, prompts: list[list[int]], *, max_tokens: int, temperature: float
) -> float:
    """Share of the places in the target's texts at which both models choose the same token.

    Both get all tokens before, and choose with the same Gumbel noise, as in speculative decoding
    here (Daliri, Musco, Suresh 2024, arXiv 2408.07978), after temperature alone.
    """
    generator = torch.Generator().manual_seed(0)
    models = [load_model(folder) for folder in (target, draft)]
    texts = generate(target, prompts, max_tokens=max_tokens, temperature=temperature)
    same = total = 0
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt + text])
        logits = [model(ids).logits[0, len(prompt) - 1 : -1] for model in models]
        if temperature > 0:
            uniform = torch.rand(logits[0].shape, generator=generator).clamp_min(1e-30)
            noise = -(-uniform.log()).log()
            logits = [each / temperature + noise for each in logits]
        choices = [each.argmax(-1) for each in logits]
        same += int((choices[0] == choices[1]).sum())
        total += len(text)
    return same / total


def measure_draft(
    target: Path, draft: Path, tokenizer: Tokenizer, texts: list[str], documents: list[list[int]]
) -> dict[str, Any]:
    """Measure how often the draft agrees with the target, per temperature, on files and on edits.

    Args:
        texts, documents: the held-out files and their tokens.
    """
    edits = held_out_edits(tokenizer, texts, seed=0)
    tasks = {
        "files": (spaced_prompts(documents), NEW_TOKENS),
        "edits": ([tokenizer.encode(edit_prompt(e)).ids for e in edits], PIECE_TOKENS[1]),
    }
    shares = {
        name: {
            str(temperature): round(
                agreement(target, draft, prompts, max_tokens=max_tokens, temperature=temperature),
                3,
            )
            for temperature in TEMPERATURES
        }
        for name, (prompts, max_tokens) in tasks.items()
    }
    return {
        **shares,
        "file_prompts": len(tasks["files"][0]),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "edit_prompts": len(edits),
    }


def measure_edits(target: Path, tokenizer: Tokenizer, texts: list[str]) -> dict[str, Any]:
    """Measure how the target edits pieces of the held-out texts, greedily."""
    edits = held_out_edits(tokenizer, texts, seed=0)
    prompts = [tokenizer.encode(edit_prompt(edit)).ids for edit in edits]
    wanted = [[*tokenizer.encode(edited(edit)).ids, END_OF_TEXT_ID] for edit in edits]
    written = generate(target, prompts, max_tokens=2 * PIECE_TOKENS[1], temperature=0.0)
    model = load_model(target)
    predicted = [predictions(model, *pair) for pair in zip(prompts, wanted, strict=True)]
    right = [common_prefix(*pair) for pair in zip(written, wanted, strict=True)]
    return {
        "pieces": len(edits),
        "shortest": PIECE_TOKENS[0],
        "longest": PIECE_TOKENS[1],
        "tokens": sum(map(len, wanted)),
        "exact": sum(count == len(ids) for count, ids in zip(right, wanted, strict=True)),
        "predicted_tokens": sum(
            first == second
            for pair in zip(predicted, wanted, strict=True)
            for first, second in zip(*pair, strict=True)
        ),
        "right_tokens": sum(right),
        "without_mistake_in_200": sum(
            count >= min(200, len(ids)) for count, ids in zip(right, wanted, strict=True)
        ),
    }


@torch.no_grad()
def predictions(model: LlamaForCausalLM, prompt: list[int], text: list[int]) -> list[int]:
    """The likeliest token at each place of the text, given the prompt and the text before."""
    logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    likeliest: list[int] = logits.argmax(-1).tolist()
    return likeliest


def common_prefix(first: list[int], second: list[int]) -> int:
    """Number of tokens that both begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
