"""JSON files of a checkpoint, which may come from anywhere.

Owns how such a file is read, the errors of unreadable ones, and when values are equal. Knows
nothing about the meaning of values.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from charonia.errors import CheckpointError, shown


def read_json_object(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Read a file that must hold a JSON object.

    Args:
        is_optional: a file that does not exist counts as an empty object.

    Raises:
        CheckpointError: it cannot be read, is not a JSON object, or is nested too deeply; the text
            has its name, never its path.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if is_optional and isinstance(error, FileNotFoundError):
            return {}
        raise CheckpointError(
            f"the checkpoint's {path.name} cannot be read: {error.strerror}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's {path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"the checkpoint's {path.name} must be a JSON object, but is {shown(value)}"
        )
    return value


def is_one_of(value: Any, accepted: Iterable[Any]) -> bool:
    """Return whether a JSON value is one of several, where 0 is not false and 1 not true."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted
    )
