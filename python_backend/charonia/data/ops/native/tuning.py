"""Measures how products read their weights fastest, and remembers it.

Owns the choices (see choices.h), how they are measured, and the file that remembers them. Must not
know models.

What is fastest depends on the processor's memory and caches, on the number format of the weights,
and on the number of inputs, which is the length of a panel of weights. So each pair of format and
inputs is measured once on a machine, when a model with such matrices is loaded for the first time.
Results of products are bitwise the same with any choice.
"""

import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

AHEAD_BYTES = (2048, 4096, 8192, 16384, 32768)
"""Distances between what is read and what is brought near, to choose from."""

FEW_ROWS = 8
"""Rows by which the distance for several rows is measured."""

MANY_ROWS = (8, 16, 32, 64, 128)
"""Rows from which on weights may be widened once, to choose from."""

TILE_ROWS = (1, 2, 4, 8)
"""Rows from which on tiles may be used where vectors do as well, to choose from."""

LOCK_S = 30.0
"""How long another process is waited for that measures."""

_MARGIN = 0.97
"""What is not faster than the default by this factor is not chosen: it may be noise."""

_MAX_TURNS = 25
_MIN_TURNS = 5
_TURNS_S = 0.25
"""Turns of one comparison, and the seconds after which it ends with fewer of them."""

_MiB = 2**20


@dataclass(frozen=True)
class Choice:
    """How products with a matrix read its weights.

    Attributes:
        ahead_of_one, ahead_of_several: bytes between what is read and what is brought near
            meanwhile, in products with one row and with several.
        widened_from: number of rows from which on a panel of weights is widened to float32 once for
            all rows; None where that is never done.
        tiles_from: number of rows from which on whole numbers are multiplied by tiles, if the
            processor has them.
    """

    ahead_of_one: int
    ahead_of_several: int
    widened_from: int | None = None
    tiles_from: int = 1

    def __post_init__(self) -> None:
        numbers = [self.ahead_of_one, self.ahead_of_several, self.tiles_from]
        if self.widened_from is not None:
            numbers.append(self.widened_from)
        for number in numbers:
            if type(number) is not int or not 1 <= number <= _MiB:
                raise ValueError(f"{number!r} in a choice; accepted are whole numbers to {_MiB}")

    def __str__(self) -> str:
        text = f"weights read {_size(self.ahead_of_one)} ahead"
        if self.ahead_of_several != self.ahead_of_one:
            text += f" for one row and {_size(self.ahead_of_several)} for several"
        if self.widened_from is not None:
            text += f", widened once for {self.widened_from} rows or more"
        if self.tiles_from > 1:
            text += f", multiplied by tiles for {self.tiles_from} rows or more"
        return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:g} KiB"


