"""The name of a request of `llm` among the models, with a MAC so that clients cannot forge one.

A name begins with the request's arrival, on the monotonic clock that all processes of a machine
share. Timeouts count from it, and a later cancellation applies to the request wherever it is.

Owns the MAC ("seal") and the file of its secret. Must not know the contents of a request.

`tokenizer` names each request and passes its text on beside the ids. Triton brings both to
`scheduler`, whose inputs are public. So `tokenizer` seals name, ids and text together, and
`scheduler` takes no name and no text without that seal. Both read the secret from a file in the
runtime repository that only its owner can read. The first of them creates it.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from charonia.errors import ConfigError, InvalidRequestError

SECRET_FILE = "request.secret"
_NUM_SECRET_BYTES = 32
_NUM_TIME_DIGITS = 16
_NUM_NAME_DIGITS = 32
_NUM_DIGITS = _NUM_NAME_DIGITS + 64  # name and seal


class Sealer:
    """Makes and checks sealed names.

    Args:
        secret: of this run of the server.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def from_dir(cls, path: Path) -> "Sealer":
        """A sealer with the secret of a directory, which is created if there is none.

        Raises:
            ConfigError: it can be neither read nor created, or has the wrong length.
        """
        file = path / SECRET_FILE
        try:
            secret = _read_or_create(file)
        except OSError as error:
            raise ConfigError(
                f"{file.name} can be neither read nor made: {error.strerror}"
            ) from None
        if len(secret) != _NUM_SECRET_BYTES:
            raise ConfigError(
                f"{file.name} must hold {_NUM_SECRET_BYTES} bytes; remove it to get a new one"
            )
        return cls(secret)

    def new_key(self, ids: npt.NDArray[np.int32], text: str, arrived_at: float) -> str:
        """A new name, sealed with these ids and this text.

        Args:
            arrived_at: arrival of the request, on the monotonic clock.
        """
        name = f"{round(arrived_at * 1e9):0{_NUM_TIME_DIGITS}x}"
        name += secrets.token_hex((_NUM_NAME_DIGITS - _NUM_TIME_DIGITS) // 2)
        return name + self._seal(name, ids, text)

    def name_of(self, key: str, ids: npt.NDArray[np.int32], text: str) -> str:
        """The name in a key.

        Raises:
            InvalidRequestError: the key was not made here, or not for these ids and this text.
        """
        name, seal = key[:_NUM_NAME_DIGITS], key[_NUM_NAME_DIGITS:]
        is_ours = len(key) == _NUM_DIGITS and key.isascii()
        if not is_ours or not hmac.compare_digest(seal, self._seal(name, ids, text)):
            raise InvalidRequestError(
                "request_key and prompt_text are for other models; a client must not send them"
            )
        return name

    def _seal(self, name: str, ids: npt.NDArray[np.int32], text: str) -> str:
        content = ids.tobytes()
        mac = hmac.new(self._secret, f"{name} {len(content)} ".encode(), hashlib.sha256)
        mac.update(content)
        mac.update(text.encode())
        return mac.hexdigest()


def arrival_of(name: str) -> float:
    """Arrival of the request with this name, on the monotonic clock."""
    return int(name[:_NUM_TIME_DIGITS], 16) / 1e9


def _read_or_create(path: Path) -> bytes:
    """Read the secret. A new file appears atomically: it is written elsewhere, then linked."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_NUM_SECRET_BYTES))
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            draft.unlink()
    return path.read_bytes()
