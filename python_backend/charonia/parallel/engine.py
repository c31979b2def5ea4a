"""Loads an engine of one process or of several, as its arguments say.

Owns this choice. Must not know what runs the engine's steps.
"""

from collections.abc import Callable

from charonia.config import EngineArgs
from charonia.data.runner import Runner
from charonia.parallel.worker_group import WorkerGroup


def load_engine(
    args: EngineArgs,
    *,
    log: Callable[[str], None],
    on_lost: Callable[[str], None] | None = None,
) -> Runner:
    """Load an engine with all its ranks; this process is rank 0.

    Args:
        log, on_lost: see `WorkerGroup`.

    Raises:
        CheckpointError, ConfigError, RankLostError: see `Runner`. All ranks are ended then.
    """
    if args.num_ranks == 1:
        return Runner(args, log=log)
    group = WorkerGroup(args, log=log, on_lost=on_lost)
    try:
        return Runner(args, log=log, group=group)
    except BaseException:
        group.close()
        raise
