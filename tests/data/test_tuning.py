"""What is measured of products, how it is remembered, and that no choice changes a result."""

import fcntl
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.config import EngineArgs, Quantization
from charonia.data.ops import select
from charonia.data.ops.base import MatrixWeights, NormWeights
from charonia.data.ops.native import tuning
from charonia.data.ops.native.build import choices_path
from charonia.data.ops.native.tuning import (
    AHEAD_BYTES,
    MANY_ROWS,
    Choice,
    Tuner,
    fastest,
    measure_choice,
)
from charonia.data.ops.select import select_ops
from charonia.data.usage import used_bytes
from support.kernels import ISAS, kernels_for, matrix_of, native_ops
from support.ranks import Ranks
from support.waiting import WAIT_S
from support.weights import QUANTIZATIONS

DTYPES = (torch.float32, torch.bfloat16)
DEFAULT = Choice(4096, 4096)
OTHER = Choice(8192, 1024, 32)
LARGE = torch.ones(1024, 512, dtype=torch.bfloat16)
"""Just as large as is worth a choice."""

Measure = Callable[[ModuleType, Tensor, Any], Choice]


def measured_as(*choices: Choice) -> Measure:
    """Measure nothing; give these choices, one after the other."""
    left = list(choices)
    return lambda kernels, weight, quantization: left.pop(0)


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"measured in \d+\.\d s", "measured", line) for line in lines]


def tune(path: Path, measure: Measure) -> list[str]:
    """Choose in what counts as a new process; return what was logged."""
    lines: list[str] = []
    native_ops(ISAS[0], 1)  # sets the threads of the kernels
    kernels = kernels_for(ISAS[0])
    Tuner(kernels, path, lines.append, measure).tune(LARGE, kernels.Quantization.none)
    return without_times(lines)


def choice_of_new_matrix(
    weight: Tensor = LARGE, quantization: Quantization | None = None
) -> Choice:
    return Choice(*matrix_of(ISAS[0], weight, None, quantization).choice)


