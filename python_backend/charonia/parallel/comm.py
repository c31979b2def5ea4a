"""Two implementations of `Comm`: shared memory, and a torch.distributed group.

Owns the collective operations and their counters. Must not know which ranks form a group, or what
they compute with it.

Ranks on the CPUs of one machine use shared memory: 10 us for an operation that takes 300 us with
gloo (see `ops/native/exchange.h`). Others use torch.distributed: gloo, or NCCL between GPUs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from charonia.errors import RankLostError
from charonia.protocol import Collectives


class SharedMemoryComm:
    """A group of ranks on the CPUs of one machine.

    Args:
        exchange: an object of `ops/native/exchange.cpp`. It keeps the counters and raises
            RankLostError.
    """

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange
        self.rank: int = exchange.rank
        self.size: int = exchange.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Comm`, also for the following methods."""
        self.exchange.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        self.exchange.all_gather(x, out)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.exchange.broadcast(x, source)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        self.exchange.reduce_scatter(x.view(self.size, *out.shape), out)
        return out

    def collectives(self) -> Collectives:
        """Counters of all operations so far, including those that native layers ran themselves."""
        counters: Collectives = self.exchange.counters()
        return counters

    def abort(self) -> None:
        """Make every wait of every rank fail, now and later."""
        self.exchange.abort()


class GroupComm:
    """A group of ranks on any machines.

    On CPUs all parts are gathered and added in the order of the ranks, because the order of gloo's
    own sum depends on the size. NCCL's sum is the same on every rank, but may differ between
    batches.

    Args:
        group: the process group of torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._counters: dict[str, tuple[int, int, float]] = {}
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Comm`, also for the following methods."""
        with self._counted("all_reduce", x):
            if not x.is_cuda:
                return x.copy_(_sum(self._gather(x), x.dtype))
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        with self._counted("all_gather", x):
            return self._gather(x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        with self._counted("broadcast", x):
            dist.broadcast(_bytes(x), group=self._group, group_src=source)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        count = len(x) // self.size
        with self._counted("reduce_scatter", x):
            if not x.is_cuda:
                shares = self._gather(x)[:, self.rank * count : (self.rank + 1) * count]
                return _sum(shares, x.dtype)
            out = x.new_empty((count, *x.shape[1:]))
            dist.reduce_scatter(out, list(x.chunk(self.size)), group=self._group)
            return out

    def abort(self) -> None:
        """Make all waits fail, where torch can do that: with NCCL.

        A wait in gloo ends when the connection does, that is when the other rank's process ends. If
        that process hangs on another machine, the wait ends at the group's timeout.
        """
        self._group.abort()

    def collectives(self) -> Collectives:
        """Counters of all operations so far."""
        return dict(self._counters)

    @contextmanager
    def _counted(self, name: str, x: Tensor) -> Iterator[None]:
        """Count an operation; take a failure for the loss of another rank."""
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLostError(f"a collective operation failed: {reason}") from error
        calls, num_bytes, seconds = self._counters.get(name, (0, 0, 0.0))
        seconds += time.perf_counter() - started
        self._counters[name] = (calls + 1, num_bytes + x.nbytes, seconds)

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        dist.all_gather([_bytes(part) for part in out], _bytes(x), group=self._group)
        return out


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up along the first dimension, in order and in float32, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """A view of the same memory as bytes: gloo does not support every data type."""
    return x.view(-1).view(torch.uint8)
