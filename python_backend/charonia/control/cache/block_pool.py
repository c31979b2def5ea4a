"""References to blocks, and the blocks without content, some of which may be set aside.

Knows nothing about the content of a block. Block 0 is the null block and is never handed out.
"""


class BlockPool:
    """Blocks 1 .. num_blocks - 1, at first all empty.

    Attributes:
        num_blocks: with the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._aside: list[int] = []

    @property
    def num_empty(self) -> int:
        """Blocks without content and references."""
        return len(self._empty)

    @property
    def num_aside(self) -> int:
        """Blocks that are not used."""
        return len(self._aside)

    def set_aside(self, count: int) -> list[int]:
        """Stop using `count` empty blocks, those with the highest numbers.

        These are side by side in memory.
        """
        self._empty.sort(reverse=True)
        aside, self._empty = self._empty[:count], self._empty[count:]
        self._aside += aside
        return aside

    def use_again(self, count: int) -> None:
        """Use the `count` blocks again that were set aside last."""
        for _ in range(count):
            self._empty.append(self._aside.pop())

    def num_references(self, block_id: int) -> int:
        """Return the number of requests that hold a block."""
        return self._references[block_id]

    def take(self) -> int:
        """Take an empty block, which gets one reference. There must be an empty one."""
        block_id = self._empty.pop()
        self._references[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> bool:
        """Add a reference to a block with content; return whether it is the first one."""
        self._references[block_id] += 1
        return self._references[block_id] == 1

    def release(self, block_id: int) -> bool:
        """Remove a reference; return whether it was the last one."""
        assert self._references[block_id] > 0, f"block {block_id} is released but nobody holds it"
        self._references[block_id] -= 1
        return not self._references[block_id]

    def empty(self, block_id: int) -> None:
        """Note that a block without references has lost its content."""
        assert not self._references[block_id], f"block {block_id} is emptied but somebody holds it"
        self._empty.append(block_id)
