"""What the tests of supervision share."""

from support.stand_in_fixtures import (
    clock,
    generous_timeouts,
    make_server,
    questions,
    repository,
    supervise,
)

__all__ = [
    "clock",
    "generous_timeouts",
    "make_server",
    "questions",
    "repository",
    "supervise",
]
