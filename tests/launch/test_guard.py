"""How the embedded server gets its guard; what it is good for is tested end to end."""

from pathlib import Path

import pytest

from charonia.launch.discovery import Installation
from charonia.launch.guard import MAX_ELEMENTS, make_guard

EMBEDDED = Installation(Path("root"), Path("stub"), ())
CONTAINERS = Installation(Path("root"), None, ())


def test_the_guard_is_loaded_before_what_is_to_be_loaded_anyway(tmp_path: Path) -> None:
    guard = make_guard(EMBEDDED, tmp_path)
    assert guard.describe() == f"request_guard max_elements={MAX_ELEMENTS}"
    environment = {"LD_PRELOAD": "libjemalloc.so"}
    guard.add_to(environment)
    assert environment == {"LD_PRELOAD": f"{tmp_path / 'guard.so'} libjemalloc.so"}
    assert (tmp_path / "guard.so").exists()


def test_a_containers_server_needs_none(tmp_path: Path) -> None:
    guard = make_guard(CONTAINERS, tmp_path)
    environment: dict[str, str] = {}
    guard.add_to(environment)
    assert (guard.describe(), environment) == ("request_guard max_elements=none", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "the C compiler 'no-such-compiler' (the variable CC names another)"),
        ("false", "the C compiler 'false' fails: exit code 1"),
    ],
)
def test_without_a_compiler_the_log_says_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    guard = make_guard(EMBEDDED, tmp_path)
    environment: dict[str, str] = {}
    guard.add_to(environment)
    assert environment == {}
    assert guard.describe().startswith("request_guard_missing reason=")
    assert reason in guard.describe()
