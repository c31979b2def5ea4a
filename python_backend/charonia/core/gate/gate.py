"""Admission control: queue limits, rates, concurrency, and deadlines that cannot be met.

Owns the counts, in all and per tenant, the refusals, and the choice of a waiting request that gives
way. Of a request's course it knows only its start and its end. Its caller keeps the entry of each.
For all threads.

Rates are token buckets: each request takes one token, and tokens come back at the tenant's rate, up
to the size of its bucket.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control.lazy_heap import LazyHeap
from charonia.core.gate.queue_order import Entry, QueueOrder
from charonia.core.gate.queue_wait import QueueWait
from charonia.core.gate.tenants import TenantArgs, Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.core.scheduler_factory import rank_of
from charonia.errors import (
    InvalidRequestError,
    LateRequestError,
    QueueFullError,
    RateLimitedError,
    TenantQueueFullError,
    shown,
)

MAX_REMEMBERED = 4096
"""Least number of idle tenants whose buckets are kept; at most twice as many tenants in all."""
_FORGOTTEN_AT_ONCE = 2  # more than one, so that an excess shrinks
_LIFE_SHARE = 0.1  # weight of the last request in the mean


@dataclass(slots=True)
class _Account:
    """The counts of one tenant.

    Attributes:
        num_waiting, num_waiting_tokens: requests before their first step, and their prompt tokens.
        came_last: the number of its last request.
        life_s: mean time from a request's arrival to its end; None before the first end.
        filling: tokens in its bucket at `filled_at`; None before its first request.
    """

    num_live: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    came_last: int = 0
    wait: QueueWait = field(default_factory=QueueWait)
    life_s: float | None = None
    filling: float | None = None
    filled_at: float = 0.0


class Leaver(NamedTuple):
    """A request that leaves the queue for a new one, and the error that it gets."""

    entry: Entry
    error: QueueFullError


class Gate:
    """Refuses requests beyond the limits, before any work is done for them.

    With fair shares, waits are predicted for each tenant on its own.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(
        self, tenants: Tenants, args: SchedulerArgs, *, clock: Callable[[], float]
    ) -> None:
        self._tenants = tenants
        self._args = args
        self._clock = clock
        self._wait = QueueWait()
        self._order = QueueOrder(tenants if args.fair_share else None)
        self._predicts = True
        self._engine_args: EngineArgs | None = None
        self._num_entered = 0
        self._num_waiting_tokens = 0
        self._accounts: dict[str, _Account] = {}
        self._busy: dict[str, _Account] = {}  # accounts with live requests
        self._idle: LazyHeap[str] = LazyHeap()  # the others, least recently used first
        self._num_leaving = 0  # live requests that are to give way
        self._lock = threading.Lock()

    def num_of_tenants(self) -> dict[str, tuple[int, int]]:
        """Number of waiting and of started requests, by the tenants' labels in metrics."""
        found = dict.fromkeys(self._tenants.labels, (0, 0))
        with self._lock:
            for tenant, account in self._busy.items():
                label = self._tenants.label_of(tenant)
                num_waiting, num_others = found.get(label, (0, 0))
                num_waiting += account.num_waiting
                num_others += account.num_live - account.num_waiting
                found[label] = num_waiting, num_others
        return found

    @property
    def num_live(self) -> int:
        """Number of live requests, without probes."""
        with self._lock:
            return sum(account.num_live for account in self._busy.values())

    def follow(self, engine_args: EngineArgs) -> None:
        """Take over the scheduling policy of the engine that serves now."""
        if engine_args is self._engine_args:
            return
        with self._lock:
            self._engine_args = engine_args
            self._order.follow(rank_of(engine_args, self._args))
            # With deadlines, the newest request may be served first.
            self._predicts = engine_args.scheduling_policy != "deadline"

    def check(self, tenant: str, num_coming: int) -> None:
        """Refuse a request early that `enter` would refuse whatever its prompt is.

        Args:
            num_coming: requests of this tenant that are on their way to `enter`.

        Raises:
            InvalidRequestError, QueueFullError, RateLimitedError: as `enter`.
        """
        args = self._limits_of(tenant)
        with self._lock:
            account = self._accounts.get(tenant) or _Account()
            _check(tenant, account, args, num_coming)
            filling = _filling(account, args, self._clock())
            _check_bucket(tenant, None if filling is None else filling - num_coming, args)

    def enter(
        self,
        request: GenerationRequest,
        arrived_at: float | None = None,
        *,
        num_queued: int = 0,
    ) -> tuple[Entry, Leaver | None]:
        """Admit a request; `leave` must follow. For a probe only the queue's size counts.

        Args:
            arrived_at: its arrival, by the clock; None is now. Its deadline counts from then.
            num_queued: length of the queue: live requests beyond the rows of the engine.

        Returns:
            Its entry, and the request that is to give way, if the queue is full. That one goes on
            if it starts before it has ended, see `Entry.is_leaving`.

        Raises:
            InvalidRequestError: its tenant is not served.
            QueueFullError: too many requests or tokens wait, in all or (TenantQueueFullError) of
                its tenant.
            RateLimitedError: its tenant has too many live requests, or sends them too fast.
            LateRequestError: it would wait until after its deadline.
        """
        params, num_tokens, now = request.params, len(request.prompt_ids), self._clock()
        tenant, arrived_at = params.tenant, now if arrived_at is None else arrived_at
        entry = _entry_of(request, arrived_at, now)
        if request.is_probe:
            if self._is_full(num_queued):
                raise QueueFullError.of(str(self._args.max_queue_size))
            return entry, None
        args = self._limits_of(tenant)
        with self._lock:
            self._num_entered += 1
            entry.number = self._num_entered
            maximum, last = self._check_room(entry, num_queued)
            account = self._accounts.get(tenant) or _Account()
            _check(tenant, account, args)
            if _exceeds(account.num_waiting_tokens, num_tokens, args.max_queue_tokens):
                most = f"{args.max_queue_tokens} prompt tokens of tenant {shown(tenant)}"
                raise TenantQueueFullError.of(most)
            if self._predicts and params.deadline_ms is not None:
                age_s = max(0.0, now - arrived_at)
                self._check_wait(params.deadline_ms, age_s, params.priority, account)
            filling = _filling(account, args, now)
            _check_bucket(tenant, filling, args)
            account.filling = None if filling is None else filling - 1.0
            account.filled_at = now
            self._take_in(entry, account)
            return entry, None if last is None else self._give_way(last, maximum)

    def wait_s(self) -> float | None:
        """Expected wait of a new request behind all others, in seconds; None while unknown.

        Behind nobody it is known to be none, so that an idle server does not stay degraded.
        """
        with self._lock:
            return 0.0 if self._wait.is_empty else self._wait.seconds(None, self._clock())

    def note_started(self, entry: Entry) -> None:
        """Note that a request has started."""
        with self._lock:
            self._go_on(entry)
            self._wait_no_longer(entry, has_started=True)

    def note_joined(self, entry: Entry) -> None:
        """Note that a request gets another one's output, and waits for no step of its own."""
        with self._lock:
            self._wait_no_longer(entry, has_started=False)

    def leave(self, entry: Entry) -> None:
        """Note the end of a request; one that has ended, or is a probe, is ignored."""
        with self._lock:
            if not entry.is_counted:
                return
            entry.is_counted = False
            self._go_on(entry)
            self._wait_no_longer(entry, has_started=False)
            account = self._busy[entry.tenant]
            lived_s = self._clock() - entry.entered_at
            mean_s = lived_s if account.life_s is None else account.life_s
            account.life_s = mean_s + _LIFE_SHARE * (lived_s - mean_s)
            account.num_live -= 1
            if not account.num_live:
                del self._busy[entry.tenant]
                self._idle.add(entry.tenant, account.came_last)

    def _limits_of(self, tenant: str) -> TenantArgs:
        """Raises InvalidRequestError: the tenant is not served."""
        if not self._tenants.accepts(tenant):
            raise InvalidRequestError(f"tenant {shown(tenant)} is not known here")
        return self._tenants.of(tenant)

    def _is_full(self, num_queued: int) -> bool:
        return num_queued - self._num_leaving >= self._args.max_queue_size

    def _check_room(self, entry: Entry, num_queued: int) -> tuple[str, Entry | None]:
        """The limit that is reached, and the request that is to give way, if any.

        Raises:
            QueueFullError: no request gives way, or one would not be enough.
        """
        num_tokens, most_tokens = self._num_waiting_tokens, self._args.max_queue_tokens
        if self._is_full(num_queued):
            maximum = str(self._args.max_queue_size)
        elif _exceeds(num_tokens, entry.num_tokens, most_tokens):
            maximum = f"{most_tokens} prompt tokens"
        else:
            return "", None
        last = self._order.last_behind(entry)
        if last is None:
            raise QueueFullError.of(maximum)
        if _exceeds(num_tokens - last.num_tokens, entry.num_tokens, most_tokens):
            raise QueueFullError.of(f"{most_tokens} prompt tokens")
        return maximum, last

    def _take_in(self, entry: Entry, account: _Account) -> None:
        self._accounts[entry.tenant] = account
        self._idle.discard(entry.tenant)
        account.came_last = entry.number
        account.num_live += 1
        self._busy[entry.tenant] = account
        entry.is_counted = entry.is_waiting = True
        self._order.add(entry)
        self._count_waiting(account, 1, entry.num_tokens)
        for wait in (self._wait, account.wait):
            wait.note_arrival(entry.num_tokens, entry.priority, entry.entered_at)
        self._forget_some()

    def _give_way(self, last: Entry, maximum: str) -> Leaver:
        """Stop counting a request as waiting; it stays live until it gets its error."""
        self._wait_no_longer(last, has_started=False)
        last.is_leaving = True
        self._num_leaving += 1
        wait_s = self._wait_of(self._busy[last.tenant]).seconds(last.priority, self._clock())
        return Leaver(last, QueueFullError.of_leaver(maximum, wait_s))

    def _wait_of(self, account: _Account) -> QueueWait:
        return account.wait if self._args.fair_share else self._wait

    def _go_on(self, entry: Entry) -> None:
        """Note that a request that was to give way goes on, or has ended."""
        if entry.is_leaving:
            entry.is_leaving = False
            self._num_leaving -= 1

    def _wait_no_longer(self, entry: Entry, *, has_started: bool) -> None:
        if not entry.is_waiting:
            return
        entry.is_waiting = False
        self._order.remove(entry)
        account, now = self._busy[entry.tenant], self._clock()
        self._count_waiting(account, -1, -entry.num_tokens)
        for wait in (self._wait, account.wait):
            if has_started:
                wait.note_start(entry.num_tokens, entry.priority, now)
            else:
                wait.note_leaving(entry.num_tokens, entry.priority, now)

    def _check_wait(self, deadline_ms: int, age_s: float, priority: int, account: _Account) -> None:
        """Refuse a request that would wait until after its deadline, as predicted."""
        seconds = self._wait_of(account).seconds(priority, self._clock())
        left_s = deadline_ms / 1000 - age_s
        if seconds is not None and seconds > left_s:
            raise LateRequestError(
                f"deadline_ms = {deadline_ms} cannot be met: it would wait for about"
                f" {seconds:.2f} s",
                retry_after_s=seconds - left_s,
            )

    def _count_waiting(self, account: _Account, num: int, num_tokens: int) -> None:
        account.num_waiting += num
        account.num_waiting_tokens += num_tokens
        self._num_waiting_tokens += num_tokens

    def _forget_some(self) -> None:
        """Drop idle tenants if there are too many, the least recently used ones first."""
        for _ in range(_FORGOTTEN_AT_ONCE):
            num_idle = len(self._accounts) - len(self._busy)
            if num_idle <= MAX_REMEMBERED or len(self._accounts) <= 2 * MAX_REMEMBERED:
                return
            place = self._idle.first()
            assert place is not None
            self._idle.pop()
            del self._accounts[place[1]]


