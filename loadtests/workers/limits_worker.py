"""The machine's limits: how fast all cores together read memory, and multiply bf16 matrices."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from worker import Answer, serve

READ_BYTES = 768 * 2**20
GEMM_SIZES = (2048, 4096)
TRIES = 4


class Limits:
    """Holds what is read and multiplied, so that a reading takes about a second."""

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._num_threads)
        self._integers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        self._matrices = [torch.randn(size, size).to(torch.bfloat16) for size in GEMM_SIZES]

    def measure(self) -> dict[str, float]:
        """Take one reading: the best of several tries and ways of each."""
        values = self._integers
        floats = values.view(torch.float32)
        ways = {
            "torch": lambda: values.sum(),
            "threads, int64": lambda: self._in_threads(values),
            "threads, float32": lambda: self._in_threads(floats),
        }
        seconds = min(_best(way) for way in ways.values())
        rates = [
            2 * len(m) ** 3 / _best(lambda m=m: torch.nn.functional.linear(m, m)) / 1e9
            for m in self._matrices
        ]
        return {"read_gb_s": READ_BYTES / seconds / 1e9, "gemm_gflop_s": max(rates)}

    def _in_threads(self, values: torch.Tensor) -> None:
        torch.set_num_threads(1)
        list(self._pool.map(torch.sum, values.chunk(self._num_threads)))
        torch.set_num_threads(self._num_threads)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest try."""
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _prepare(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    limits = Limits()
    limits.measure()
    hello = {
        "versions": {"torch": torch.__version__},
        "notes": [
            f"{torch.get_num_threads()} threads; best of {TRIES} tries: read {READ_BYTES >> 20} MiB"
            f" (torch.sum), multiply square bf16 matrices of {GEMM_SIZES}"
        ],
    }
    return hello, lambda request: limits.measure()


if __name__ == "__main__":
    serve(_prepare)
