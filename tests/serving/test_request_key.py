"""The secret that seals names: made once, for its owner alone."""

from pathlib import Path

import numpy as np
import pytest

from charonia.errors import ConfigError
from charonia.serving.requests.request_key import SECRET_FILE, Sealer, arrival_of

IDS = np.array([1, 2], dtype=np.int32)


def test_two_processes_have_one_secret(tmp_path: Path) -> None:
    one, other = Sealer.from_dir(tmp_path), Sealer.from_dir(tmp_path)
    key = one.new_key(IDS, "ü", 7.25)
    assert other.name_of(key, IDS, "ü") == key[:32]
    assert arrival_of(key[:32]) == 7.25
    assert one.new_key(IDS, "ü", 7.25) != key
    path = tmp_path / SECRET_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_secret_or_none_that_can_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).touch()
    with pytest.raises(ConfigError, match=r"request\.secret must hold 32 bytes"):
        Sealer.from_dir(tmp_path)
    with pytest.raises(ConfigError, match=r"request\.secret can be neither read nor made"):
        Sealer.from_dir(tmp_path / "nowhere")
