"""Building the kernels and finding them again.

How a library is built, cached and failed at is shown with a source of a few lines, since the
kernels themselves take half a minute; the compiler, ninja and the loader are the real ones.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from charonia.config import EngineArgs
from charonia.data.ops.native import build
from charonia.data.ops.native.build import (
    KernelsUnavailableError,
    load_kernels,
    supported_isas,
)
from support.long import long
from support.waiting import WAIT_S, eventually

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "m", nullptr, -1};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_charonia_kernels() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "ANSWER", 42);
  return module;
}
"""
LOAD_IN_A_PROCESS = """
import sys
from pathlib import Path
from charonia.data.ops.native import build
build.SOURCE_DIR = Path(sys.argv[1])
print("answer", build.load_kernels("portable", print).ANSWER)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source in place of the kernels, and an empty cache."""
    source = tmp_path / "source"
    source.mkdir()
    # Unlike in every test, for torch builds a library of one name only once in a process.
    (source / "small.cpp").write_text(f"// {tmp_path.name}\n{SOURCE}")
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "charonia"


def start_load(source: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD_IN_A_PROCESS, str(source)],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_library_is_built_once_and_then_found(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    assert load_kernels("portable", lines.append).ANSWER == 42
    assert [line.split(" for portable")[0] for line in lines] == [
        "building the CPU kernels",
        "built the CPU kernels",
    ]
    (library,) = cache.iterdir()
    assert library.name.startswith("charonia_kernels_portable_")
    # Neither this process nor another one needs a compiler again.
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert load_kernels("portable", lines.append).ANSWER == 42
    assert len(lines) == 2
    out, error = start_load(cache.parents[1] / "source").communicate(timeout=WAIT_S)
    assert out == "answer 42\n", error


def test_the_cache_is_keyed_by_sources_flags_and_instruction_set(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {build._library(isa) for isa in build.FLAGS}
    assert len(before) == len(build.FLAGS)
    assert {path.parent for path in before} == {cache}
    (build.SOURCE_DIR / "more.h").write_text("// more")
    after = {build._library(isa) for isa in build.FLAGS}
    assert not before & after
    monkeypatch.setitem(build.FLAGS, "portable", ["-O0"])
    assert build._library("portable") not in before | after


def test_the_users_cache_directory_is_taken_where_nothing_else_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._library("portable").parent == tmp_path / "charonia"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build._library("portable").parent == tmp_path / ".cache" / "charonia"


def unavailable() -> str:
    with pytest.raises(KernelsUnavailableError) as caught:
        load_kernels("portable", lambda line: None)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_without_a_compiler_the_reason_is_given(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in unavailable()
    assert not cache.exists()


def test_a_compiler_that_fails_leaves_nothing_behind(cache: Path) -> None:
    (build.SOURCE_DIR / "broken.cpp").write_text("#error this cannot be compiled")
    assert "error: #error this cannot be compiled" in unavailable()
    assert list(cache.iterdir()) == []


def compiler_script(path: Path, action: str) -> str:
    """A compiler that does something else where it should compile."""
    path.write_text(f'#!/bin/sh\ncase "$*" in *-c*) {action};; esac\nexec c++ "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_what_could_not_be_built_can_be_tried_again_in_the_same_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", compiler_script(tmp_path / "compiler", "exit 1"))
        unavailable()
    assert load_kernels("portable", lambda line: None).ANSWER == 42


def test_a_cache_that_cannot_be_written_is_a_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "Not a directory" in unavailable()


def test_a_library_that_cannot_be_loaded_is_a_reason(cache: Path) -> None:
    cache.mkdir(parents=True)
    build._library("portable").write_bytes(b"\x7fELF")
    assert unavailable()


@long
def test_processes_that_build_at_once_do_not_disturb_each_other(cache: Path) -> None:
    builds = [start_load(build.SOURCE_DIR) for _ in range(2)]
    for process in builds:
        out, error = process.communicate(timeout=WAIT_S)
        assert out.endswith("answer 42\n"), error
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_build_that_was_killed_does_not_stop_the_next(cache: Path, tmp_path: Path) -> None:
    slow = compiler_script(tmp_path / "slow", 'touch "$0.started"; exec sleep 300')
    process = start_load(build.SOURCE_DIR, CXX=slow)
    started = tmp_path / "slow.started"
    eventually(lambda: started.exists() or process.poll() is not None, "it is compiled")
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not build._library("portable").exists()
    assert load_kernels("portable", lambda line: None).ANSWER == 42


def test_the_command_says_where_the_library_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "portable"])
    build.main()
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "charonia: building the CPU kernels for portable (once, about half a minute)"
    last = f"charonia: the CPU kernels for portable are at {build._library('portable')}"
    assert first[-1] == last
    build.main()
    assert capsys.readouterr().out.splitlines() == [last]


def test_the_command_fails_with_the_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "portable"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match=r"for portable cannot be built: .*no-such-compiler"):
        build.main()


def test_the_command_refuses_an_instruction_set_that_it_does_not_know(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "sse9"])
    with pytest.raises(SystemExit):
        build.main()
    assert (
        "'sse9'; accepted are amx_bf16, avx512_bf16, avx512_vnni, avx512, avx2, portable"
        in capsys.readouterr().err
    )


AVX512 = "fpu avx2 fma avx512f avx512bw avx512dq avx512vl"  # Skylake-X
VNNI = f"{AVX512} avx512_vnni"  # Cascade Lake, Ice Lake
BF16 = f"{VNNI} avx512_bf16"  # Zen 4


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{BF16} avx512vbmi amx_tile amx_bf16 amx_int8", list(build.FLAGS)),
        (f"{BF16} avx512vbmi amx_bf16 amx_int8", list(build.FLAGS)[1:]),
        (f"{BF16} avx512vbmi amx_tile amx_bf16", list(build.FLAGS)[1:]),
        (BF16, ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]),
        (f"{VNNI} avx512vbmi", ["avx512_vnni", "avx512", "avx2", "portable"]),
        (f"{AVX512} avx512_bf16", ["avx512", "avx2", "portable"]),
        (AVX512, ["avx512", "avx2", "portable"]),
        ("fpu avx2 fma avx512f avx512bw avx512dq", ["avx2", "portable"]),
        ("fpu avx2", ["portable"]),
        ("", ["portable"]),
    ],
)
def test_the_best_instruction_set_is_one_whose_every_flag_the_processor_has(
    flags: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_processor_flags", lambda: frozenset(flags.split()))
    assert supported_isas() == expected


def test_every_instruction_set_can_be_asked_for_by_name_and_is_in_the_image() -> None:
    names = get_args(get_type_hints(EngineArgs)["cpu_kernels"])
    assert names == ("auto", *build.FLAGS, "torch")
    dockerfile = Path(__file__).parents[2] / "docker" / "Dockerfile"
    assert f"ops.native.build {' '.join(build.FLAGS)}\n" in dockerfile.read_text(encoding="utf-8")