class Tuner:
    """Has the kernels make the best choice for each pair of number format and inputs.

    Args:
        kernels: of `build.load_kernels`.
        path: the file that remembers; see `build.choices_path`. It need not exist. Another process
            may use it at the same time.
        log: takes a line for each choice, and one if the file cannot be used.
        measure: what measures; see `measure_choice`.
    """

    def __init__(
        self,
        kernels: ModuleType,
        path: Path,
        log: Callable[[str], None],
        measure: Callable[[ModuleType, Tensor, Any], Choice] | None = None,
    ) -> None:
        self._kernels = kernels
        self._path = path
        self._log = log
        self._measure = measure or measure_choice
        self._made: set[str] = set()
        self._complaints: set[str] = set()

    def tune(self, weight: Tensor, quantization: Any) -> None:
        """Choose for matrices like this one, which will be made; small ones keep the default.

        Args:
            weight: [outputs, inputs], before quantization.
            quantization: of `kernels.Quantization`.
        """
        if weight.numel() < self._kernels.LEAST_WEIGHTS_TO_CHOOSE:
            return
        number_format = _format_name(weight.dtype, quantization)
        inputs, threads = weight.shape[1], self._kernels.num_threads()
        key = f"{number_format}, inputs {inputs}, threads {threads}, {_processor()}"
        if key in self._made:
            return
        self._made.add(key)
        choice, origin = self._choice_of(key, weight, quantization)
        self._kernels.choose(weight.dtype, quantization, inputs, astuple(choice))
        self._log(f"products with {inputs} inputs in {number_format}: {choice} ({origin})")

    def _choice_of(self, key: str, weight: Tensor, quantization: Any) -> tuple[Choice, str]:
        """The choice and where it is from; measured unless the file remembers it."""
        if known := self._remembered().get(key):
            return known, "remembered"
        with self._alone():
            choices = self._remembered()  # another process may have measured meanwhile
            if known := choices.get(key):
                return known, "remembered"
            started = time.monotonic()
            choice = self._measure(self._kernels, weight, quantization)
            origin = f"measured in {time.monotonic() - started:.1f} s"
            self._remember(choices | {key: choice})
        return choice, origin

    def _remembered(self) -> dict[str, Choice]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
            return {key: Choice(**entry) for key, entry in entries.items()}
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._complain(f"cannot be read, so products are measured: {error.strerror}")
        except (ValueError, TypeError, AttributeError) as error:
            self._complain(f"is damaged, so products are measured again: {error}")
        return {}

    def _remember(self, choices: dict[str, Choice]) -> None:
        text = json.dumps({key: asdict(choice) for key, choice in choices.items()}, indent=1)
        try:
            # Moved into its place: nobody reads a part of it.
            part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            try:
                part.write_text(text + "\n", encoding="utf-8")
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            self._complain(f"cannot be written, so each start measures products: {error.strerror}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have no other process measure meanwhile, unless that takes too long."""
        path = self._path.with_name(self._path.name + ".lock")
        try:
            file = path.open("w")
        except OSError:  # the file of choices cannot be written either, which is logged
            yield
            return
        with file:
            end = time.monotonic() + LOCK_S
            while _is_locked_by_another(file.fileno()) and time.monotonic() < end:
                time.sleep(0.05)
            yield

    def _complain(self, problem: str) -> None:
        if problem not in self._complaints:
            self._complaints.add(problem)
            self._log(f"warning: {self._path} {problem}")


def _is_locked_by_another(handle: int) -> bool:
    """Lock a file, if nobody else has; not in a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _format_name(dtype: torch.dtype, quantization: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if quantization.name == "none" else f"{quantization.name} with {name}"


@cache
def _processor() -> str:
    """The processor's name: a file may be shared by machines of one instruction set."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    return "unknown processor"


# ------------------------------------------------------------------------------------ measurement


def measure_choice(kernels: ModuleType, weight: Tensor, quantization: Any) -> Choice:
    """Measure all candidates with copies of a matrix that the caches cannot hold.

    Weights of a model come from memory, because a step reads all of them. So each product is with
    the next one of many copies. Candidates take turns, and the default is kept unless another is
    faster by a clear margin. It takes one to three seconds.

    Args:
        weight: [outputs, inputs], before quantization.
        quantization: of `kernels.Quantization`.
    """
    products = _Products(kernels, weight, quantization)
    default = products.default
    if products.may_do_without_tiles:
        default = replace(default, tiles_from=_tiles_from(default, products.seconds))
    choice = default
    for name, rows in (("ahead_of_one", 1), ("ahead_of_several", FEW_ROWS)):
        candidates = [replace(default, **{name: ahead}) for ahead in AHEAD_BYTES]
        best = fastest(candidates, default, partial(products.seconds, rows))
        choice = replace(choice, **{name: getattr(best, name)})
    if products.may_widen:
        choice = replace(choice, widened_from=_widened_from(choice, products.seconds))
    return choice


def _tiles_from(choice: Choice, time_of: Callable[[int, Choice], float]) -> int:
    """The number of rows from which on tiles are as fast as vectors, or faster."""
    vectors = replace(choice, tiles_from=TILE_ROWS[-1] + 1)
    for rows in TILE_ROWS:
        if fastest([choice, vectors], choice, partial(time_of, rows)) is choice:
            return rows
    return TILE_ROWS[-1] + 1


def _widened_from(choice: Choice, time_of: Callable[[int, Choice], float]) -> int | None:
    """The number of rows from which on it is faster to widen weights once."""
    usual = choice.widened_from
    once, never = replace(choice, widened_from=1), replace(choice, widened_from=None)
    start = None
    for rows in reversed(MANY_ROWS):
        default = once if rows in _rows_widened_once(usual) else never
        if fastest([once, never], default, partial(time_of, rows)) is never:
            break
        start = rows
    # The default may lie between two of the numbers that were tried.
    return usual if _rows_widened_once(start) == _rows_widened_once(usual) else start


def _rows_widened_once(start: int | None) -> list[int]:
    return [rows for rows in MANY_ROWS if start is not None and rows >= start]


def fastest(
    candidates: Sequence[Choice], default: Choice, time_of: Callable[[Choice], float]
) -> Choice:
    """The candidate that takes the least time, or the default if none is clearly faster.

    The best candidate has to be faster than the default a second time, alone with it.

    Args:
        time_of: takes the time of a candidate once, in seconds.
    """
    best = _first_of(candidates, default, time_of)
    return best if best == default else _first_of([best], default, time_of)


def _first_of(
    candidates: Sequence[Choice], default: Choice, time_of: Callable[[Choice], float]
) -> Choice:
    """The winner of one comparison.

    Candidates take turns, so that a slow phase of the machine meets all of them, and another one
    begins each time. The least time of each is the one that nothing disturbed. It decides, if the
    median agrees.
    """
    all_candidates = [default, *(one for one in candidates if one != default)]
    times: dict[Choice, list[float]] = {candidate: [] for candidate in all_candidates}
    end = time.monotonic() + _TURNS_S
    for turn in range(_MAX_TURNS):
        if turn >= _MIN_TURNS and time.monotonic() > end:
            break
        first = turn % len(all_candidates)
        for candidate in all_candidates[first:] + all_candidates[:first]:
            times[candidate].append(time_of(candidate))
    least, middle = _MARGIN * min(times[default]), median(times[default])
    faster = [one for one, own in times.items() if min(own) < least and median(own) < middle]
    return min(faster, key=lambda one: min(times[one]), default=default)


class _Products:
    """Products with copies of a matrix, more of them than the caches hold.

    Attributes:
        default: the choice of the kernels.
        may_widen: whether weights may be widened once.
        may_do_without_tiles: whether vectors may take the place of tiles.
    """

    def __init__(self, kernels: ModuleType, weight: Tensor, quantization: Any) -> None:
        # Of a large matrix a part, but one with work for all threads.
        inputs = weight.shape[1]
        outputs = max(2**21 // inputs, 128 * kernels.num_threads())
        some = weight[:outputs].contiguous()
        size = some.numel() * (some.element_size() if quantization.name == "none" else 1)
        num_copies = -(-_cold_bytes() // size)
        copies = [kernels.Matrix(some, None, quantization=quantization) for _ in range(num_copies)]
        self.default = Choice(*copies[0].default_choice)
        self.may_widen: bool = copies[0].may_widen
        self.may_do_without_tiles: bool = copies[0].may_do_without_tiles
        self._inputs = torch.ones(max(MANY_ROWS), inputs, dtype=weight.dtype)
        self._num_weights = some.numel()
        self._copies, self._next = copies, itertools.cycle(copies)

    def seconds(self, rows: int, choice: Choice) -> float:
        """The seconds that products with so many rows take."""
        x, fields = self._inputs[:rows], astuple(choice)
        # As many of them as take a millisecond or two.
        num_products = 2**24 // self._num_weights + 1
        if rows > FEW_ROWS:
            num_products = 2**27 // (rows * self._num_weights) + 1
        matrices: list[Any] = list(itertools.islice(self._next, num_products))
        for matrix in matrices:
            matrix.choice = fields
        started = time.perf_counter()
        for matrix in matrices:
            matrix(x, False)
        return time.perf_counter() - started


@cache
def _cold_bytes() -> int:
    """Bytes of weights that the caches of this process's cores do not hold, read in turns.

    Twice what they have is too little: from 64 MiB, two cores of Zen 5 with 32 MiB of third-level
    cache read 107 GB/s, from 256 MiB 84 GB/s, and other distances were the best.
    """
    sizes: dict[str, int] = {}
    for core in os.sched_getaffinity(0):
        directory = Path(f"/sys/devices/system/cpu/cpu{core}/cache/index3")
        with suppress(OSError, ValueError):
            cores = (directory / "shared_cpu_list").read_text(encoding="ascii")
            size = (directory / "size").read_text(encoding="ascii")
            sizes[cores] = int(size.strip().removesuffix("K")) * 1024
    return min(max(8 * sum(sizes.values()), 64 * _MiB), 512 * _MiB)
