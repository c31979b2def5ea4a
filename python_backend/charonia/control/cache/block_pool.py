"""References to blocks, and the blocks without content, of which some may be set aside.

Must not know what a block contains. Block 0 is the null block and never leaves.
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
        """Blocks without content that nobody holds."""
        return len(self._empty)

    @property
    def num_aside(self) -> int:
        """Blocks that are not to be used."""
        return len(self._aside)

    def set_aside(self, count: int) -> list[int]:
        """Have so many of the empty blocks not used, of which those with the highest numbers lie
        side by side in memory."""
        self._empty.sort(reverse=True)
        aside, self._empty = self._empty[:count], self._empty[count:]
        self._aside += aside
        return aside

    def use_again(self, count: int) -> None:
        """Have so many of the blocks used that were set aside last."""
        for _ in range(count):
            self._empty.append(self._aside.pop())

    def num_references(self, block_id: int) -> int:
        """How many requests hold a block."""
        return self._references[block_id]

    def take(self) -> int:
        """Take an empty block, of which there must be one; it has one reference then."""
        block_id = self._empty.pop()
        self._references[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> bool:
        """Add a reference to a block with content; whether it is the first one."""
        self._references[block_id] += 1
        return self._references[block_id] == 1

    def release(self, block_id: int) -> bool:
        """Take a reference away; whether it was the last one."""
        assert self._references[block_id] > 0, f"block {block_id} is released but nobody holds it"
        self._references[block_id] -= 1
        return not self._references[block_id]

    def empty(self, block_id: int) -> None:
        """A block that nobody holds has no content any more."""
        assert not self._references[block_id], f"block {block_id} is emptied but somebody holds it"
        self._empty.append(block_id)
