"""What is in the cache at first, and how blocks are copied."""

import msgspec
import pytest
import torch

from charonia.data.kv_store import KVStore
from charonia.protocol import BlockCopy, KVLayout

CPU = torch.device("cpu")


def layout(bytes_per_block: int = 1024) -> KVLayout:
    return KVLayout(
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        dtype="bfloat16",
        bytes_per_block=bytes_per_block,
    )


def test_pages_are_finite_before_anything_is_written() -> None:
    store = KVStore(layout(), ((2, 5, 7), (3,)), 3, CPU)
    assert len(store.pages) == 2
    for pages in store.pages:
        assert (pages.keys.shape, pages.values.shape) == ((3, 2, 5, 7), (3, 3))
        for part in pages:
            assert part.dtype == torch.bfloat16
            assert not part.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8", "int4"])
def test_blocks_are_copied_in_all_layers_as_if_one_after_the_other(dtype: str) -> None:
    kept = msgspec.structs.replace(layout(), dtype=dtype)
    store = KVStore(kept, ((2, 3), (3,)), 6, CPU)
    for place, pages in enumerate(store.pages):
        for part in pages:
            content = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            content += (torch.arange(6).view(-1, *[1] * (part.dim() - 1)) + 10 * place).to(
                content.dtype
            )
    copies = [BlockCopy(1, 2), BlockCopy(3, 1), BlockCopy(2, 5), BlockCopy(1, 4)]
    store.copy(copies)
    for place, pages in enumerate(store.pages):
        for part in pages:
            content = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            assert (content.flatten(1)[:, 0] - 10 * place).tolist() == [0, 3, 1, 3, 3, 1]