def _entry_of(request: GenerationRequest, arrived_at: float, now: float) -> Entry:
    params = request.params
    time_s = inf if params.deadline_ms is None else params.deadline_ms / 1000
    return Entry(
        key=request.key,
        tenant=params.tenant,
        num_tokens=len(request.prompt_ids),
        entered_at=now,
        priority=params.priority,
        arrived_at=arrived_at,
        expires_at=arrived_at + time_s,
    )


def _check(tenant: str, account: _Account, args: TenantArgs, num_coming: int = 0) -> None:
    num_live, num_waiting = account.num_live + num_coming, account.num_waiting + num_coming
    if args.max_concurrency is not None and num_live >= args.max_concurrency:
        raise RateLimitedError(
            f"tenant {shown(tenant)} has {num_live} requests here, as many as it may have at once;"
            " try again when one of them has ended",
            # The expected time until the first of num_live requests ends.
            retry_after_s=None if account.life_s is None else account.life_s / num_live,
        )
    if args.max_queue_size is not None and num_waiting >= args.max_queue_size:
        raise TenantQueueFullError.of(f"{args.max_queue_size} requests of tenant {shown(tenant)}")


def _exceeds(num_waiting: int, num_tokens: int, maximum: int | None) -> bool:
    """Return whether these tokens exceed the maximum; a request that waits alone never does."""
    return maximum is not None and num_waiting > 0 and num_waiting + num_tokens > maximum


def _filling(account: _Account, args: TenantArgs, now: float) -> float | None:
    """Tokens in a tenant's bucket now; None without a rate. A new bucket is full."""
    if args.requests_per_s is None:
        return None
    if account.filling is None:
        return args.bucket_size
    gained = args.requests_per_s * max(0.0, now - account.filled_at)
    return min(args.bucket_size, account.filling + gained)


def _check_bucket(tenant: str, filling: float | None, args: TenantArgs) -> None:
    if filling is not None and filling < 1.0:
        assert args.requests_per_s is not None
        raise RateLimitedError(
            f"tenant {shown(tenant)} may send {args.requests_per_s:g} requests per second",
            retry_after_s=(1.0 - filling) / args.requests_per_s,
        )
