"""Approximate counts of how often keys were used lately, in little memory.

The count-min sketch with aging of TinyLFU: Einziger, Friedman, Manes 2017 ("TinyLFU: A Highly
Efficient Cache Admission Policy", ACM Transactions on Storage 13, sections 3.2 and 3.4.2).
"""

_NUM_ROWS = 4
_BITS = 32  # bits of a key for each row
_MAX_COUNT = 15
_ADDED_PER_KEY = 10  # additions per key before all counts are halved
_HALF = bytes(count // 2 for count in range(256))
_SLICE = 512  # counts that are halved at once, so that no call has to halve all of them


class FrequencySketch:
    """Counts up to 15, of keys that are random bits themselves.

    Args:
        num_keys: number of keys whose counts should be distinct.
    """

    def __init__(self, num_keys: int) -> None:
        width = 1 << max(4, (2 * num_keys - 1).bit_length())
        self._mask = width - 1
        self._starts = [row * width for row in range(_NUM_ROWS)]
        self._counts = bytearray(_NUM_ROWS * width)
        self._halved = len(self._counts)  # counts that the current halving has done
        self._max_added = _ADDED_PER_KEY * max(num_keys, 16)
        self._num_added = 0

    def add(self, key: bytes) -> None:
        """Count a key once more. Only its smallest counts grow, which are the least wrong."""
        places = self._places(key)
        counts = self._counts
        least = min(counts[place] for place in places)
        if least < _MAX_COUNT:
            for place in places:
                if counts[place] == least:
                    counts[place] = least + 1
        self._num_added += 1
        if self._num_added >= self._max_added:
            self._num_added //= 2
            self._halved = 0
        if self._halved < len(counts):
            end = self._halved + _SLICE
            counts[self._halved : end] = counts[self._halved : end].translate(_HALF)
            self._halved = end

    def count(self, key: bytes) -> int:
        """Return the count of a key; never too low, except for the halving."""
        return min(self._counts[place] for place in self._places(key))

    def _places(self, key: bytes) -> list[int]:
        bits = int.from_bytes(key, "little")
        mask = self._mask
        return [start + (bits >> _BITS * row & mask) for row, start in enumerate(self._starts)]
