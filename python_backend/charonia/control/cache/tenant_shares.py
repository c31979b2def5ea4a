"""What tenants may take from each other: who has the most blocks for its weight gives first.

Owns whose a block is, and how many each tenant has, held ones among them. Leaves the order within a
tenant to the policy of eviction that it wraps. Must not know requests, nor where weights come from.

    policy, of all tenants ──victim()──► a: 7 4 9     the tenant with the most blocks per weight
                                         b: 5         gives the first of its own, as the policy
                                         c: 8 2       has given them up

That is weighted max-min fairness: where somebody has more than its share of the blocks, in
proportion to the weights of those that have any, and can give some, who has no more than that loses
nothing; and where there is room nobody is limited. It counts before a block is given up that the
one in its place will be the asking tenant's.

To the policy an entry that it gives up is evicted, though it may be another tenant's turn. It
stays in line until it is that of its own. One that is asked for meanwhile has come back to the
policy as if it had been computed anew, of which ghosts that it keeps know better.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from charonia.control.cache.eviction import Eviction
from charonia.control.cache.eviction.scores import ByScore
from charonia.control.cache.prefix_index import PrefixIndex

_SCALE = 2.0**20  # blocks per weight are compared in such parts of one
_MOST = 2**80  # more parts than anybody has


class _Tenant:
    """One that has blocks.

    Attributes:
        number: below the number of blocks; nobody else has it now.
        num_blocks: held or free. num_free: entries that may be evicted.
        in_line: of the free ones those that the policy has given up, in its order.
    """

    __slots__ = ("in_line", "name", "num_blocks", "num_free", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.num_blocks = 0
        self.num_free = 0
        self.in_line: OrderedDict[int, None] = OrderedDict()


class TenantShares:
    """An `Eviction` around another one. O(log n), amortized.

    Args:
        policy: of all tenants' entries; there are none yet.
        index: the block that each entry has.
        weight_of: of a tenant, > 0; asked whenever its number of blocks changes, and of each in
            turn whenever somebody is to give.
    """

    def __init__(
        self, policy: Eviction, index: PrefixIndex, weight_of: Callable[[str], float]
    ) -> None:
        num_blocks = index.num_blocks
        self._policy = policy
        self._index = index
        self._weight_of = weight_of
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # as their turns come
        self._by_number: list[_Tenant | None] = [None] * num_blocks
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._givers = ByScore(num_blocks)  # numbers of tenants with free entries, most first
        self._owner: list[_Tenant | None] = [None] * num_blocks  # by block
        self._giver: list[_Tenant | None] = [None] * num_blocks  # of free entries; these by entry
        self._key = [b""] * num_blocks
        self._parent = [0] * num_blocks

    # ------------------------------------------------------------------ who has what

    def charge(self, tenant: str, num_blocks: int) -> None:
        """Count blocks that a tenant is about to have."""
        owner = self._tenants.get(tenant)
        if owner is None:
            owner = self._tenants[tenant] = _Tenant(tenant, self._unused.pop())
            self._by_number[owner.number] = owner
        self._count(owner, num_blocks)

    def assign(self, block_ids: Sequence[int], tenant: str) -> None:
        """Say which blocks they are."""
        for block_id in block_ids:
            self._owner[block_id] = self._tenants[tenant]

    def take_back(self, block_id: int) -> None:
        """A block is empty, and nobody's."""
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
        next_one = next(iter(self._tenants.values()))  # its weight may be another one by now
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
        """An entry is free no longer; whether the policy had given it up."""
        self._giver[entry] = None
        giver.num_free -= 1
        if not giver.num_free:
            self._givers.discard(giver.number)
        if entry not in giver.in_line:
            return False
        del giver.in_line[entry]
        return True

    def _rank(self, owner: _Tenant) -> None:
        """Put a tenant where it belongs among those that can give."""
        self._givers.discard(owner.number)
        if owner.num_free:
            per_weight = int(owner.num_blocks * _SCALE / self._weight_of(owner.name))
            self._givers.add(owner.number, _MOST - per_weight)

    def _owner_of(self, block_id: int) -> _Tenant:
        owner = self._owner[block_id]
        assert owner is not None
        return owner
