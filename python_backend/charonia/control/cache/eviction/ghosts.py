"""Keys of what was evicted lately."""

from collections import OrderedDict


class Ghosts:
    """Keys, of which the oldest are forgotten."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember one."""
        self._keys[key] = None

    def remove(self, key: bytes) -> None:
        """Forget one that is there."""
        del self._keys[key]

    def shrink(self, num_keys: int) -> None:
        """Forget the oldest ones but so many."""
        while len(self._keys) > max(0, num_keys):
            self._keys.popitem(last=False)
