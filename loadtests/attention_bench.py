"""Measure decode attention over pages: how fast K and V are read, beside what the machine can read.

    python loadtests/attention_bench.py                       # llama-135m's heads
    python loadtests/attention_bench.py --heads 32 --kv-heads 8
    python loadtests/attention_bench.py --kv-cache-dtype int8

Blocks lie anywhere in a KV cache of the engine's own, as they do in one that is in use, and layers
take turns, so that what is read comes from memory where all layers together exceed the last-level
cache. The read rate of the machine is measured between the cases, as `bench.py` measures it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from charonia.data.kv_store import KVStore
from charonia.data.ops.kv_format import FORMATS
from charonia.data.ops.native.build import best_isa, load_kernels
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.native.threads import ThreadLayout
from charonia.protocol import KVLayout
from record import circumstances
from report import markdown_table

sys.path.insert(0, str(Path(__file__).parent / "workers"))
from limits_worker import Limits

NUM_LAYERS = 30
MIN_SECONDS = 1.0
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One size of batch and context, and what was measured."""

    rows: int
    context: int
    cache_mib: float
    microseconds: float
    gb_s: float
    read_gb_s: float


def fill(pages: Tensor) -> None:
    """Have something in the pages; of codes and scales it does not matter what, but zeros do."""
    if pages.dtype == torch.bfloat16:
        pages.normal_()
    else:  # every byte and every pair of bytes is a finite number
        pages.view(torch.uint8).random_(0, 127)


def measure(
    kernels: ModuleType,
    store: KVStore,
    layout: KVLayout,
    heads: int,
    rows: int,
    context: int,
    limits: Limits,
) -> Case:
    """Time one layer's attention of `rows` new tokens: the median of some passes of all layers."""
    blocks_per_row = -(-context // BLOCK_SIZE)
    anywhere = torch.randperm(store.num_blocks - 1) + 1
    tables = anywhere[: rows * blocks_per_row].view(rows, blocks_per_row)
    none = torch.zeros(rows, dtype=torch.int64)
    angles = torch.zeros(1, layout.head_dim // 2, dtype=torch.bfloat16)
    starts, lengths = list(range(rows + 1)), [context] * rows
    step = kernels.Step(none, none, starts, lengths, tables, angles, angles)
    query = torch.randn(rows, heads, layout.head_dim).to(torch.bfloat16)
    seconds: list[float] = []
    until = time.perf_counter() + MIN_SECONDS
    while time.perf_counter() < until or len(seconds) < 8 * NUM_LAYERS:
        pages = store.pages[len(seconds) % NUM_LAYERS]
        started = time.perf_counter()
        kernels.paged_attention(query, step, pages)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    num_bytes = rows * context * layout.bytes_per_block // BLOCK_SIZE // NUM_LAYERS
    read = limits.measure()["read_gb_s"]
    cache = NUM_LAYERS * num_bytes / 2**20
    return Case(rows, context, cache, 1e6 * median, num_bytes / median / 1e9, read)


def table(cases: Sequence[Case]) -> str:
    """The cases as Markdown."""
    return markdown_table(
        ["rows", "context", "all layers' K and V, MiB", "µs per layer", "GB/s", "of the read rate"],
        [
            [
                str(case.rows),
                str(case.context),
                f"{case.cache_mib:.0f}",
                f"{case.microseconds:.0f}",
                f"{case.gb_s:.1f}",
                f"{case.gb_s / case.read_gb_s:.2f} of {case.read_gb_s:.1f}",
            ]
            for case in cases
        ],
    )


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--kv-cache-dtype", default="bfloat16", choices=["bfloat16", "int8", "fp8", "int4"]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[192, 2048])
    parser.add_argument("--output", type=Path, help="write JSON there, too")
    options = parser.parse_args()
    limits = Limits()  # while torch has all its threads
    kernels = load_kernels(best_isa(), print)
    threads = ThreadLayout.of(None, "auto")
    kernels.set_threads(threads.num_threads, list(threads.cores[1:]))
    kv_format = FORMATS[options.kv_cache_dtype]
    layout = KVLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        block_size=BLOCK_SIZE,
        dtype=options.kv_cache_dtype,
        bytes_per_block=2
        * NUM_LAYERS
        * BLOCK_SIZE
        * options.kv_heads
        * kv_format.width(options.head_dim)
        * kv_format.storage.itemsize,
    )
    num_blocks = 1 + max(options.rows) * -(-max(options.context) // BLOCK_SIZE)
    store = KVStore(layout, NativeOps.page_shapes(layout), num_blocks, torch.device("cpu"))
    for pages in store.pages:
        for part in pages:
            fill(part)
    cases = [
        measure(kernels, store, layout, options.heads, rows, context, limits)
        for context in options.context
        for rows in options.rows
    ]
    kept = options.kv_cache_dtype
    print(f"{best_isa()}, {threads}, {kept}; {NUM_LAYERS} layers take turns\n\n{table(cases)}")
    if options.output is not None:
        found = circumstances("attention_bench.py") | {"cases": [asdict(case) for case in cases]}
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
