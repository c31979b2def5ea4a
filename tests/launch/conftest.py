"""What the launcher's tests share."""

from support.stand_in_fixtures import (
    checkpoint_dir,
    generous_timeouts,
    make_server,
    repository,
)

__all__ = [
    "checkpoint_dir",
    "generous_timeouts",
    "make_server",
    "repository",
]
