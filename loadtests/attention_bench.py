"""Measure attention over pages, beside what the machine reads and multiplies.

    python loadtests/attention_bench.py                       # llama-135m's heads
    python loadtests/attention_bench.py --heads 32 --kv-heads 8
    python loadtests/attention_bench.py --kv-cache-dtype int8
    python loadtests/attention_bench.py --isa avx2            # the kernels of an older processor

Two kinds of steps: some rows that decode, by how fast K and V are read; and the last tokens of one
prompt, a chunk of it or all, by their products, of each query and key that it sees, in q·K and p·V.

Blocks lie anywhere in a KV cache of the engine's own, as they do in one that is in use, and layers
take turns, so that what is read comes from memory where all layers together exceed the last-level
cache. What the machine reads and multiplies is measured between the cases, as `bench.py` does it.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import ModuleType

import torch
from torch import Tensor
from tqdm import tqdm

from charonia.data.kv_store import KVStore
from charonia.data.ops.kv_format import FORMATS
from charonia.data.ops.native.build import load_kernels, supported_isas
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.native.threads import ThreadLayout
from charonia.protocol import KVLayout
from command_line import add_output, make_parser, positive
from paths import WORKERS
from record import circumstances, output_stem, write_record
from report import markdown_table

sys.path.insert(0, str(WORKERS))
from limits_worker import Limits

NUM_LAYERS = 30
MIN_SECONDS = 1.0
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One size of a step, and what was measured.

    Attributes:
        tokens: of each row in this step. context: of each row, these included.
        gb_s, gflop_s: of K and V, each once, and of the products with what each query sees.
        read_gb_s, gemm_gflop_s: of the machine.
    """

    rows: int
    tokens: int
    context: int
    cache_mib: float
    microseconds: float
    gb_s: float
    gflop_s: float
    read_gb_s: float
    gemm_gflop_s: float


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
    tokens: int,
    context: int,
    limits: Limits,
) -> Case:
    """Time one layer's attention of `rows` rows of new tokens: the median of some passes."""
    blocks_per_row = -(-context // BLOCK_SIZE)
    anywhere = torch.randperm(store.num_blocks - 1) + 1
    tables = anywhere[: rows * blocks_per_row].view(rows, blocks_per_row)
    none = torch.zeros(rows * tokens, dtype=torch.int64)
    angles = torch.zeros(1, layout.head_dim // 2, dtype=torch.bfloat16)
    starts, lengths = [row * tokens for row in range(rows + 1)], [context] * rows
    step = kernels.Step(none, none, starts, lengths, tables, angles, angles)
    query = torch.randn(rows * tokens, heads, layout.head_dim).to(torch.bfloat16)
    seconds: list[float] = []
    until = time.perf_counter() + MIN_SECONDS
    while time.perf_counter() < until or len(seconds) < 8 * NUM_LAYERS:
        pages = store.pages[len(seconds) % NUM_LAYERS]
        started = time.perf_counter()
        kernels.paged_attention(query, step, pages)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    num_bytes = rows * context * layout.bytes_per_block // BLOCK_SIZE // NUM_LAYERS
    num_seen = rows * (tokens * context - tokens * (tokens - 1) // 2)
    num_flop = 4 * num_seen * heads * layout.head_dim
    return Case(
        rows,
        tokens,
        context,
        cache_mib=NUM_LAYERS * num_bytes / 2**20,
        microseconds=1e6 * median,
        gb_s=num_bytes / median / 1e9,
        gflop_s=num_flop / median / 1e9,
        **limits.measure(),
    )


def decode_table(cases: Sequence[Case]) -> str:
    """Tabulate the cases of rows that decode, in Markdown."""
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
            if case.tokens == 1
        ],
    )


def prompt_table(cases: Sequence[Case]) -> str:
    """Tabulate the cases of prompts, in Markdown."""
    return markdown_table(
        ["tokens", "context", "µs per layer", "GFLOP/s", "of the product rate"],
        [
            [
                str(case.tokens),
                str(case.context),
                f"{case.microseconds:.0f}",
                f"{case.gflop_s:.0f}",
                f"{case.gflop_s / case.gemm_gflop_s:.2f} of {case.gemm_gflop_s:.0f}",
            ]
            for case in cases
            if case.tokens > 1
        ],
    )


def chunk(text: str) -> tuple[int, int]:
    """Tokens and context of `TOKENS/CONTEXT`, for a command line."""
    tokens, context = (positive(part) for part in text.split("/"))
    if not 1 < tokens <= context:
        raise ValueError
    return tokens, context


def main() -> None:
    """Measure as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument(
        "--kv-cache-dtype", default="bfloat16", choices=["bfloat16", "int8", "fp8", "int4"]
    )
    isas = supported_isas()
    parser.add_argument(
        "--isa",
        default=isas[0],
        choices=isas,
        help="of the kernels; the machine's rates are those of its best one (default: %(default)s)",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[192, 2048])
    parser.add_argument(
        "--chunks",
        type=chunk,
        nargs="*",
        metavar="TOKENS/CONTEXT",
        default=[
            *((length, length) for length in (128, 512, 1024, 2048, 4096, 8192)),
            *((length, 4096) for length in (16, 128, 512, 2048)),
        ],
    )
    add_output(parser, "attention")
    options = parser.parse_args()
    stem = output_stem(options.output, "attention")
    about = circumstances("attention_bench.py")
    limits = Limits()  # while torch has all its threads
    kernels = load_kernels(options.isa, print)
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
    steps = [(rows, 1, context) for context in options.context for rows in options.rows]
    steps += [(1, *chunk) for chunk in options.chunks]
    num_blocks = 1 + max(rows * -(-context // BLOCK_SIZE) for rows, _, context in steps)
    store = KVStore(layout, NativeOps.page_shapes(layout), num_blocks, torch.device("cpu"))
    for pages in store.pages:
        for part in pages:
            fill(part)
    cases = [
        measure(kernels, store, layout, options.heads, *step, limits)
        for step in tqdm(steps, unit="step")
    ]
    print(f"{options.isa}, {threads}, {options.kv_cache_dtype}; {NUM_LAYERS} layers take turns")
    print(f"\n{decode_table(cases)}\n\n{prompt_table(cases)}")
    found = about | {
        "isa": options.isa,
        "kv_cache_dtype": options.kv_cache_dtype,
        "cases": [asdict(case) for case in cases],
    }
    print(f"\n{write_record(stem, found)}")


if __name__ == "__main__":
    main()
