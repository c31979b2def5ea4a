"""Which operations a model gets, and what is said about it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from charonia.config import EngineArgs
from charonia.data.ops import select
from charonia.data.ops.base import Ops
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.native import build
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.select import select_ops
from charonia.errors import ConfigError
from support.kernels import ISAS

FALLBACK = "warning: the CPU kernels cannot be used, torch's operations are, which are slower: "


@pytest.fixture(autouse=True)
def same_number_of_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def choose(
    dtype: torch.dtype = torch.float32, device: str = "cpu", **args: Any
) -> tuple[Ops[Any], list[str]]:
    lines: list[str] = []
    values: dict[str, Any] = {"model": "", "cpu_binding": "none"} | args
    return select_ops(EngineArgs(**values), dtype, torch.device(device), lines.append), lines


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def test_the_best_kernels_of_the_processor_are_taken() -> None:
    ops, lines = choose(cpu_threads=2)
    assert isinstance(ops, NativeOps)
    assert lines[-1] == f"computing with the CPU kernels for {ISAS[0]}, 2 threads, not bound"
    assert torch.get_num_threads() == 1  # two pools would fight over the same cores


@pytest.mark.parametrize("isa", ISAS)
def test_kernels_are_taken_by_name(isa: str) -> None:
    ops, lines = choose(cpu_kernels=isa, cpu_threads=1)
    assert isinstance(ops, NativeOps)
    assert lines[-1] == f"computing with the CPU kernels for {isa}, 1 thread, not bound"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_kernels_are_taken_whatever_keys_and_values_are_kept_in(kv_cache_dtype: str) -> None:
    ops, _ = choose(kv_cache_dtype=kv_cache_dtype)
    assert isinstance(ops, NativeOps)


def test_torchs_operations_are_taken_by_name() -> None:
    ops, lines = choose(cpu_kernels="torch", cpu_threads=2)
    assert isinstance(ops, ComposedOps)
    assert lines == ["computing with torch's operations, 2 threads"]
    assert torch.get_num_threads() == 2


def test_a_gpu_gets_composed_operations_whatever_the_processor() -> None:
    ops, lines = choose(device="cuda", cpu_kernels="portable")
    assert isinstance(ops, ComposedOps)
    assert lines == []


@pytest.mark.parametrize(
    ("dtype", "args", "problem"),
    [
        (torch.float16, {}, "they compute in float32 and bfloat16, not in float16"),
        (
            torch.float32,
            {"block_size": 8},
            "they need blocks of a multiple of 16 tokens, not of 8",
        ),
    ],
)
def test_what_the_kernels_cannot_do_torch_does_unless_they_were_asked_for_by_name(
    dtype: torch.dtype, args: dict[str, int], problem: str
) -> None:
    ops, lines = choose(dtype, cpu_threads=2, **args)
    assert isinstance(ops, ComposedOps)
    assert lines == [FALLBACK + problem]
    assert torch.get_num_threads() == 2
    with pytest.raises(ConfigError) as caught:
        choose(dtype, cpu_kernels="portable", **args)
    assert str(caught.value) == f"cpu_kernels = 'portable' cannot be used: {problem}"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_computes_and_it_is_said_once() -> None:
    ops, lines = choose(cpu_threads=2)
    assert isinstance(ops, ComposedOps)
    fallbacks = [line for line in lines if line.startswith(FALLBACK)]
    assert len(fallbacks) == 1
    assert "no-such-compiler" in fallbacks[0]
    assert torch.get_num_threads() == 2


def test_where_the_best_kernels_cannot_be_had_the_next_ones_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(isa: str, log: Any) -> Any:
        if isa == ISAS[0]:
            raise build.KernelsUnavailableError("an assembler from another age")
        return build.load_kernels(isa, log)

    monkeypatch.setattr(select, "load_kernels", load)
    ops, lines = choose(cpu_threads=2)
    assert isinstance(ops, NativeOps)
    assert ISAS[1] == ops.kernels.ISA
    assert (
        f"warning: the CPU kernels for {ISAS[0]} cannot be used: an assembler from another age"
        in lines
    )
    assert any(f"computing with the CPU kernels for {ISAS[1]}" in line for line in lines)


@pytest.mark.usefixtures("no_compiler")
def test_kernels_asked_for_by_name_that_cannot_be_built_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cpu_kernels = 'portable' .*no-such-compiler"):
        choose(cpu_kernels="portable")


def test_kernels_that_the_processor_does_not_have_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "_processor_flags", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(ConfigError) as caught:
        choose(cpu_kernels="avx512_bf16")
    assert "this processor has no avx512_bf16; it has avx2, portable" in str(caught.value)
    assert build.supported_isas()[0] == "avx2"


def test_a_binding_that_makes_no_sense_is_refused_on_a_cpu_alone() -> None:
    with pytest.raises(ConfigError, match="cpu_binding = 'x'"):
        choose(cpu_binding="x")
    choose(cpu_binding="x", device="cuda")


@pytest.mark.parametrize("kernels", [*ISAS, "torch"])
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_a_quantization_is_passed_on(kernels: str, quantization: str) -> None:
    from charonia.data.ops.base import MatrixWeights, NormWeights

    ops, _ = choose(cpu_kernels=kernels, quantization=quantization)
    # 0.3 is no whole number of steps of 1 / 127.
    weights = MatrixWeights(torch.tensor([[0.3, 1.0]]), None)
    x, residual = torch.tensor([[1.0, 0.3]]), torch.zeros(1, 2)
    norm = NormWeights(torch.ones(2), 0.0)
    out = ops.head(norm, weights)(x, residual)
    x_is_read_as = 38 / 127 if quantization == "w8a8" else 0.3
    normed = (0.5 * 1.09) ** -0.5
    assert out.item() == pytest.approx(normed * (38 / 127 + x_is_read_as), rel=1e-6)
    # A draft model of its own number format, beside a quantized one.
    out = ops.quantized(None).head(norm, weights)(x, residual)
    assert out.item() == pytest.approx(normed * 0.6, rel=1e-6)
