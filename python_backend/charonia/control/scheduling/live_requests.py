"""Every live request and its state: parked, waiting, running, or ended but still in flight.

Owns these states and the transitions between them, with the row, blocks and reservations that each
gives or takes. Knows nothing about steps or budgets, and does not choose which request moves.

    add() ──► waiting ──── admit() ───► running ──► end(): gone; if it is in flight, it keeps its
      │        ▲   ▲                     │                 row and blocks until drop_ended()
      ▼        │   └───── preempt() ─────┘
    parked ────┘ release_parked(): the prompt of their group is computed

A step in flight writes into its requests' blocks. Until its apply() these requests are not
preempted, and none of their blocks is freed.
"""

from collections.abc import Iterable

from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.lookups import Lookups
from charonia.control.drafts.speculation import Speculation
from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.policies import Policy
from charonia.control.scheduling.poison_detector import PoisonDetector
from charonia.control.scheduling.rows import Rows
from charonia.control.state.limits import Limits
from charonia.control.state.request import Group, Request
from charonia.control.state.stats import SchedulerStats
from charonia.errors import InvalidRequestError
from charonia.protocol import BlockCopy


class LiveRequests:
    """The requests of one scheduler, through all epochs of its engine.

    Args:
        policy: holds the waiting and the running requests, each in its order.
        poison_detector, speculation, lengths, peak_memory: told when a request ends.
        stats: counts preemptions.

    Attributes:
        by_key: all requests that have not ended, in the order of arrival.
        ended: requests that have ended but are in flight; they keep their rows and blocks.
    """

    def __init__(
        self,
        policy: Policy,
        poison_detector: PoisonDetector,
        speculation: Speculation | None,
        lengths: OutputLengths,
        peak_memory: PeakMemory | None,
        stats: SchedulerStats,
    ) -> None:
        self.by_key: dict[str, Request] = {}
        self.ended: list[Request] = []
        self._policy = policy
        self._waiting = policy.waiting
        self._running = policy.running
        self._poison_detector = poison_detector
        self._speculation = speculation
        self._lengths = lengths
        self._peak_memory = peak_memory
        self._stats = stats
        self._next_number = 0
        self._limits: Limits
        self._blocks: BlockTables
        self._rows: Rows
        self._lookups: Lookups

    def unparked(self) -> Iterable[Request]:
        """All requests that have not ended, except parked ones."""
        return (one for one in self.by_key.values() if one not in one.group.parked)

    # ------------------------------------------------------------------ epochs

    def lose_all(self, limits: Limits) -> None:
        """The engine lost all rows and blocks: running requests wait, and ended ones are dropped.

        Args:
            limits: those of the next engine.
        """
        for request in self._running.in_order():
            self._running.remove(request)
            self._blocks.forget(request)
            self._wait(request)
        for request in (*self.by_key.values(), *self.ended):
            request.row = None
            request.block_keys = []  # the new engine's blocks may be of another size
            request.awaits = None
            request.num_in_flight = request.num_computing = request.num_sampling = 0
            request.max_known = _max_known(request, limits)
        self.drop_ended()

    def start_epoch(
        self, limits: Limits, blocks: BlockTables, rows: Rows, lookups: Lookups
    ) -> None:
        """Begin with the first step of an engine; no request has a row or a block."""
        self._limits = limits
        self._blocks = blocks
        self._rows = rows
        self._lookups = lookups

    # ------------------------------------------------------------------ arrival

    def add(self, request: Request) -> None:
        """Add a request. All but the first of a group are parked until the prompt is computed.

        Raises:
            InvalidRequestError: its prompt is empty or too long, or its key belongs to a live one.
        """
        if request.key in self.by_key:
            raise InvalidRequestError("there is a live request with this key")
        self._limits.check_prompt(request.num_prompt)
        request.max_known = _max_known(request, self._limits)
        request.number = self._next_number
        self._next_number += 1
        self.by_key[request.key] = request
        group = request.group
        group.members.append(request)
        if group.leader is None:
            group.leader = request
            self._enter(request)
        else:
            group.parked.append(request)

    def release_parked(self, leader: Request) -> None:
        """The prompt of a group is computed: its parked requests now wait for a row."""
        group = leader.group
        group.leader = None
        parked, group.parked = group.parked, []
        num_full = leader.num_prompt // self._limits.block_size
        for request in parked:
            request.block_keys = leader.block_keys[:num_full]  # the tokens are the same
            self._enter(request)

    def _follow(self, group: Group) -> None:
        """A group's leader ended before the prompt was computed: another request takes over."""
        group.leader = group.parked.pop(0) if group.parked else None
        if group.leader is not None:
            self._enter(group.leader)

    def _enter(self, request: Request) -> None:
        """Put a new request into the queue for a row."""
        self._lookups.add(request)
        self._wait(request, is_new=True)

    def _wait(self, request: Request, *, is_new: bool = False) -> None:
        self._waiting.push(request, is_new=is_new)
        if self._policy.deadlines is not None:
            self._policy.deadlines.note_waiting(request)

    # ------------------------------------------------------------------ waiting and running

    def demote(self, request: Request) -> None:
        """Put a waiting request behind all others."""
        self._waiting.remove(request)
        request.is_demoted = True
        self._waiting.push(request, is_new=False)

    def admit(self, request: Request, hits: list[int]) -> BlockCopy | None:
        """Give a waiting request a row and the cached blocks of its prefix.

        Args:
            hits: these blocks, looked up just now.

        Returns:
            A block that must be copied first, see `BlockTables.begin`.
        """
        copy = self._blocks.begin(request, hits)
        self._waiting.remove(request)
        self._lookups.forget(request)
        if self._policy.deadlines is not None:
            self._policy.deadlines.note_leaving(request)
        self._running.add(request)
        request.row = self._rows.take()
        return copy

    def preempt(self, request: Request) -> None:
        """Take row and blocks from a running request, which must be in no step in flight."""
        self._stats.preemptions += 1
        request.num_preemptions += 1
        self._running.remove(request)
        self._blocks.displace(request)
        self._give_row_back(request)
        self._wait(request)

    # ------------------------------------------------------------------ end

    def end(self, request: Request, *, is_complete: bool = False) -> None:
        """Forget a request. It keeps its row and blocks while it is in flight.

        Args:
            is_complete: whether it has generated all its tokens.
        """
        if not request.is_probe:
            self._note_length(request, is_complete=is_complete)
        request.is_ended = True
        del self.by_key[request.key]
        if self._speculation is not None:
            self._speculation.forget(request)
        group = request.group
        group.members.remove(request)
        if request in group.parked:
            group.parked.remove(request)
            return
        if request is group.leader:
            self._follow(group)
        if request in self._waiting:
            self._waiting.remove(request)
            self._lookups.forget(request)
            self._blocks.kv.unreserve(request.key)
        else:
            self._running.remove(request)
        if self._policy.deadlines is not None:
            self._policy.deadlines.note_leaving(request)
        self.ended.append(request)
        self.drop_ended()

    def drop_ended(self) -> None:
        """Free the rows and blocks of ended requests that are not in flight any more."""
        ended, self.ended = self.ended, []
        for request in ended:
            if request.num_in_flight:
                self.ended.append(request)
                continue
            self._poison_detector.forget(request)
            if request.row is not None:
                self._blocks.release(request)
                self._give_row_back(request)
        if self._peak_memory is not None:
            self._peak_memory.num_held = sum(len(request.block_ids) for request in self.ended)

    def _give_row_back(self, request: Request) -> None:
        """Free the row of a request that no longer runs and holds no blocks."""
        assert request.row is not None
        assert not request.num_in_flight, "a step in flight writes into its blocks"
        self._rows.give_back(request.row)
        request.row = None

    def _note_length(self, request: Request, *, is_complete: bool) -> None:
        num_tokens, num_accepted = request.num_generated, request.drafts.num_accepted
        if is_complete:
            self._lengths.note(num_tokens, num_accepted)
        elif num_tokens:
            num_most = request.max_known - request.num_prompt
            self._lengths.note_cut_off(num_tokens, num_accepted, num_most=num_most)


def _max_known(request: Request, limits: Limits) -> int:
    """Tokens, prompt included, at which a request ends by its length."""
    return min(limits.max_model_len, request.num_prompt + request.max_tokens)
