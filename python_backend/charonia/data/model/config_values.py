"""Typed access to the values of a config.json, with checks of type and range.

Owns the errors for invalid values. Must not know the meaning of keys.
"""

from dataclasses import dataclass
from typing import Any

from charonia.data.model.config_keys import Keys
from charonia.errors import CheckpointError, shown

# Far beyond any model's; within them no tensor's shape or float32 number overflows.
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30


@dataclass(frozen=True)
class ConfigValues:
    """A configuration with typed access; `keys` has the defaults."""

    values: dict[str, Any]
    keys: Keys

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Read a key with an integer; `default` replaces null."""
        return as_integer(name, self.get(name, default), least)

    def number(self, name: str) -> float:
        """Read a key with a number above 0."""
        return as_number(name, self.get(name))

    def flag(self, name: str) -> bool:
        """Read a key that is true or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise CheckpointError(f"{name} must be true or false, but is {shown(value)}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; `default` replaces null, if the key may be null."""
        if name not in self.values:
            value = self.keys.default(name)
            return default if value is None else value
        value = self.values[name]
        return default if value is None and name in self.keys.nullable else value


def as_integer(name: str, value: Any, least: int = 1) -> int:
    """Check that a value is an integer of at least `least`; `name` is for the error."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not least <= value <= _MAX_INTEGER:
        raise CheckpointError(
            f"{name} must be an integer from {least} to {_MAX_INTEGER}, but is {shown(value)}"
        )
    return int(value)


def as_number(name: str, value: Any) -> float:
    """Check that a value is a number above 0; `name` is for the error."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1 / _MAX_NUMBER <= value <= _MAX_NUMBER:
        raise CheckpointError(
            f"{name} must be a number above 0 (from {1 / _MAX_NUMBER:g} to {_MAX_NUMBER:g}),"
            f" but is {shown(value)}"
        )
    return float(value)
