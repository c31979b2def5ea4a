"""Measure what lies between the passes of two steps in the engine, beside what the passes take.

    python loadtests/gap_bench.py                       # both models; 1, 8 and 32 rows
    python loadtests/gap_bench.py --models demo --rows 1 --steps 1000

The real scheduler plans steps of rows that decode, in this process, without Triton. The engine does
with each plan what it does behind Triton: it decodes a message, executes the step, and encodes the
result. The socket itself is not timed. Medians of all steps, in microseconds:

  pass    the model, up to the logits; what a step cannot do without
  sample  the draw of each row's token from its logits
  before  decode and check the plan, and lay out its batch
  after   append the tokens to the rows, and encode the result
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from charonia import SamplingParams
from charonia.config import DEMO_CHECKPOINT, EngineArgs, SchedulerArgs
from charonia.core.engine_core import EngineCore
from charonia.core.generation_request import GenerationRequest
from charonia.core.inline import InlineExecutor
from charonia.core.output.outputs import Chunk, OutputStream
from charonia.core.request_events import RequestEvents
from charonia.data.runner import Runner
from charonia.protocol import EngineInfo, StepPlan, StepResult
from charonia.protocol.messages import decode_request, encode
from charonia.text.tokenizer import Tokenizer
from checkpoint import SHAPES, make_checkpoint
from command_line import add_output, make_parser, positive
from paths import CACHE
from record import circumstances, output_stem, write_record
from report import markdown_table

MODELS = ("demo", "llama-135m")
PROMPT_TOKENS = 32
WARM_UP = 20  # steps
PARTS = ("pass", "sample", "before", "after")


class TimedRunner:
    """A runner that gets plans and gives results as messages, and notes what each part takes.

    Attributes:
        steps: of each step the seconds of its parts.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._marks: list[float] = []
        self.steps: list[dict[str, float]] = []
        target, sampler = runner._target, runner._sampler
        target._model.forward = self._noting(target._model.forward, before=True)
        sampler.sample = self._noting(sampler.sample, before=True, after=True)

    def _noting(
        self, call: Callable[..., Any], *, before: bool = False, after: bool = False
    ) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if before:
                self._marks.append(time.perf_counter())
            result = call(*args, **kwargs)
            if after:
                self._marks.append(time.perf_counter())
            return result

        return noting

    def info(self) -> EngineInfo:
        """See `Runner`."""
        return self._runner.info()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Execute a plan, as the engine's process does."""
        message = encode(plan)
        self._marks = [time.perf_counter()]
        result = self._runner.execute(decode_request(message))
        encode(result)
        marks = [*self._marks, time.perf_counter()]
        if len(marks) == 5:  # with one pass and one draw
            lengths = [end - begin for begin, end in pairwise(marks)]
            self.steps.append(
                dict(zip(("before", "pass", "sample", "after"), lengths, strict=True))
            )
        return lambda: result

    def close(self) -> None:
        """See `Runner`."""
        self._runner.close()


class Client(RequestEvents):
    """Reads no output.

    Attributes:
        error: of a request that failed.
    """

    error: Exception | None = None

    def on_chunk(self, chunk: Chunk) -> None:
        """Keep an error."""
        self.error = self.error or chunk.error


def measure(model: Path, num_rows: int, num_steps: int) -> dict[str, float]:
    """The medians of all parts, in microseconds."""
    args = EngineArgs(
        model=str(model), device="cpu", max_num_seqs=num_rows, enable_prefix_caching=False
    )
    timed = TimedRunner(Runner(args, log=lambda _: None))
    client = Client()
    core = EngineCore(
        InlineExecutor(lambda: timed),
        args,
        SchedulerArgs(),
        partial(OutputStream, tokenizer=Tokenizer.from_dir(model)),
        clock=time.monotonic,
        log=print,
    )
    core.step()
    params = SamplingParams(max_tokens=WARM_UP + num_steps + 2, ignore_eos=True, temperature=0.0)
    for row in range(num_rows):
        prompt = [(7 * row + 3 * place) % 200 + 5 for place in range(PROMPT_TOKENS)]
        core.add(GenerationRequest(key=str(row), prompt_ids=prompt, params=params), client)
    while len(timed.steps) < WARM_UP + num_steps:
        core.step()
        if client.error is not None:
            raise client.error
    steps = timed.steps[WARM_UP:]
    core.close()
    return {part: 1e6 * statistics.median(step[part] for step in steps) for part in PARTS}


def main() -> None:
    """Measure as the command line says."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "gap")
    about = circumstances("gap_bench.py") | {"steps": options.steps}
    cases = [(model, rows) for model in options.models for rows in options.rows]
    found = []
    for model, rows in tqdm(cases, unit="case", file=sys.stderr):
        path = DEMO_CHECKPOINT if model == "demo" else make_checkpoint(SHAPES[model], CACHE / model)
        found.append({"model": model, "rows": rows} | measure(Path(path), rows, options.steps))
    print(as_markdown(found))
    print(write_record(stem, about | {"cases": found}))


def as_markdown(found: list[dict[str, Any]]) -> str:
    """A line for each case; shares are of the whole step."""
    rows = []
    for case in found:
        whole = sum(case[part] for part in PARTS)
        host = case["before"] + case["after"]
        times = [f"{case[part]:,.0f}" for part in PARTS]
        rows.append([case["model"], str(case["rows"]), *times, f"{100 * host / whole:.1f} %"])
    return markdown_table(["model", "rows", *PARTS, "before and after"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--steps", type=positive, default=500, metavar="N")
    add_output(parser, "gap")
    return parser


if __name__ == "__main__":
    main()
