"""What ranks exchange through shared memory: every rank has the same, to the bit, or an error.

Ranks are processes here, as they are in an engine; where one only has to wait, it is a thread.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.errors import RankLostError
from support.kernels import ISAS, kernels_for
from support.long import long, one_in
from support.ranks import LONG, Ranks, shared_memory

BORDER, BUFFER = 1 << 17, 1 << 18  # bytes; see exchange.cpp
NUMBERS = [0, 1, 7, 16, 33, 768, 18_432, BORDER // 4 - 1, BORDER // 4, BORDER // 2, 65_535]
NUMBERS += [BUFFER // 4, BUFFER // 4 + 1, BUFFER // 2, 262_144, 1_000_003]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def part_of(rank: int, seed: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives: numbers whose sum depends on the order in which they are added up."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, generator=generator)
    return (x * 10.0 ** torch.randint(-2, 3, (count,), generator=generator)).to(dtype)


def sum_of(parts: list[Tensor]) -> Tensor:
    """In float32, in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def add_up(exchange: Any, seed: int, count: int, dtype: torch.dtype) -> None:
    parts = [part_of(rank, seed, count, dtype) for rank in range(exchange.size)]
    x = parts[exchange.rank].clone()
    exchange.all_reduce(x)
    assert torch.equal(x, sum_of(parts)), f"{count} x {dtype}"


def scatter(exchange: Any, seed: int, count: int, dtype: torch.dtype) -> None:
    parts = [part_of(rank, seed, count * exchange.size, dtype) for rank in range(exchange.size)]
    out = torch.empty(count, dtype=dtype)
    exchange.reduce_scatter(parts[exchange.rank].view(exchange.size, count), out)
    assert torch.equal(out, sum_of(parts).view(exchange.size, count)[exchange.rank])


def gather(exchange: Any, seed: int, count: int, dtype: torch.dtype) -> None:
    parts = [part_of(rank, seed, count, dtype) for rank in range(exchange.size)]
    out = torch.empty(exchange.size, count, dtype=dtype)
    exchange.all_gather(parts[exchange.rank], out)
    assert torch.equal(out, torch.stack(parts))


def broadcast(exchange: Any, seed: int, count: int, dtype: torch.dtype) -> None:
    for source in range(exchange.size):
        x = part_of(exchange.rank, seed + source, count, dtype)
        exchange.broadcast(x, source)
        assert torch.equal(x, part_of(source, seed + source, count, dtype))


OPERATIONS = (add_up, scatter, gather, broadcast)


def all_sizes(exchange: Any, task: Callable[..., None], dtype: torch.dtype) -> None:
    for seed, count in enumerate(NUMBERS):
        task(exchange, seed, count, dtype)


