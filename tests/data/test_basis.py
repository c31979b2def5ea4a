"""What is the same on every rank: which device it takes."""

import pytest
import torch

from charonia.data.basis import LocalRank, _device
from charonia.errors import ConfigError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a machine with two GPUs; nothing is computed on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_takes_a_gpu_by_number_also_where_it_is_alone_on_its_machine(name: str) -> None:
    assert _device(name, None) == torch.device("cuda")
    assert _device(name, LocalRank(0, 1)) == torch.device("cuda", 0)
    assert _device(name, LocalRank(1, 2)) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="3 ranks on a machine with 2 CUDA devices"):
        _device(name, LocalRank(0, 3))
