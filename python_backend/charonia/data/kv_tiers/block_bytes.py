"""The content of a block, in all models of a rank, as bytes in host memory.

Owns copying between a device's pages and the host. Must not know slots or keys.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from charonia.data.kv_store import KVStore
from charonia.data.kv_tiers.slots import Pieces


class BlockBytes:
    """Blocks as pieces of bytes: one for the keys of each layer, and one for its values.

    On a CPU the pieces are the pages themselves. On another device they are a copy of one block, in
    a single buffer.

    Args:
        stores: of the target, and of the draft model if this rank has a part of it; with the same
            number of blocks.

    Attributes:
        num_bytes: the size of one block.
    """

    def __init__(self, stores: Sequence[KVStore]) -> None:
        self._pages = [
            tensor.view(store.num_blocks, -1).view(torch.uint8)
            for store in stores
            for pages in store.pages
            for tensor in pages
        ]
        sizes = [page.shape[1] for page in self._pages]
        self.num_bytes = sum(sizes)
        self._on_host: list[NDArray[np.uint8]] = []
        self._staged: list[torch.Tensor] = []
        if self._pages[0].device.type == "cpu":
            self._on_host = [page.numpy() for page in self._pages]
        else:
            stage = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
            self._staged = list(torch.split(stage, sizes))

    def read(self, block_id: int) -> Pieces:
        """Read a block's content. On a device other than a CPU it is valid until the next call."""
        for page, staged in zip(self._pages, self._staged, strict=False):
            staged.copy_(page[block_id])
        return self.pieces(block_id)

    def pieces(self, block_id: int) -> Pieces:
        """The pieces to fill with a block's content, before calling `write`."""
        if self._staged:
            return [staged.numpy() for staged in self._staged]
        return [page[block_id] for page in self._on_host]

    def write(self, block_id: int) -> None:
        """Write the filled pieces to a block."""
        for page, staged in zip(self._pages, self._staged, strict=False):
            page[block_id].copy_(staged)

    def clear(self, block_id: int) -> None:
        """Fill a block with zeros."""
        for page in self._pages:
            page[block_id].zero_()