@pytest.mark.parametrize(
    ("task", "dtype", "size", "isa"),
    one_in(
        7, itertools.product((add_up, scatter), (torch.float32, torch.bfloat16), range(1, 5), ISAS)
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_rank_has_the_sum_in_the_order_of_ranks_to_the_bit(
    ranks: Ranks, task: Callable[..., None], dtype: torch.dtype, size: int, isa: str
) -> None:
    ranks.run(size, isa, all_sizes, task, dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("task", [gather, broadcast], ids=["gather", "broadcast"])
def test_every_rank_has_what_the_others_gave(
    ranks: Ranks, size: int, dtype: torch.dtype, task: Callable[..., None]
) -> None:
    ranks.run(size, ISAS[0], all_sizes, task, dtype)


def many_operations(exchange: Any, count: int) -> None:
    """All in a random order that is the same on every rank, each rank with delays of its own."""
    common, own = random.Random(1), random.Random(100 + exchange.rank)
    for seed in range(count):
        if own.random() < 0.1:
            time.sleep(own.choice([1e-5, 1e-4, 1e-3, 1e-2]))  # others spin, yield, or sleep
        numbers = int(10 ** common.uniform(0, 4 if common.random() < 0.95 else 5.7))
        dtype = common.choice([torch.float32, torch.bfloat16])
        common.choice(OPERATIONS)(exchange, seed, numbers, dtype)


@pytest.mark.parametrize(
    ("size", "count"),
    [(4, 200), *(pytest.param(size, 2000, marks=long) for size in (2, 3, 4))],
)
def test_many_operations_in_a_row_stay_right_whoever_is_late(
    ranks: Ranks, size: int, count: int
) -> None:
    ranks.run(size, ISAS[0], many_operations, count)


def exchange_at(path: str, rank: int, size: int, timeout: float) -> Any:
    fd = os.open(path, os.O_RDWR)
    exchange = kernels_for(ISAS[0]).Exchange(fd, rank, size, timeout)
    os.close(fd)
    return exchange


def reduce_until_lost(exchange: Any) -> str:
    """Say how it ended."""
    try:
        while True:
            exchange.all_reduce(torch.ones(1000))
    except RankLostError as error:
        return str(error)


def meet(path: str, rank: int, size: int) -> None:
    """Wait until all have begun, however late one is."""
    exchange_at(path, rank, size, LONG).all_reduce(torch.ones(1000))


def endure(meeting: str, path: str, rank: int, size: int, timeout: float) -> list[str]:
    meet(meeting, rank, size)
    exchange = exchange_at(path, rank, size, timeout)
    reasons = [reduce_until_lost(exchange)]
    for again in (exchange.all_reduce, lambda x: exchange.broadcast(x, rank)):
        with pytest.raises(RankLostError) as caught:
            again(torch.ones(3))
        reasons.append(str(caught.value))
    return reasons


def vanish(meeting: str, path: str, rank: int, size: int, sign: signal.Signals) -> None:
    """Exchange with the others for a while, and then no more."""
    meet(meeting, rank, size)
    exchange = exchange_at(path, rank, size, LONG)
    exchange.all_reduce(torch.ones(1000))
    threading.Timer(0.1, os.kill, [os.getpid(), sign]).start()
    reduce_until_lost(exchange)


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=long),
    ],
)
def test_a_rank_that_is_no_more_ends_the_others_waiting(sign: signal.Signals) -> None:
    ranks = Ranks(3)
    ranks.run(3, ISAS[0], add_up, 0, 10, torch.float32)  # now they have all that takes time to load
    with shared_memory(3) as first, shared_memory(3) as second:
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (first, second)]
        ranks.start(2, vanish, *paths, 2, 3, sign)
        for rank in range(2):
            ranks.start(rank, endure, *paths, rank, 3, 3.0)
        for rank in range(2):
            assert ranks.result(rank) == ["rank 2 of the group did not answer within 3 s"] * 3
    ranks.processes[2].kill()
    ranks.close()


def exchanges(fd: int, size: int) -> list[Any]:
    return [kernels_for(ISAS[0]).Exchange(fd, rank, size, LONG) for rank in range(size)]


@pytest.mark.parametrize("ending", [0, 1], ids=["its own", "another rank's"])
def test_abort_ends_a_wait_and_all_later_ones(ending: int) -> None:
    with shared_memory(2) as fd, ThreadPoolExecutor(1) as threads:
        both = exchanges(fd, 2)
        waits = threads.submit(both[0].all_reduce, torch.ones(5))
        time.sleep(0.05)  # it sleeps by now, most likely
        assert not waits.done()
        both[ending].abort()
        with pytest.raises(RankLostError, match="was aborted"):
            waits.result()
        for exchange in both:
            with pytest.raises(RankLostError, match="was aborted"):
                exchange.all_gather(torch.ones(5), torch.empty(2, 5))


def test_ranks_that_do_not_do_the_same_are_told() -> None:
    with shared_memory(2) as fd, ThreadPoolExecutor(1) as threads:
        first, second = exchanges(fd, 2)
        other = threads.submit(first.all_reduce, torch.ones(5))
        with pytest.raises((RuntimeError, RankLostError), match="not do the same"):
            second.all_reduce(torch.ones(6))
        with pytest.raises((RuntimeError, RankLostError), match="not do the same"):
            other.result()
        with pytest.raises(RankLostError):
            first.all_reduce(torch.ones(5))


def test_who_broadcasts_is_one_message_ahead_of_the_others() -> None:
    with shared_memory(2) as fd, ThreadPoolExecutor(1) as threads:
        both = exchanges(fd, 2)
        both[0].broadcast(torch.full((5,), 1), 0)  # returns, though nobody has read it
        second = threads.submit(both[0].broadcast, torch.full((5,), 2), 0)
        received = torch.zeros(2, 5, dtype=torch.int64)
        for x in received:
            both[1].broadcast(x, 0)
        second.result()
        assert received.tolist() == [[1] * 5, [2] * 5]


