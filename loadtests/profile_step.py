"""Say where the time of a decode step goes, to the last few per cent.

    python loadtests/profile_step.py                            # llama-135m shape, random weights
    python loadtests/profile_step.py --concurrency 8 --set quantization=int8

The engine runs in this process, as `LLM` runs it. The CPU kernels count their own seconds;
cProfile tells what lies between them, and costs a little of what it measures.
"""

import argparse
import cProfile
import json
import pstats
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia import SamplingParams
from charonia.config import EngineArgs, SchedulerArgs
from charonia.data.ops.native.ops import NativeOps
from charonia.data.runner import Runner
from charonia.engine.admission import GenerationRequest
from charonia.engine.core import EngineCore
from charonia.engine.inline import InlineExecutor
from charonia.engine.outputs import Chunk
from charonia.text.tokenizer import Tokenizer
from checkpoint import SHAPES, make_checkpoint

CACHE = Path(tempfile.gettempdir()) / "charonia-bench"
FUNCTIONS = {
    "execute": ("runner.py", "execute"),
    "model": ("decoder.py", "hidden_states"),
    "head": ("decoder.py", "logits"),
    "sampling": ("sampler.py", "sample"),
    "indices": ("step_tensors.py", "begin"),
    "append": ("step_tensors.py", "append"),
    "plan check": ("plan_check.py", "check_plan"),
    "plan": ("scheduler.py", "plan"),
    "apply": ("scheduler.py", "apply"),
    "text and delivery": ("core.py", "_deliver_updates"),
    "gauges": ("core.py", "_set_gauges"),
}
"""What is looked up in cProfile's statistics: file and function of each part."""


@dataclass(frozen=True)
class Profile:
    """Milliseconds per step of each part; they add up to `total`."""

    total: float
    parts: dict[str, float]

    def table(self) -> str:
        """Largest first, with the share of the step."""
        lines = ["| part | ms | % of step |", "| --- | --- | --- |"]
        for name, value in sorted(self.parts.items(), key=lambda item: -item[1]):
            lines.append(f"| {name} | {value:.3f} | {100 * value / self.total:.1f} |")
        lines.append(f"| step | {self.total:.3f} | 100.0 |")
        return "\n".join(lines)


class Engine:
    """The engine core, stepped here."""

    def __init__(self, args: EngineArgs) -> None:
        self._runner = Runner(args, log=print)
        self._core = EngineCore(
            InlineExecutor(lambda: self._runner),
            args,
            SchedulerArgs(),
            Tokenizer.from_dir(args.tokenizer_dir),
            deliver=self._take,
            clock=time.monotonic,
            log=print,
        )
        self._core.step()
        self._num_live = 0

    def profile(self, concurrency: int, context: int, num_steps: int) -> Profile:
        """Decode `num_steps` steps with so many rows, whose contexts are `context` on average."""
        params = SamplingParams(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
        for index in range(concurrency):
            ids = [random.randrange(1, 4096) for _ in range(max(1, context - num_steps // 2))]
            request = GenerationRequest(key=str(index), prompt_ids=ids, params=params)
            self._core.add(request)
        self._num_live = concurrency
        for _ in range(2):  # the prompts, and a step to settle
            self._core.step()
        kernels = self._kernel_seconds()
        profiler = cProfile.Profile()
        started = time.perf_counter()
        profiler.enable()
        for _ in range(num_steps - 2):
            self._core.step()
        profiler.disable()
        seconds = time.perf_counter() - started
        spent = {name: now - kernels[name] for name, now in self._kernel_seconds().items()}
        while self._num_live:
            self._core.step()
        return _profile(seconds, spent, pstats.Stats(profiler), num_steps - 2)

    def _kernel_seconds(self) -> dict[str, float]:
        ops = self._runner.ops
        return ops.phase_seconds() if isinstance(ops, NativeOps) else {}

    def _take(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            raise chunk.error
        self._num_live -= chunk.is_final


def _profile(
    seconds: float, kernels: Mapping[str, float], stats: pstats.Stats, num_steps: int
) -> Profile:
    cumulative = dict.fromkeys(FUNCTIONS, 0.0)
    for (path, _, function), (*_, total, _callers) in stats.stats.items():  # type: ignore[attr-defined]
        for name, where in FUNCTIONS.items():
            if where == (Path(path).name, function) and "charonia" in path:
                cumulative[name] += total
    parts = {f"kernel: {name}": value for name, value in kernels.items()}
    in_layers = sum(kernels.values()) - kernels.get("head", 0.0)
    parts["between kernels, in the model"] = cumulative["model"] - in_layers
    parts["around the head"] = cumulative["head"] - kernels.get("head", 0.0)
    inside = ("sampling", "indices", "append", "plan check")
    parts |= {name: cumulative[name] for name in inside}
    parts["rest of the engine's step"] = cumulative["execute"] - sum(
        cumulative[name] for name in ("model", "head", *inside)
    )
    outside = ("plan", "apply", "text and delivery", "gauges")
    parts |= {name: cumulative[name] for name in outside}
    parts["rest"] = seconds - cumulative["execute"] - sum(cumulative[name] for name in outside)
    per_step = {name: 1000 * value / num_steps for name, value in parts.items()}
    return Profile(1000 * seconds / num_steps, per_step)


def main() -> None:
    """Profile as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: llama-135m's shape, random weights")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=192, help="tokens, on average")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path, help="write JSON there, too")
    options = parser.parse_args()
    settings: dict[str, Any] = {"dtype": options.dtype, "enable_prefix_caching": False}
    for setting in options.set:
        name, _, value = setting.partition("=")
        settings[name] = json.loads(value) if value[:1].isdigit() else value
    model = options.model or make_checkpoint(SHAPES["llama-135m"], CACHE / "llama-135m")
    engine = Engine(EngineArgs.from_dict({"model": str(model), **settings}))
    profiles = {}
    for concurrency in options.concurrency:
        engine.profile(concurrency, options.context, 20)  # warm-up
        profile = engine.profile(concurrency, options.context, options.steps)
        profiles[concurrency] = {"total_ms": profile.total, "parts_ms": profile.parts}
        print(f"\n{concurrency} rows, context {options.context}:\n\n{profile.table()}")
    if options.output is not None:
        options.output.write_text(json.dumps(profiles, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
