"""Measure what K and V in fewer bits are worth, and what they lose.

    python loadtests/kv_bench.py
    python loadtests/kv_bench.py --rounds 25 --windows 64

What is lost is that of the demo model on text that it was not trained on, in windows of its whole
context, every token of which is predicted from those before it as they were: the change of the
perplexity, and how often the most likely token is the same one. The model computes in float32 for
that, and what it is compared to has K and V in float32, too: so nothing differs but how these are
kept, and no other rounding counts as theirs.

What is gained is measured with 32 rows of 2,048 tokens of llama-135m with random weights, computed
in bfloat16, beside K and V in bfloat16: all formats' engines are open at once and decode in turns,
so that a ratio is that of two neighbours. The prompt is computed once per format, and its blocks
are copied to the other rows.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from charonia.config import DEMO_CHECKPOINT, EngineArgs
from charonia.data.runner import Runner
from charonia.protocol import BlockCopy, NewRow, RowSampling, RowStep, StepPlan
from charonia.text.tokenizer import Tokenizer
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser, positive
from medians import median_interval
from paths import CACHE
from quantization_loss import predictions, windows
from record import circumstances, output_stem, write_record
from report import markdown_table
from thresholds import verdict

BASE, FORMATS = "bfloat16", ("int8", "fp8", "int4")
MOST_CHANGE = {"int8": 0.1, "fp8": 0.5, "int4": 2.0}
"""Largest change of the perplexity, in percent."""
LEAST_AGREEMENT = {"int8": 99.5, "fp8": 98.5}
"""Percent of the tokens."""
LEAST_RATIO = {"int8": 1.4}
"""Least ratio of decoded tokens per second to those of bfloat16."""
ROWS, CONTEXT, BLOCK_SIZE, STEPS = 32, 2048, 16, 16


@dataclass
class Format:
    """Measurements of one format.

    Attributes:
        bytes_per_token: K and V of all layers of llama-135m.
        logprobs, best: of each predicted token, and the most likely one there.
        rates: decoded tokens per second, round by round.
    """

    bytes_per_token: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def change_of_perplexity(self, base: "Format") -> float:
        """Return the change of the perplexity, in percent."""
        pairs = zip(base.logprobs, self.logprobs, strict=True)
        return 100 * math.expm1(math.fsum(a - b for a, b in pairs) / len(self.logprobs))

    def agreement(self, base: "Format") -> float:
        """Percent of the tokens for which the same one is the most likely."""
        return 100 * statistics.mean(a == b for a, b in zip(base.best, self.best, strict=True))

    def ratios(self, base: "Format") -> list[float]:
        """Return the ratios of the rates, round by round."""
        return [a / b for a, b in zip(self.rates, base.rates, strict=True)]


class Decoder:
    """An engine that decodes 32 long rows, as often as it is asked to.

    Args:
        kv_cache_dtype: "auto" is bfloat16.
    """

    def __init__(self, model: Path, kv_cache_dtype: str) -> None:
        row_blocks = CONTEXT // BLOCK_SIZE
        args = EngineArgs(
            model=str(model),
            dtype="bfloat16",
            device="cpu",
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
            max_num_seqs=ROWS,
            max_num_batched_tokens=CONTEXT,
            num_gpu_blocks_override=1 + ROWS * row_blocks,
        )
        self._runner = Runner(args, log=lambda line: None)
        self._epoch, self._step = self._runner.info().epoch + 1, 0
        self._blocks = [list(range(1 + row, 1 + ROWS * row_blocks, ROWS)) for row in range(ROWS)]
        self._prompt = [1 + 7 * i % 40_000 for i in range(CONTEXT - 2 * STEPS)]
        joins = [self._row(0, num_computed=0)]
        self._execute(joins=joins, rows=[RowStep(0, len(self._prompt))])
        copies = [
            BlockCopy(source, target)
            for blocks in self._blocks[1:]
            for source, target in zip(self._blocks[0], blocks, strict=True)
        ]
        rows = [self._row(row, len(self._prompt) - 1) for row in range(1, ROWS)]
        steps = [RowStep(row, 1) for row in range(1, ROWS)]
        self._execute(joins=rows, rows=steps, copies=copies)

    @property
    def bytes_per_token(self) -> float:
        """K and V of all layers, with what is filled up."""
        return self._runner.info().kv.bytes_per_block / BLOCK_SIZE

    def rate(self) -> float:
        """Decode some tokens of all rows behind the prompt; return tokens per second."""
        joins = [self._row(row, len(self._prompt) - 1) for row in range(ROWS)]
        steps = [RowStep(row, 1) for row in range(ROWS)]
        self._execute(leaves=list(range(ROWS)), joins=joins, rows=steps)
        started = time.perf_counter()
        for _ in range(STEPS):
            self._execute(rows=steps)
        return ROWS * STEPS / (time.perf_counter() - started)

    def close(self) -> None:
        """Let go of the engine."""
        self._runner.close()

    def _row(self, row: int, num_computed: int) -> NewRow:
        sampling = RowSampling(seed=row)
        prompt = self._prompt
        return NewRow(row, prompt, len(prompt), num_computed, self._blocks[row], sampling)

    def _execute(
        self,
        *,
        rows: list[RowStep],
        joins: Sequence[NewRow] = (),
        leaves: Sequence[int] = (),
        copies: Sequence[BlockCopy] = (),
    ) -> None:
        self._runner.execute(
            StepPlan(
                epoch=self._epoch,
                step_id=self._step,
                reset=self._step == 0,
                leaves=list(leaves),
                joins=list(joins),
                copies=list(copies),
                rows=rows,
            )
        )
        self._step += 1


def measure_loss(found: dict[str, Format], num_windows: int) -> None:
    """Have the demo model predict held-out text with each format."""
    length = json.loads((DEMO_CHECKPOINT / "config.json").read_text())["max_position_embeddings"]
    prompts = windows(Tokenizer.from_dir(DEMO_CHECKPOINT), length - 1, num_windows)
    for name, one in found.items():
        settings = {"dtype": "float32", "kv_cache_dtype": "auto" if name == BASE else name}
        one.logprobs, one.best = predictions(DEMO_CHECKPOINT, settings, prompts, name)


def measure_rates(found: dict[str, Format], rounds: int) -> None:
    """Have all formats decode in turns; the first round does not count."""
    model = make_checkpoint(SHAPES["llama-135m"], CACHE / "llama-135m")
    decoders = {
        name: Decoder(model, "auto" if name == BASE else name)
        for name in tqdm(found, desc="prompts", unit="format")
    }
    for number in tqdm(range(rounds + 1), desc="decoding", unit="round"):
        names = list(decoders)
        for name in names[number % 4 :] + names[: number % 4]:
            rate = decoders[name].rate()
            if number:
                found[name].rates.append(rate)
    for name, decoder in decoders.items():
        found[name].bytes_per_token = decoder.bytes_per_token
        decoder.close()


def _judged(value: str, bar: str, is_met: bool) -> str:
    return f"{value} ({bar}: {'met' if is_met else 'missed'})"


def _line(name: str, one: Format, base: Format) -> list[str]:
    change, agreement = one.change_of_perplexity(base), one.agreement(base)
    ratios = one.ratios(base)
    interval = median_interval(ratios)
    change_text, agreement_text = f"{change:+.3f} %", f"{agreement:.2f} %"
    if name in MOST_CHANGE:
        most = MOST_CHANGE[name]
        change_text = _judged(change_text, f"at most {most:g} %", change <= most)
    if name in LEAST_AGREEMENT:
        least = LEAST_AGREEMENT[name]
        agreement_text = _judged(agreement_text, f"at least {least:g} %", agreement >= least)
    ratio_text = f"{statistics.median(ratios):.2f} ({interval})"
    if name in LEAST_RATIO:
        bar = LEAST_RATIO[name]
        ratio_text += f", at least {bar:g}: {verdict(interval, bar)}"
    return [
        name,
        f"{one.bytes_per_token:,.0f} ({base.bytes_per_token / one.bytes_per_token:.2f})",
        change_text,
        agreement_text,
        f"{statistics.median(one.rates):.1f}",
        ratio_text,
    ]


def report(found: dict[str, Format]) -> str:
    """All that was measured, as Markdown."""
    base = found[BASE]
    first = [
        BASE,
        f"{base.bytes_per_token:,.0f}",
        "",
        "",
        f"{statistics.median(base.rates):.1f}",
        "",
    ]
    return markdown_table(
        [
            "K and V in",
            "bytes of a token (as many tokens)",
            "perplexity",
            "same most likely token",
            "tok/s",
            "ratio: median (its interval)",
        ],
        [first, *(_line(name, found[name], base) for name in found if name != BASE)],
    )


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="default: 15")
    parser.add_argument("--windows", type=positive, default=64, metavar="N", help="default: 64")
    add_output(parser, "kv")
    options = parser.parse_args()
    stem = output_stem(options.output, "kv")
    about = circumstances("kv_bench.py")
    found = {name: Format() for name in (BASE, *FORMATS)}
    measure_rates(found, options.rounds)
    measure_loss(found, options.windows)
    print(report(found))
    fields = {
        name: {key: value for key, value in asdict(one).items() if key not in ("logprobs", "best")}
        | {
            "nats_per_token": -math.fsum(one.logprobs) / len(one.logprobs),
            "change_of_perplexity_percent": one.change_of_perplexity(found[BASE]),
            "agreement_percent": one.agreement(found[BASE]),
        }
        for name, one in found.items()
    }
    print(f"\n{write_record(stem, about | {'formats': fields})}")


if __name__ == "__main__":
    main()
