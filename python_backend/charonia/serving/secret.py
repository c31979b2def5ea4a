"""The secret that the engine takes plans by.

Owns its file: of the runtime repository, readable by its owner alone. Scheduler and engine may
come in either order or at once. Must not know what the secret is for.
"""

import os
import secrets
from pathlib import Path

from charonia.errors import ConfigError

FILE_NAME = "plan.secret"
NUM_DIGITS = 64


def read_or_create(path: Path) -> str:
    """Read the secret; whoever comes first makes it.

    The file appears whole or not at all: it is written under another name and then linked.

    Raises:
        ConfigError: it can be neither read nor made, or is no secret.
    """
    try:
        secret = _read_or_create(path)
    except OSError as error:
        raise ConfigError(f"{path.name} can be neither read nor made: {error.strerror}") from None
    if len(secret) < NUM_DIGITS:
        raise ConfigError(
            f"{path.name} must hold {NUM_DIGITS} characters; remove it to get a new one"
        )
    return secret


def _read_or_create(path: Path) -> str:
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(NUM_DIGITS // 2))
            os.link(draft, path)
        except FileExistsError:
            pass  # the other one was faster
        finally:
            draft.unlink()
    return path.read_text(encoding="ascii")
