"""The name that a request of `llm` has among the models, sealed so that no client can make one up.

A name begins with when the request came, on the clock that all processes of a machine share: its
time runs from then on, and who cancels it later means it, wherever it is.

Owns the seal and the file of its secret. Must not know what a request asks for.

`tokenizer` names each request and hands its text on beside the ids; Triton brings both to
`scheduler`, whose inputs are public. So `tokenizer` seals name, ids and text together, and
`scheduler` takes no text and no name without that seal. Both read the secret from a file, of the
runtime repository and readable by its owner alone, which the first of them makes.
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
        secret: of the run.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def from_dir(cls, path: Path) -> "Sealer":
        """With the secret of a directory; whoever comes first makes it.

        Raises:
            ConfigError: it can be neither read nor made, or is no secret.
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
            arrived_at: when the request came, on the monotonic clock.
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
    """When the request of a name came, on the monotonic clock."""
    return int(name[:_NUM_TIME_DIGITS], 16) / 1e9


def _read_or_create(path: Path) -> bytes:
    """The file appears whole or not at all: it is written under another name and then linked."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_NUM_SECRET_BYTES))
            os.link(draft, path)
        except FileExistsError:
            pass  # the other one was faster
        finally:
            draft.unlink()
    return path.read_bytes()
