"""Compiles the CPU kernels once for this processor, and loads them.

    python -m charonia.data.ops.native.build          # done by `make setup` and the image

Owns the choice of instruction set and the cache on disk. Must not know what the kernels compute.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

SOURCE_DIR = Path(__file__).parent
_MODULE = "charonia_kernels"  # as kernels.cpp says
_AVX2_FLAGS = ["-mavx2", "-mfma"]
_AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2_FLAGS]
_AVX512_VNNI_FLAGS = [*_AVX512_FLAGS, "-mavx512vnni"]
# Every processor with products of bfloat16 has products of integers.
_AVX512_BF16_FLAGS = [*_AVX512_VNNI_FLAGS, "-mavx512bf16"]
FLAGS = {
    "amx_bf16": [*_AVX512_BF16_FLAGS, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "avx512_bf16": _AVX512_BF16_FLAGS,
    "avx512_vnni": _AVX512_VNNI_FLAGS,
    "avx512": _AVX512_FLAGS,
    "avx2": _AVX2_FLAGS,
    "portable": [],
}
"""Compiler flags of each instruction set, best first."""

_AVX2 = {"avx2", "fma"}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", *_AVX2}
_AVX512_VNNI = {*_AVX512, "avx512_vnni"}
_AVX512_BF16 = {*_AVX512_VNNI, "avx512_bf16"}
_NEEDED = {
    "amx_bf16": {*_AVX512_BF16, "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": set(),
}
_COMMON_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wno-ignored-attributes",
]


class KernelsUnavailableError(Exception):
    """The kernels can be neither loaded nor built, for the reason in the text."""


def supported_isas() -> list[str]:
    """All instruction sets of this processor, best first."""
    flags = _processor_flags()
    return [isa for isa, needed in _NEEDED.items() if needed <= flags]


def load_kernels(isa: str, log: Callable[[str], None]) -> ModuleType:
    """Load the kernels for an instruction set; build them first if they are not cached.

    Args:
        isa: one of `supported_isas()`.
        log: takes a line when kernels are built.

    Raises:
        KernelsUnavailableError: the compiler is missing or fails, or the library cannot be loaded.
    """
    path = build_kernels(isa, log)
    if isa == "amx_bf16" and not _may_use_tiles():
        raise KernelsUnavailableError("Linux does not let this process use AMX")
    try:
        return _load(path)
    except ImportError as error:
        raise KernelsUnavailableError(_reason(error)) from error


def build_kernels(isa: str, log: Callable[[str], None]) -> Path:
    """Compile the kernels for an instruction set unless they are cached; return the library.

    Args:
        isa: a key of `FLAGS`. log: takes a line before and after; it takes about half a minute.

    Raises:
        KernelsUnavailableError: the compiler is missing or fails.
    """
    path = _library(isa)
    if path.exists():
        return path
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise KernelsUnavailableError(
            f"there is no C++ compiler {compiler!r} (the variable CXX names another)"
        )
    log(f"building the CPU kernels for {isa} (once, about half a minute)")
    started = time.monotonic()
    try:
        _build(isa, path)
    except (OSError, ImportError, RuntimeError) as error:
        raise KernelsUnavailableError(_reason(error)) from error
    log(f"built the CPU kernels for {isa} in {time.monotonic() - started:.0f} s")
    return path


def _reason(error: Exception) -> str:
    """The most informative line of a compiler's output, or of another error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0])


@cache
def _load(path: Path) -> ModuleType:
    # In a package named after the library: modules of the same name would count as one module.
    spec = importlib.util.spec_from_file_location(f"{path.stem}.{_MODULE}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(isa: str, path: Path) -> None:
    # Imported here: the import takes a second, and is not needed if the kernels are cached.
    from torch.utils import cpp_extension

    path.parent.mkdir(parents=True, exist_ok=True)
    _find_ninja()
    # Built in a temporary directory and moved into the cache: processes that build at the same time
    # do not disturb each other, and a killed one leaves no partial library and no lock.
    directory = tempfile.mkdtemp(prefix="build-", dir=path.parent)
    try:
        cpp_extension.load(
            name=_MODULE,
            sources=[str(path) for path in sorted(SOURCE_DIR.glob("*.cpp"))],
            extra_cflags=[*_COMMON_FLAGS, *FLAGS[isa]],
            build_directory=directory,
            is_python_module=False,
        )
        # By pattern: torch numbers libraries that one process builds repeatedly.
        next(Path(directory).glob("*.so")).replace(path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _find_ninja() -> None:
    """Put this Python's scripts on PATH: the environment with ninja may not be activated."""
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), scripts))


def choices_path(isa: str) -> Path:
    """The file beside cached kernels that remembers what was measured with them; see `tuning`."""
    return _library(isa).with_suffix(".choices.json")


def _library(isa: str) -> Path:
    """The path of cached kernels; the name contains a digest of everything they depend on."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.read_bytes())
    for part in (torch.__version__, sys.implementation.cache_tag, *_COMMON_FLAGS, *FLAGS[isa]):
        digest.update(str(part).encode())
    key = digest.hexdigest()[:16]
    return _cache_dir() / f"charonia_kernels_{isa}_{key}.so"


def _cache_dir() -> Path:
    """Return the cache's directory, in TORCH_EXTENSIONS_DIR like torch's, or the user's cache."""
    if directory := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(directory) / "charonia"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "charonia"


@cache
def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = frozenset(next((line for line in lines if line.startswith("flags")), "").split())
    return flags - {"amx_tile"} if "amx_tile" in flags and not _may_use_tiles() else flags


@cache
def _may_use_tiles() -> bool:
    """Request the tile registers of AMX from Linux; a process may not use them before.

    See "Using XSTATE features in user space applications" in Linux's documentation of x86.
    """
    arch_prctl, request, tile_data = 158, 0x1023, 18
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)
    return refused == 0


def main() -> None:
    """Build the kernels for this processor, or for the instruction sets in the arguments."""
    parser = argparse.ArgumentParser(description="Build the CPU kernels ahead of their first use.")
    parser.add_argument(
        "isas", nargs="*", metavar="ISA", help=f"of {', '.join(FLAGS)}; default: this processor's"
    )
    named = parser.parse_args().isas
    for isa in named:
        if isa not in FLAGS:
            parser.error(f"unknown instruction set {isa!r}; accepted are {', '.join(FLAGS)}")
    problems = []
    for isa in named or supported_isas():
        try:
            path = build_kernels(isa, lambda line: print(f"charonia: {line}", flush=True))
        except KernelsUnavailableError as error:
            problems.append(f"charonia: the CPU kernels for {isa} cannot be built: {error}")
        else:
            print(f"charonia: the CPU kernels for {isa} are at {path}")
            if not named:
                return
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