# --------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_no_choice_changes_a_bit_of_a_result(
    isa: str, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    """Three groups of inputs; rows of one tile, of some, and more than are multiplied at once."""
    native_ops(isa, 2)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 2100, generator=generator).to(dtype)
    x = torch.randn(400, 2100, generator=generator).to(dtype)
    matrix = matrix_of(isa, weight, None, quantization)
    alone = torch.cat([matrix(row[None], True) for row in x])
    # Distances do not depend on each other, so one list goes through both.
    choices = {
        Choice(ahead, other, start, tiles)
        for ahead, other in zip(AHEAD_BYTES, reversed(AHEAD_BYTES), strict=True)
        for start, tiles in zip((None, 1, *MANY_ROWS), (1, 2, 7, 33, 500, 1, 9), strict=True)
    }
    for choice in choices:
        matrix.choice = astuple(choice)
        assert Choice(*matrix.choice) == choice
        for rows in (1, 2, 7, 8, 13, 33, 64, 129, 193, 400):
            assert torch.equal(matrix(x[:rows], True), alone[:rows]), (choice, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_widened_once_only_where_the_processor_widens_them(isa: str) -> None:
    has_bf16 = "bf16" in isa
    has_integers = has_bf16 or "vnni" in isa
    may_widen = {
        (dtype, quantization): matrix_of(isa, torch.ones(2, 2, dtype=dtype), None, quantization)
        for dtype, quantization in itertools.product(DTYPES, QUANTIZATIONS)
    }
    assert {key: matrix.may_widen for key, matrix in may_widen.items()} == {
        (torch.float32, None): False,
        (torch.float32, "int8"): True,
        (torch.float32, "w8a8"): not has_integers,
        (torch.bfloat16, None): not has_bf16,
        (torch.bfloat16, "int8"): not has_bf16,
        (torch.bfloat16, "w8a8"): not has_integers,
    }
    for (dtype, quantization), matrix in may_widen.items():
        usual = Choice(*matrix.default_choice)
        is_cheap = (dtype, quantization) == (torch.float32, "int8") and isa not in (
            "avx2",
            "portable",
        )
        is_usual = matrix.may_widen and not is_cheap
        assert (usual.widened_from is not None) == is_usual
        assert usual.ahead_of_one == usual.ahead_of_several
        assert usual.ahead_of_one in AHEAD_BYTES


def test_a_choice_is_for_large_matrices_of_its_format_and_inputs() -> None:
    kernels = kernels_for(ISAS[0])
    before = choice_of_new_matrix()
    other = Choice(before.ahead_of_one * 2, 12_345, 77)
    bf16, none = torch.bfloat16, kernels.Quantization.none
    kernels.choose(bf16, none, 512, astuple(other))
    try:
        assert choice_of_new_matrix() == other
        assert choice_of_new_matrix(torch.ones(2048, 512, dtype=bf16)) == other
        assert choice_of_new_matrix(LARGE[:-1]) != other
        assert choice_of_new_matrix(torch.ones(1024, 514, dtype=bf16)) != other
        assert choice_of_new_matrix(LARGE.float()) != other
        assert choice_of_new_matrix(quantization="int8") != other
    finally:
        kernels.choose(bf16, none, 512, astuple(before))


@pytest.mark.parametrize(
    "fields",
    [(0, 1, None, 1), (1, 0, None, 1), (1, 2**20 + 1, None, 1), (1, 1, 0, 1), (1, 1, 1, 0)],
)
def test_a_choice_that_makes_no_sense_is_refused(
    fields: tuple[int, int, int | None, int],
) -> None:
    kernels = kernels_for(ISAS[0])
    matrix = matrix_of(ISAS[0], LARGE, None, None)
    with pytest.raises(ValueError, match="accepted are 1"):
        matrix.choice = fields
    with pytest.raises(ValueError, match="accepted are 1"):
        kernels.choose(torch.bfloat16, kernels.Quantization.none, 512, fields)


# ----------------------------------------------------------------------------------- measuring


def times_of(speeds: dict[Choice, float], seed: int, noise: float) -> Callable[[Choice], float]:
    """Take times of a busy machine: each is a little longer, and every fifth much longer."""
    generator = random.Random(seed)

    def time_of(choice: Choice) -> float:
        interrupted = 1.5 if generator.random() < 0.2 else 1.0
        return speeds[choice] * (1 + noise * generator.random()) * interrupted

    return time_of


CANDIDATES = [Choice(ahead, 4096) for ahead in AHEAD_BYTES]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_noise_does_not_choose(noise: float) -> None:
    equal = dict.fromkeys(CANDIDATES, 1.0)
    chosen = [fastest(CANDIDATES, DEFAULT, times_of(equal, seed, noise)) for seed in range(100)]
    assert chosen.count(DEFAULT) >= 98


def test_the_default_is_kept_unless_another_is_clearly_faster() -> None:
    other = CANDIDATES[-1]
    for gain, expected in ((0.02, DEFAULT), (0.04, other)):
        speeds = dict.fromkeys(CANDIDATES, 1.0) | {other: 1.0 - gain}
        assert fastest(CANDIDATES, DEFAULT, times_of(speeds, 0, 0.0)) == expected
    speeds = dict.fromkeys(CANDIDATES, 1.0) | {other: 0.8, CANDIDATES[0]: 0.9}
    for seed in range(100):
        assert fastest(CANDIDATES, DEFAULT, times_of(speeds, seed, 0.1)) == other


def test_a_slow_phase_of_the_machine_does_not_choose() -> None:
    calls = itertools.count()

    def time_of(choice: Choice) -> float:
        return 2.0 if next(calls) < 30 else 1.0

    assert tuning._first_of(CANDIDATES, DEFAULT, time_of) == DEFAULT


def test_one_lucky_time_does_not_choose() -> None:
    calls = itertools.count()

    def time_of(choice: Choice) -> float:
        return 1.0 if choice == DEFAULT else 0.5 if next(calls) % 20 == 0 else 1.2

    assert fastest(CANDIDATES, DEFAULT, time_of) == DEFAULT


def test_what_is_faster_than_the_default_must_be_so_twice() -> None:
    """The default is disturbed each time that it is measured, but not for ever."""
    calls = itertools.count()

    def time_of(choice: Choice) -> float:
        return 2.0 if choice == DEFAULT and next(calls) < tuning._MAX_TURNS else 1.0

    assert fastest(CANDIDATES, DEFAULT, time_of) == DEFAULT


@pytest.mark.parametrize(
    ("usual", "crossing", "expected"),
    [
        (None, 1000, None),
        (None, 64, 64),
        (None, 50, 64),
        (None, 1, 8),
        (64, 64, 64),
        (64, 32, 32),
        (64, 1000, None),
        (13, 16, 13),  # neither is known to be better
        (13, 8, 8),
        (5, 8, 5),
        (5, 32, 32),
    ],
)
def test_weights_are_widened_once_from_where_it_is_faster(
    usual: int | None, crossing: int, expected: int | None
) -> None:
    def time_of(rows: int, choice: Choice) -> float:
        is_widened = choice.widened_from is not None and rows >= choice.widened_from
        return 1.0 if is_widened == (rows >= crossing) else 1.1

    assert tuning._widened_from(Choice(4096, 4096, usual), time_of) == expected


@pytest.mark.parametrize(("crossing", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8), (99, 9)])
def test_tiles_are_used_from_where_they_are_as_fast(crossing: int, expected: int) -> None:
    def time_of(rows: int, choice: Choice) -> float:
        is_by_tiles = rows >= choice.tiles_from
        return 1.0 if is_by_tiles == (rows >= crossing) else 1.1

    assert tuning._tiles_from(DEFAULT, time_of) == expected


