"""The rows of one epoch of the engine: which are free, and which were given back.

Owns the row numbers. Knows nothing about requests.
"""


class Rows:
    """Rows 0 to `num_rows` - 1, all of them free."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._leaves: list[int] = []

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def take(self) -> int:
        """Take a free row."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Give a row back. It leaves in the next plan, which may also assign it again."""
        self._leaves.append(row)
        self._free.append(row)

    def take_leaves(self) -> list[int]:
        """The rows that were given back since the last call."""
        leaves, self._leaves = self._leaves, []
        return leaves
