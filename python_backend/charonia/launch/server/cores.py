"""The cores for tritonserver and for the models other than the engine.

Owns this choice. Must not know processes.

On a CPU the engine's thread pool has a thread on every core. The first thread also runs the parts
of a step that are not parallel. If another process takes its core for a moment, all threads wait.
On other cores the pool compensates, because work is claimed in small pieces. So every process but
the engine stays off the pool's first core::

    core 0      engine: the thread that runs the steps
    core 1 …    engine: helpers; tritonserver, scheduler and the rest

Measured on two cores with the shape of llama-135m, in runs of three to five alternating
repetitions::

    concurrency   tokens/s       runs
    1             +2 to +3 %     3
    8             -2 to +11 %    4
    32            +2 to +11 %    4

The 95th percentile of the time between tokens was 8 to 40 % shorter. With the demo model, whose
steps take no longer than the work around them, the other processes need both cores: it lost two
thirds of its tokens/s at concurrency 1. Hence the minimum size. Several ranks wait for each other
all the time, so none of their cores matters more than the others.
"""

import os
from pathlib import Path

from charonia.config import EngineArgs
from charonia.data.ops.native.threads import ThreadLayout

MIN_WEIGHT_BYTES = 64 * 2**20
_GPU = Path("/dev/nvidiactl")


def cores_beside_engine(args: EngineArgs) -> frozenset[int] | None:
    """The cores for everything but the engine; None leaves them to the operating system.

    Raises:
        ConfigError: `cpu_binding` is not valid.
    """
    on_gpu = args.device == "cuda" or (args.device == "auto" and _GPU.exists())
    if on_gpu or args.cpu_kernels == "torch" or args.local_ranks > 1:
        return None
    layout = ThreadLayout.of(args.cpu_threads, args.cpu_binding)
    num_bytes = sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    if len(layout.cores) < 2 or num_bytes < MIN_WEIGHT_BYTES:
        return None
    return frozenset(os.sched_getaffinity(0)) - {layout.cores[0]}
