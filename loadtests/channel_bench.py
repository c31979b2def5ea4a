"""Measure how a pass is best announced to another rank: sockets, shared memory, or gloo.

    python loadtests/channel_bench.py [--repetitions 2000]

Two processes on this machine. One sends what announces a pass of 32 decoding rows, as it is encoded
in `charonia.parallel.messages`; the other decodes it and answers with the same, through the same
channel. The three take turns, round trip by round trip. Printed are microseconds of a round trip.

  socket         TCP on the loopback, as `parallel.peer` has it: looks before it sleeps
  shared memory  the exchange of the CPU kernels, which ranks reduce through
  gloo           torch.distributed's broadcast, which knows no lengths: they must be agreed upon
"""

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from charonia.data.ops.base import StepBatch
from charonia.data.ops.native.build import load_kernels, supported_isas
from charonia.parallel.messages import Forward, decode, encode, forward_of
from charonia.parallel.peer import SPIN_S, Peer
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from command_line import make_parser, positive
from record import circumstances, write_record
from report import markdown_table

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 32, 16, 16
WARM_UP = 200


def announcement() -> Forward:
    """Make the message that announces a pass of rows that decode."""
    rows = torch.arange(NUM_ROWS)
    return forward_of(
        "target",
        StepBatch(
            token_ids=rows,
            positions=rows,
            slots=rows,
            query_starts=list(range(NUM_ROWS + 1)),
            context_lens=[NUM_BLOCKS * BLOCK_SIZE] * NUM_ROWS,
            block_tables=torch.zeros(NUM_ROWS, NUM_BLOCKS, dtype=torch.int64),
            block_size=BLOCK_SIZE,
        ),
        list(range(NUM_ROWS)),
    )


def channels(rank: int, connection: socket.socket, memory: int, port: int) -> dict[str, Any]:
    """Return, for each way, one side's calls to send a message and to take one."""
    message = announcement()
    data = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
    view = memoryview(data.numpy())
    kernels = load_kernels(supported_isas()[0], print)
    exchange = kernels.Exchange(memory, rank, 2, 60.0)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    peer = Peer(Connection(Channel(connection)), 60.0)

    def by_socket(source: int) -> None:
        if source == rank:
            peer.send(message)
        else:
            peer.receive(spin=SPIN_S)

    def by_tensor(broadcast: Callable[[torch.Tensor, int], object], source: int) -> None:
        if source == rank:
            view[:] = encode(message)
        broadcast(data, source)
        if source != rank:
            decode(bytes(view))

    by_memory = partial(by_tensor, exchange.broadcast)
    by_gloo = partial(by_tensor, dist.broadcast)
    return {"socket": by_socket, "shared memory": by_memory, "gloo": by_gloo}


def measure(ways: dict[str, Callable[[int], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each round trip; the other process makes the same calls."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + WARM_UP):
        for name, way in ways.items():
            started = time.perf_counter()
            way(0)
            way(1)
            if repetition >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def answer(connection: socket.socket, memory: int, port: int, repetitions: int) -> None:
    """The other process."""
    measure(channels(1, connection, memory, port), repetitions)
    dist.destroy_process_group()


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=positive, default=2000, metavar="N")
    parser.add_argument("--output", type=Path, metavar="STEM", help="write STEM.json, too")
    options = parser.parse_args()
    memory = os.memfd_create("channel bench")
    kernels = load_kernels(supported_isas()[0], print)
    os.ftruncate(memory, kernels.exchange_bytes(2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = multiprocessing.get_context("fork").Process(
        target=answer, args=(far, memory, port, options.repetitions)
    )
    other.start()
    seconds = measure(channels(0, near, memory, port), options.repetitions)
    other.join()
    print(f"{len(encode(announcement()))} bytes there and back, microseconds\n")
    rows, found = [], {}
    for name, values in seconds.items():
        median = 1e6 * statistics.median(values)
        tenth = 1e6 * statistics.quantiles(values, n=10)[-1]
        found[name] = {"median_us": median, "p90_us": tenth}
        rows.append([name, f"{median:.0f}", f"{tenth:.0f}"])
    print(markdown_table(["channel", "median", "90 % below"], rows))
    if options.output is not None:
        about = circumstances("channel_bench.py") | {"round_trips": found}
        print(f"\n{write_record(options.output, about)}")


if __name__ == "__main__":
    main()
