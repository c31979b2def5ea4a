"""Keys of full blocks: two blocks with equal keys are interchangeable.

Owns the hash. A key chains over all tokens before it, so equal keys mean equal prefixes. The hash
is keyed (BLAKE2, RFC 7693, in keyed mode), so that nobody can construct a collision and read
another tenant's cache.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from charonia.protocol import KEY_BYTES


class BlockHasher:
    """Makes 128-bit keys of full blocks with a secret.

    Args:
        secret: key of the hash, 1 to 64 bytes, random per process.
        block_size: tokens per block.
        names, scope_name: map token ids and a scope to what is hashed instead; None hashes the
            originals.
    """

    def __init__(
        self,
        secret: bytes,
        block_size: int,
        names: Callable[[Sequence[int]], Sequence[int]] | None = None,
        scope_name: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._keyed = blake2b(digest_size=KEY_BYTES, key=secret)
        self._block_size = block_size
        self._names = names
        self._scope_name = scope_name

    def extend(self, keys: list[bytes], token_ids: Sequence[int], scope: bytes) -> None:
        """Append the keys of all full blocks of `token_ids` that `keys` does not have yet.

        `scope` is part of the first block's key and, through the chain, of every later one.
        """
        size = self._block_size
        start = len(keys) * size
        new = token_ids[start : len(token_ids) // size * size]
        tokens = array("q", new if self._names is None else self._names(new))
        if self._scope_name is not None:
            scope = self._scope_name(scope)
        data = tokens.tobytes()
        num_bytes = size * tokens.itemsize
        parent = keys[-1] if keys else b"\0" * KEY_BYTES + scope
        for first in range(0, len(data), num_bytes):
            block = self._keyed.copy()  # so the secret's own block is compressed only once
            block.update(parent + data[first : first + num_bytes])
            parent = block.digest()
            keys.append(parent)
