"""Which cores tritonserver and the models beside the engine run on.

Owns the choice, and how the engine learns of its own. Must not know processes.

On a CPU the engine's pool has a thread on every core, and the first of them runs all of a step that
is not shared out. When something else takes that core for a moment, everybody waits; on the
others the pool makes up for it, since work is claimed in small pieces. So all but the engine keeps
off the pool's first core::

    core 0      engine: the thread that runs the steps
    core 1 …    engine: helpers; tritonserver, scheduler and the rest

Measured on two cores with the llama-135m shape, in runs of three to five alternating repetitions:
more tokens/s by 2 to 3 % at concurrency 1 (three runs), by -2 to 11 % at 8 and by 2 to 11 % at 32
(four runs), and a 95th percentile between tokens that is 8 to 40 % shorter. With the demo model,
whose steps take no longer than what surrounds them, the rest needs both cores: it lost two thirds
of its tokens/s at concurrency 1. Hence the least size. Several ranks wait for each other all the
time: no core of theirs is worth more than the others.
"""

import os
from pathlib import Path

from charonia.config import EngineArgs
from charonia.data.ops.native.threads import ThreadLayout

MIN_WEIGHT_BYTES = 64 * 2**20
_GPU = Path("/dev/nvidiactl")


def cores_beside_engine(args: EngineArgs) -> frozenset[int] | None:
    """The cores for all but the engine; None leaves everything to the operating system.

    Raises:
        ConfigError: `cpu_binding` makes no sense.
    """
    on_gpu = args.device == "cuda" or (args.device == "auto" and _GPU.exists())
    if on_gpu or args.cpu_kernels == "torch" or args.local_ranks > 1:
        return None
    layout = ThreadLayout.of(args.cpu_threads, args.cpu_binding)
    num_bytes = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    if len(layout.cores) < 2 or num_bytes < MIN_WEIGHT_BYTES:
        return None
    return frozenset(os.sched_getaffinity(0)) - {layout.cores[0]}