def test_two_threads_of_a_rank_take_turns() -> None:
    with shared_memory(2) as fd, ThreadPoolExecutor(4) as threads:
        both = exchanges(fd, 2)
        xs = [torch.ones(3000) for _ in range(400)]
        list(threads.map(lambda i: both[i % 2].all_reduce(xs[i]), range(len(xs))))
        assert all(bool((x == 2).all()) for x in xs)


def test_what_was_exchanged_is_counted() -> None:
    with shared_memory(1) as fd:
        (alone,) = exchanges(fd, 1)
        assert set(alone.counters().values()) == {(0, 0, 0.0)}
        for _ in range(2):
            alone.all_reduce(torch.ones(100_000))
        alone.all_gather(torch.ones(3, dtype=torch.bool), torch.empty(1, 3, dtype=torch.bool))
        alone.broadcast(torch.ones(5, dtype=torch.int64), 0)
        alone.reduce_scatter(torch.ones(1, 7).bfloat16(), torch.ones(7).bfloat16())
        counters = alone.counters()
        assert {name: values[:2] for name, values in counters.items()} == {
            "all_reduce": (2, 800_000),
            "all_gather": (1, 3),
            "broadcast": (1, 40),
            "reduce_scatter": (1, 14),
        }
        assert all(seconds > 0 for _, _, seconds in counters.values())


def test_an_exchange_that_is_gone_leaves_nothing_mapped() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("charonia-test")

    before = mapped()
    with shared_memory(2) as fd:
        both = exchanges(fd, 2)
        assert mapped() == before + 2
        del both
        assert mapped() == before


def test_what_cannot_be_exchanged_is_refused_in_clear_words() -> None:
    with shared_memory(1) as fd:
        (alone,) = exchanges(fd, 1)
        half, square = torch.ones(4, dtype=torch.float16), torch.ones(4, 4)
        for words, refused in {
            "float32 and bfloat16, not Half": lambda: alone.all_reduce(half),
            "float32 and bfloat16, not Long": lambda: alone.reduce_scatter(
                torch.ones(1, 4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
            ),
            "x must be a contiguous tensor": lambda: alone.all_reduce(square.t()[:2]),
            "x must be a contiguous": lambda: alone.broadcast(square[:, 1], 0),
            "out must be a contiguous": lambda: alone.all_gather(
                square, torch.ones(1, 4, 8)[..., :4]
            ),
            r"are \[1, 4\] of the same type, not \[4\] Float": lambda: alone.all_gather(
                square[0], square[0]
            ),
            r"same type, not \[1, 4\] Half": lambda: alone.all_gather(square[0], half[None]),
            r"are \[1, 4, 4\] of the same": lambda: alone.reduce_scatter(square, square),
            "no rank 1 among 1": lambda: alone.broadcast(square, 1),
            "no rank -1 among 1": lambda: alone.broadcast(square, -1),
        }.items():
            with pytest.raises(ValueError, match=words):
                refused()


def test_an_exchange_that_makes_no_sense_is_refused_in_clear_words() -> None:
    kernels = kernels_for(ISAS[0])
    with shared_memory(2) as fd:
        first = kernels.Exchange(fd, 0, 2, 1.0)
        assert (first.rank, first.size) == (0, 2)
        for words, args in {
            "rank 0 of this exchange is taken": (fd, 0, 2, 1.0),
            "rank 2 of 2; ranks count from 0": (fd, 2, 2, 1.0),
            "rank -1 of 2": (fd, -1, 2, 1.0),
            "between 1 and 64 ranks, not 0": (fd, 0, 0, 1.0),
            "between 1 and 64 ranks, not 65": (fd, 0, 65, 1.0),
            "timeout must be positive": (fd, 1, 2, 0.0),
            "bytes; 3 ranks need": (fd, 1, 3, 1.0),
        }.items():
            with pytest.raises(ValueError, match=words):
                kernels.Exchange(*args)
        with pytest.raises(RuntimeError, match="Bad file descriptor"):
            kernels.Exchange(-1, 1, 2, 1.0)
