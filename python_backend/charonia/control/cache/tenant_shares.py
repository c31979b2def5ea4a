"""Shares of tenants in the cache: the tenant with the most blocks for its weight loses one first.

Owns the owner of each block, and each tenant's number of blocks, held ones included. Leaves the
order within a tenant to the eviction policy that it wraps. Knows nothing about requests, or where
weights come from.

    policy, of all tenants ──victim()──► a: 7 4 9     the tenant with the most blocks per weight
                                         b: 5         loses the first in its own queue; queues
                                         c: 8 2       are in the order of the policy's victims

This is weighted max-min fairness. A tenant's share is proportional to its weight among the tenants
that have blocks. A tenant within its share loses nothing as long as a tenant above its share has
free entries. While there are empty blocks no tenant is limited. A new block is counted to the
tenant that asks for it before a block is evicted for it.

For the policy an entry is evicted when it chooses it as a victim, even if another tenant must give
a block. The entry then waits in its tenant's queue. If it is hit there, it is inserted into the
policy again, as if it had been computed anew; a policy that keeps ghosts recognizes it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from charonia.control.cache.eviction import Eviction
from charonia.control.cache.eviction.scores import ByScore
from charonia.control.cache.prefix_index import PrefixIndex

_SCALE = 2.0**20  # blocks per weight are compared in multiples of 1 / _SCALE
_MOST = 2**80  # above any such number


class _Tenant:
    """A tenant that has blocks.

    Attributes:
        number: a number below the number of blocks, unique among current tenants.
        num_blocks: held or free. num_free: entries that may be evicted.
        in_line: free entries that were the policy's victims, in its order.
    """

    __slots__ = ("in_line", "name", "num_blocks", "num_free", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.num_blocks = 0
        self.num_free = 0
        self.in_line: OrderedDict[int, None] = OrderedDict()


class TenantShares:
    """An `Eviction` that wraps another one. O(log n), amortized.

    Args:
        policy: orders all tenants' entries; there are none yet.
        index: the block of each entry.
        weight_of: a tenant's weight, > 0. It is read whenever the tenant's number of blocks
            changes, and with each victim for one tenant in turn.
    """

    def __init__(
        self, policy: Eviction, index: PrefixIndex, weight_of: Callable[[str], float]
    ) -> None:
        num_blocks = index.num_blocks
        self._policy = policy
        self._index = index
        self._weight_of = weight_of
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # by the turn to read the weight
        self._by_number: list[_Tenant | None] = [None] * num_blocks
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._givers = ByScore(num_blocks)  # numbers of tenants with free entries, most first
        self._owner: list[_Tenant | None] = [None] * num_blocks  # by block
        self._giver: list[_Tenant | None] = [None] * num_blocks  # of free entries; these by entry
        self._key = [b""] * num_blocks
        self._parent = [0] * num_blocks

    # ------------------------------------------------------------------ ownership

    def charge(self, tenant: str, num_blocks: int) -> None:
        """Count blocks that a tenant is about to get."""
        owner = self._tenants.get(tenant)
        if owner is None:
            owner = self._tenants[tenant] = _Tenant(tenant, self._unused.pop())
            self._by_number[owner.number] = owner
        self._count(owner, num_blocks)

    def assign(self, block_ids: Sequence[int], tenant: str) -> None:
        """Set the owner of the blocks that were counted by `charge`."""
        for block_id in block_ids:
            self._owner[block_id] = self._tenants[tenant]

    def take_back(self, block_id: int) -> None:
        """A block is empty and has no owner any more."""
        owner = self._owner_of(block_id)
        self._owner[block_id] = None
        self._count(owner, -1)

    def _count(self, owner: _Tenant, num_blocks: int) -> None:
        owner.num_blocks += num_blocks
        self._rank(owner)
        if not owner.num_blocks:
            del self._tenants[owner.name]
            self._by_number[owner.number] = None
            self._unused.append(owner.number)

    # ------------------------------------------------------------------ as an eviction

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        self._key[entry] = key
        self._parent[entry] = parent
        self._policy.insert(entry, key, parent)

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        giver = self._giver[entry]
        if giver is not None and self._leave(entry, giver):
            self._policy.insert(entry, self._key[entry], self._parent[entry])
        else:
            self._policy.hit(entry)

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        giver = self._giver[entry] = self._owner_of(self._index.block_of(entry))
        giver.num_free += 1
        if giver.num_free == 1:
            self._rank(giver)
        self._policy.free(entry)

    def victim(self) -> int:
        """See `Eviction`."""
        next_one = next(iter(self._tenants.values()))  # its weight may have changed
        self._tenants.move_to_end(next_one.name)
        self._rank(next_one)
        giver = self._by_number[self._givers.first()]
        assert giver is not None
        while not giver.in_line:
            entry = self._policy.victim()
            self._policy.evict(entry)
            one = self._giver[entry]
            assert one is not None
            one.in_line[entry] = None
        return next(iter(giver.in_line))

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        giver = self._giver[entry]
        assert giver is not None
        if not self._leave(entry, giver):
            self._policy.evict(entry)

    def _leave(self, entry: int, giver: _Tenant) -> bool:
        """An entry is no longer free; return whether it was in its tenant's queue."""
        self._giver[entry] = None
        giver.num_free -= 1
        if not giver.num_free:
            self._givers.discard(giver.number)
        if entry not in giver.in_line:
            return False
        del giver.in_line[entry]
        return True

    def _rank(self, owner: _Tenant) -> None:
        """Update a tenant's place among those that have free entries."""
        self._givers.discard(owner.number)
        if owner.num_free:
            per_weight = int(owner.num_blocks * _SCALE / self._weight_of(owner.name))
            self._givers.add(owner.number, _MOST - per_weight)

    def _owner_of(self, block_id: int) -> _Tenant:
        owner = self._owner[block_id]
        assert owner is not None
        return owner
