"""The file of a run's level."""

from pathlib import Path

import pytest

from charonia.events import LEVELS
from charonia.log_level import VARIABLE, LevelFile, write_level


def test_a_reader_has_each_level_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "level"
    write_level(path, "info")
    file = LevelFile(path)
    for level in (*LEVELS, *reversed(LEVELS)):
        write_level(path, level)
        assert file.read() == level
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    assert file.read() == LEVELS[0]
    file.close()
    assert file.read() == "info"


@pytest.mark.parametrize("content", ["", "loud\n", "error and more"])
def test_a_file_that_names_no_level_means_info(tmp_path: Path, content: str) -> None:
    path = tmp_path / "level"
    path.write_text(content)
    file = LevelFile(path)
    assert file.read() == "info"
    path.write_text("debug\n")  # by hand
    assert file.read() == "debug"
    file.close()


def test_without_a_file_the_level_is_info(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert LevelFile.of_environment().read() == "info"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    assert LevelFile.of_environment().read() == "info"
    write_level(tmp_path / "level", "error")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "level"))
    file = LevelFile.of_environment()
    assert file.read() == "error"
    file.close()
