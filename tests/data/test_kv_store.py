"""How many blocks the cache has, and what is in them at first."""

import psutil
import pytest
import torch

from charonia.data import kv_store
from charonia.data.kv_store import KVStore, num_blocks_that_fit
from charonia.errors import ConfigError
from charonia.protocol import KVLayout

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


def fit(layout: KVLayout, max_useful_blocks: int) -> int:
    return num_blocks_that_fit(
        layout.bytes_per_block,
        CPU,
        max_useful_blocks=max_useful_blocks,
        gpu_memory_utilization=0.9,
        reserved_bytes=0,
    )


def test_pages_are_finite_before_anything_is_written() -> None:
    store = KVStore(layout(), ((2, 5, 7), (3,)), 3, CPU)
    assert len(store.pages) == 2
    for pages in store.pages:
        assert (pages.keys.shape, pages.values.shape) == ((3, 2, 5, 7), (3, 3))
        for part in pages:
            assert part.dtype == torch.bfloat16
            assert not part.any()


def test_on_a_cpu_no_more_blocks_are_made_than_can_be_used() -> None:
    assert fit(layout(), 100) == 101


def test_on_a_cpu_the_cache_takes_at_most_a_quarter_of_the_memory_available() -> None:
    available = psutil.virtual_memory().available
    assert 0 < fit(layout(2**20), 2**40) * 2**20 < available * 0.3


def test_a_memory_limit_of_the_control_group_counts(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert fit(layout(1000), 10_000) == 100
    (tmp_path / "memory.max").write_text("max\n")
    assert fit(layout(1000), 10_000) == 10_001


def test_memory_for_no_block_at_all_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 blocks .* num_gpu_blocks_override"):
        fit(layout(2**50), 10)
