"""`charonia log-level`: shows or changes how much a running server logs.

Owns finding the server. Must not know who logs what.
"""

from pathlib import Path

from charonia.errors import LaunchError
from charonia.events import Level
from charonia.launch.commands.reload import find_run
from charonia.launch.server.runtime_dir import LOG_LEVEL_FILE
from charonia.log_level import LevelFile, write_level


def log_level(level: Level | None, *, runtime_dir: Path | None, url: str | None) -> None:
    """Change the level of a running `charonia serve`, and print the present one.

    Args:
        level: the new one; None changes nothing.
        runtime_dir, url: of the server, as for `reload`.

    Raises:
        LaunchError: there is no such server, or its level cannot be read or written.
    """
    path = find_run(runtime_dir, url) / LOG_LEVEL_FILE
    try:
        file = LevelFile(path)
        if level is not None:
            write_level(path, level)
        print(file.read())
        file.close()
    except OSError as error:
        raise LaunchError(f"the level in {path} cannot be used: {error.strerror}") from None
