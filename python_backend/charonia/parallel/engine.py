"""An engine of one process or of many, by its arguments.

Owns the choice. Must not know who runs its steps.
"""

from collections.abc import Callable

from charonia.config import EngineArgs
from charonia.data.runner import Runner
from charonia.parallel.team import RankTeam


def load_engine(
    args: EngineArgs,
    *,
    log: Callable[[str], None],
    on_lost: Callable[[str], None] | None = None,
) -> Runner:
    """Load what `args` say, with all ranks; this process is rank 0.

    Args:
        log, on_lost: see `RankTeam`.

    Raises:
        CheckpointError, ConfigError, RankLostError: see `Runner`. No rank is left behind.
    """
    if args.num_ranks == 1:
        return Runner(args, log=log)
    team = RankTeam(args, log=log, on_lost=on_lost)
    try:
        return Runner(args, log=log, team=team)
    except BaseException:
        team.close()
        raise
