"""Processes that exchange through shared memory, as the ranks of an engine on CPUs do."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from support.kernels import ISAS, kernels_for

LONG = 300.0
"""Seconds; no test waits for them."""


@contextmanager
def shared_memory(size: int, isa: str = ISAS[0]) -> Iterator[int]:
    """The descriptor of what so many ranks share."""
    fd = os.memfd_create("charonia-test")
    try:
        os.ftruncate(fd, kernels_for(isa).exchange_bytes(size))
        yield fd
    finally:
        os.close(fd)


class Ranks:
    """Processes that do what they are told, each with its exchange as `exchange`."""

    def __init__(self, count: int) -> None:
        context = get_context("spawn")
        self._pipes, self.processes = [], []
        for _ in range(count):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(there,), daemon=True))
            self.processes[-1].start()
            self._pipes.append(here)

    def start(self, rank: int, task: Callable[..., Any], *args: Any) -> None:
        self._pipes[rank].send((task, args))

    def result(self, rank: int) -> Any:
        assert self._pipes[rank].poll(LONG)
        is_good, value = self._pipes[rank].recv()
        assert is_good, value
        return value

    def run(self, size: int, isa: str, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Call task(exchange, *args) on ranks of a new exchange; return what each returns."""
        with shared_memory(size, isa) as fd:
            path = f"/proc/{os.getpid()}/fd/{fd}"
            for rank in range(size):
                self.start(rank, _with_exchange, path, isa, rank, size, task, args)
            return [self.result(rank) for rank in range(size)]

    def close(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            pipe.close()
            process.join(LONG)
            process.close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            task, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            pipe.send((True, task(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _with_exchange(
    path: str, isa: str, rank: int, size: int, task: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    fd = os.open(path, os.O_RDWR)
    exchange = kernels_for(isa).Exchange(fd, rank, size, LONG)
    os.close(fd)
    return task(exchange, *args)