def test_vectors_take_the_place_of_tiles_only_where_sums_are_exact() -> None:
    for isa, dtype, quantization in itertools.product(ISAS, DTYPES, QUANTIZATIONS):
        matrix = matrix_of(isa, torch.ones(2, 2, dtype=dtype), None, quantization)
        is_exact = quantization == "w8a8"
        assert matrix.may_do_without_tiles == ("amx" in isa and is_exact)
        assert Choice(*matrix.default_choice).tiles_from == 1


def measure_beside_a_model(isa: str) -> tuple[Choice, int, int]:
    """Measure between the matrices of a model.

    Returns:
        what was chosen, the bytes that were taken meanwhile, and those of the matrices.
    """
    native_ops(isa, 1)
    kernels, weight = kernels_for(isa), torch.ones(3072, 576, dtype=torch.bfloat16)
    none = kernels.Quantization.none
    choice = measure_choice(kernels, weight, none)  # the kernels keep what they need once
    before = used_bytes(torch.device("cpu"))
    model = []
    for _ in range(2):
        model.append(kernels.Matrix(weight, None, quantization=none))
        choice = measure_choice(kernels, weight, none)
    return choice, used_bytes(torch.device("cpu")) - before, len(model) * weight.nbytes


def test_measuring_chooses_a_candidate_and_gives_its_memory_back() -> None:
    ranks = Ranks(1)
    try:
        ranks.start(0, measure_beside_a_model, ISAS[0])
        choice, taken, own = ranks.result(0)
    finally:
        ranks.close()
    assert choice.ahead_of_one in AHEAD_BYTES
    assert choice.ahead_of_several in AHEAD_BYTES
    assert choice.widened_from in (None, *MANY_ROWS)
    assert choice.tiles_from == 1
    assert taken < own + 24 * 2**20, f"{(taken - own) / 2**20:.0f} MiB"


# --------------------------------------------------------------------------------- remembering

