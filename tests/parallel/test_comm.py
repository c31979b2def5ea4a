"""All ranks have the same results, to the bit, through torch.distributed and shared memory."""

import itertools
import math
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from charonia.data.ops.native.build import load_kernels, supported_isas
from charonia.parallel.comm import GroupComm, SharedMemoryComm
from charonia.parallel.groups import Groups, Membership
from charonia.parallel.topology import Topology
from charonia.protocol import Collectives
from support.long import long
from support.rank_end import remote_table, served_table
from support.waiting import WAIT_S

SHAPES = [(6,), (6, 5), (12, 1000), (6, 40_000)]
SECRET = "open sesame"
DTYPES = [torch.float32, torch.bfloat16]


def run(task: Callable[[Groups], Any], topology: Topology, *, is_shared: bool) -> list[Any]:
    """Call a function on every rank of an engine; return what each returns.

    Args:
        is_shared: let the ranks be of one host, and share memory; else they use gloo.
    """
    with served_table(SECRET) as (_, port):
        return _run(task, topology, port, is_shared=is_shared)


def _run(
    task: Callable[[Groups], Any], topology: Topology, port: int, *, is_shared: bool
) -> list[Any]:
    context = get_context("spawn")
    pipes = []
    for rank in range(topology.num_ranks):
        here, there = context.Pipe()
        args = (there, task, topology, rank, port, is_shared)
        process = context.Process(target=_be_rank, args=args, daemon=True)
        process.start()
        pipes.append((here, process))
    results = []
    for pipe, _ in pipes:
        assert pipe.poll(WAIT_S)
        is_good, value = pipe.recv()
        assert is_good, value
        results.append(value)
    for pipe, process in pipes:
        pipe.send("end")  # nobody ends while others still need what is in its memory
        process.join()
        process.close()
        pipe.close()
    return results


def _be_rank(
    pipe: Connection,
    task: Callable[[Groups], Any],
    topology: Topology,
    rank: int,
    port: int,
    is_shared: bool,
) -> None:
    torch.set_num_threads(1)
    try:
        memories = ["here" if is_shared else None] * topology.num_ranks
        me = Membership(rank, memories, "127.0.0.1", remote_table(port, SECRET))
        kernels = load_kernels(supported_isas()[0], print) if is_shared else None
        groups = Groups(topology, me, kernels, torch.device("cpu"))
        pipe.send((True, task(groups)))
        pipe.recv()
        groups.close()
    except Exception:
        pipe.send((False, traceback.format_exc()))


@pytest.mark.parametrize(
    ("size", "is_shared"),
    [
        pytest.param(2, False, id="2 over gloo"),
        pytest.param(3, True, id="3 in shared memory"),
        pytest.param(3, False, id="3 over gloo", marks=long),
        pytest.param(2, True, id="2 in shared memory", marks=long),
    ],
)
def test_every_rank_has_what_a_plain_computation_gives(size: int, is_shared: bool) -> None:
    results = run(all_operations, Topology(size, 1, 0), is_shared=is_shared)
    for rank, (collectives, *tensors) in enumerate(results):
        expected = expected_results(rank, size)
        assert len(tensors) == len(expected)
        for one, (name, other) in zip(tensors, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name
        assert counts_of(collectives) == expected_counts(size)


def all_operations(groups: Groups) -> list[Any]:
    comm = groups.model_ranks()[0].links.parts
    assert isinstance(comm, SharedMemoryComm | GroupComm)
    found: list[Any] = []
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        mine = part_of(comm.rank, shape, dtype)
        reduced = mine.clone()
        found.append(comm.all_reduce(reduced))
        assert found[-1] is reduced
        found += [comm.all_gather(mine), comm.reduce_scatter(mine)]
        for source in range(comm.size):
            given = mine.clone()
            found.append(comm.broadcast(given, source))
            assert found[-1] is given
    collectives = groups.collectives()
    assert groups.collectives() == {}, "they are told once"
    return [collectives, *found]


def expected_results(rank: int, size: int) -> list[tuple[str, Tensor]]:
    expected = []
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        parts = [part_of(other, shape, dtype) for other in range(size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        total = total.to(dtype)
        share = shape[0] // size
        expected += [
            (f"all_reduce {dtype} {shape}", total),
            (f"all_gather {dtype} {shape}", torch.stack(parts)),
            (f"reduce_scatter {dtype} {shape}", total[rank * share : (rank + 1) * share]),
        ]
        expected += [(f"broadcast {dtype} {shape}", parts[source]) for source in range(size)]
    return expected


def expected_counts(size: int) -> dict[str, tuple[int, int]]:
    calls = len(DTYPES) * len(SHAPES)
    sizes = itertools.product((dtype.itemsize for dtype in DTYPES), map(math.prod, SHAPES))
    num_bytes = sum(itemsize * count for itemsize, count in sizes)
    one = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), (calls, num_bytes))
    return one | {"broadcast": (calls * size, num_bytes * size)}


def counts_of(collectives: Collectives) -> dict[str, tuple[int, int]]:
    assert all(seconds > 0 for _, _, seconds in collectives.values())
    return {name: (calls, size) for name, (calls, size, _) in collectives.items()}


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of unlike size: their sum shows in which order they were added up."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -3, 4, shape, generator=generator
    )
    return x.to(dtype)


@pytest.mark.parametrize(
    "is_shared",
    [pytest.param(False, marks=long, id="gloo"), pytest.param(True, id="shared memory")],
)
def test_a_rank_is_linked_to_its_neighbours(is_shared: bool) -> None:
    """Two parts, two stages, and a draft model on the first two ranks."""
    model_ranks = run(links_of, Topology(2, 2, 2), is_shared=is_shared)
    first, second = (0, 2), (1, 2)  # rank and size in the group
    assert model_ranks == [
        # parts, before, after, logits; the draft model's parts
        [first, None, first, first, first],
        [second, None, first, None, second],
        [first, second, None, second, None],
        [second, second, None, None, None],
    ]


def links_of(groups: Groups) -> list[tuple[int, int] | None]:
    model_rank, draft_rank = groups.model_ranks()
    links = model_rank.links
    found = [links.parts, links.before, links.after, links.logits]
    found.append(draft_rank.links.parts if draft_rank else None)
    return [None if comm is None else (comm.rank, comm.size) for comm in found]
