"""Keys of recently evicted entries."""

from collections import OrderedDict


class Ghosts:
    """A bounded set of keys that forgets the oldest ones."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember a key."""
        self._keys[key] = None

    def remove(self, key: bytes) -> None:
        """Forget a key, which must be there."""
        del self._keys[key]

    def shrink(self, num_keys: int) -> None:
        """Forget the oldest keys until at most `num_keys` are left."""
        while len(self._keys) > max(0, num_keys):
            self._keys.popitem(last=False)