IN_A_PROCESS = """
import sys, time
from pathlib import Path
import torch
from charonia.data.ops.native.build import load_kernels
from charonia.data.ops.native.tuning import Choice, Tuner

isa, folder, name, num_processes = sys.argv[1:]
kernels = load_kernels(isa, print)
kernels.set_threads(1, [])

def measure(*args):
    time.sleep(0.5)
    return Choice(8192, 1024, 32)

(Path(folder) / f"ready {name}").touch()
while len(list(Path(folder).glob("ready *"))) < int(num_processes):
    time.sleep(0.001)
path = Path(folder) / "kernels.choices.json"
weight = torch.ones(1024, 512, dtype=torch.bfloat16)
Tuner(kernels, path, print, measure).tune(weight, kernels.Quantization.none)
"""


def lines_of_processes(folder: Path, *names: str) -> list[str]:
    """Choose in processes that begin at once; return what they log, sorted."""
    command = [sys.executable, "-c", IN_A_PROCESS, ISAS[0], str(folder)]
    processes = [
        subprocess.Popen(
            [*command, name, str(len(names))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    outputs = [process.communicate(timeout=WAIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(names), outputs
    return without_times(sorted(out.strip() for out, _ in outputs))


TEXT = (
    "weights read 8 KiB ahead for one row and 1 KiB for several, widened once for 32 rows or more"
)
LINE = f"products with 512 inputs in bfloat16: {TEXT}"


def test_what_was_measured_is_remembered_across_processes(tmp_path: Path) -> None:
    assert lines_of_processes(tmp_path, "first") == [f"{LINE} (measured)"]
    assert lines_of_processes(tmp_path, "second") == [f"{LINE} (remembered)"]
    # This one has other choices to measure, and does not get to.
    assert tune(tmp_path / "kernels.choices.json", measured_as()) == [f"{LINE} (remembered)"]
    assert choice_of_new_matrix() == OTHER


def test_processes_that_start_at_once_measure_once(tmp_path: Path) -> None:
    lines = lines_of_processes(tmp_path, "a", "b", "c")
    assert lines == [f"{LINE} (measured)", *[f"{LINE} (remembered)"] * 2]


def test_a_process_that_measures_for_ever_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOCK_S", 0.1)
    path = tmp_path / "choices.json"
    with (tmp_path / "choices.json.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert tune(path, measured_as(OTHER)) == [f"{LINE} (measured)"]
    assert tune(path, measured_as()) == [f"{LINE} (remembered)"]


def test_matrices_are_told_apart_by_format_inputs_and_threads(tmp_path: Path) -> None:
    lines: list[str] = []
    kernels = kernels_for(ISAS[0])
    none, int8 = kernels.Quantization.none, kernels.Quantization.int8
    choices = [Choice(1024 * i, 4096) for i in range(1, 7)]
    tuner = Tuner(kernels, tmp_path / "choices.json", lines.append, measured_as(*choices))

    def tune_all() -> list[str]:
        for num_threads in (1, 2):
            native_ops(ISAS[0], num_threads)
            tuner.tune(LARGE, none)
        tuner.tune(LARGE.float(), none)
        tuner.tune(LARGE.float(), int8)
        tuner.tune(LARGE.float(), kernels.Quantization.w8a8)
        tuner.tune(torch.ones(512, 1024), none)
        return [line.partition(":")[0] for line in lines]

    expected = [
        "products with 512 inputs in bfloat16",
        "products with 512 inputs in bfloat16",
        "products with 512 inputs in float32",
        "products with 512 inputs in int8 with float32",
        "products with 512 inputs in w8a8 with float32",
        "products with 1024 inputs in float32",
    ]
    assert tune_all() == expected
    assert tune_all() == expected  # said once, for all layers
    entries = json.loads((tmp_path / "choices.json").read_text())
    assert [entry["ahead_of_one"] // 1024 for entry in entries.values()] == [1, 2, 3, 4, 5, 6]
    tuner.tune(LARGE[:-1], none)
    tuner.tune(LARGE[:-1], int8)
    assert len(lines) == len(expected)


def with_entry(**fields: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        return json.dumps({key: entry | fields for key, entry in json.loads(text).items()})

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: '{"x": 1}',
        lambda text: '{"x": {}}',
        lambda text: "\udcff",
        with_entry(ahead_of_one=0),
        with_entry(ahead_of_one=2**40),
        with_entry(ahead_of_several=10**30),
        with_entry(ahead_of_several="4096"),
        with_entry(ahead_of_one=None),
        with_entry(widened_from=0),
        with_entry(widened_from=False),
        with_entry(tiles_from=0),
        with_entry(tiles_from=None),
        with_entry(widened_from=True),
        with_entry(unknown=1),
    ],
)
def test_a_damaged_file_is_measured_again_and_mended(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    path = tmp_path / "choices.json"
    tune(path, measured_as(DEFAULT))
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(text), encoding="utf-8", errors="surrogateescape")
    warning, line = tune(path, measured_as(OTHER))
    assert warning.startswith(f"warning: {path} is damaged, so products are measured again: ")
    assert line == f"{LINE} (measured)"
    assert tune(path, measured_as()) == [f"{LINE} (remembered)"]


def test_a_file_that_cannot_be_written_stops_no_start(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "choices.json"
    lines: list[str] = []
    kernels = kernels_for(ISAS[0])
    tuner = Tuner(kernels, path, lines.append, measured_as(OTHER, DEFAULT))
    tuner.tune(LARGE, kernels.Quantization.none)
    tuner.tune(LARGE.float(), kernels.Quantization.none)
    assert without_times(lines) == [
        f"warning: {path} cannot be written, so each start measures products:"
        " No such file or directory",  # said once
        f"{LINE} (measured)",
        "products with 512 inputs in float32: weights read 4 KiB ahead (measured)",
    ]
    assert choice_of_new_matrix() == OTHER


def test_a_file_that_cannot_be_read_stops_no_start(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.mkdir()
    *warnings, line = tune(path, measured_as(OTHER))
    assert warnings[0].startswith(f"warning: {path} cannot be read, so products are measured: ")
    assert line == f"{LINE} (measured)"
    assert not list(path.iterdir())
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f"{path.name}.lock"}


# -------------------------------------------------------------------------------- at the start


def test_a_start_says_what_it_chose_and_the_next_one_that_it_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "choices_path", lambda isa: tmp_path / f"{isa}.choices.json")
    args = EngineArgs(model="", cpu_threads=2, cpu_binding="none")
    head = NormWeights(torch.ones(576), 1e-5), MatrixWeights(torch.ones(1024, 576), None)
    small = NormWeights(torch.ones(64), 1e-5), MatrixWeights(torch.ones(1024, 64), None)
    starts = []
    for _ in range(2):
        lines: list[str] = []
        ops = select_ops(args, torch.float32, torch.device("cpu"), lines.append)
        ops.head(*small)
        assert len(lines) == 1
        ops.head(*head)
        ops.quantized("int8").head(*head)
        starts.append(lines[1:])
    texts = []
    for lines, origin in zip(starts, (r"measured in \d+\.\d s", "remembered"), strict=True):
        for line, number_format in zip(lines, ("float32", "int8 with float32"), strict=True):
            assert re.fullmatch(
                rf"products with 576 inputs in {number_format}: weights read .* KiB"
                rf" ahead.* \({origin}\)",
                line,
            )
        texts.append([line.rpartition(" (")[0] for line in lines])
    assert texts[0] == texts[1]


def test_choices_lie_beside_the_kernels_that_they_were_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", os.fspath(tmp_path))
    path = choices_path("portable")
    assert path.parent == tmp_path / "charonia"
    assert re.fullmatch(r"charonia_kernels_portable_[0-9a-f]{16}\.choices\.json", path.name)
