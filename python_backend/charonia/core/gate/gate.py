"""Who is let in: what waits, in all and per tenant, how fast it comes, and how long it would wait.

Owns the counts, the refusals, and who is to give way instead. Must not know what becomes of a
request, but that it has started and that it has left. For all threads.

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
from charonia.core.admission import GenerationRequest
from charonia.core.gate.queue_order import Entry, QueueOrder
from charonia.core.gate.queue_wait import QueueWait
from charonia.core.gate.tenants import TenantArgs, Tenants
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
"""Tenants without a request whose buckets are kept, at least; of all tenants twice as many are."""
_FORGOTTEN_AT_ONCE = 2  # more than come at once, so that what is too much gets less
_LIFE_SHARE = 0.1  # that the last request has in the mean


@dataclass(slots=True)
class _Account:
    """What a tenant has in the server.

    Attributes:
        num_waiting, num_waiting_tokens: requests before their first step, and their prompts.
        came_last: the number of its last request.
        life_s: from a request's coming to its end, in the mean; None before the first end.
        filling: of its bucket, as it was at `filled_at`; None before its first request.
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
    """Who is to leave the queue for one that comes, and what it is told."""

    key: str
    error: QueueFullError


class Gate:
    """Refuses what is beyond the limits, before any work is done for it.

    With fair shares each tenant's requests wait for each other alone.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, tenants: Tenants, args: SchedulerArgs, *, clock: Callable[[], float]
    ) -> None:
        self._tenants = tenants
        self._args = args
        self._clock = clock
        self._wait = QueueWait()
        self._order = QueueOrder(tenants.weight_of if args.fair_share else None)
        self._predicts = True
        self._engine_args: EngineArgs | None = None
        self._num_entered = 0
        self._num_waiting_tokens = 0
        self._accounts: dict[str, _Account] = {}
        self._busy: dict[str, _Account] = {}  # those that have live requests
        self._idle: LazyHeap[str] = LazyHeap()  # the others, who came longest ago is first
        self._live: dict[str, Entry] = {}
        self._num_leaving = 0  # of the live ones, those that are to give way
        self._lock = threading.Lock()

    def num_of_tenants(self) -> dict[str, tuple[int, int]]:
        """By what metrics call a tenant: requests that wait for their first step, and others."""
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
        """Requests that are in, without probes."""
        return len(self._live)

    def follow(self, engine_args: EngineArgs) -> None:
        """Go on with the scheduling policy of the engine that serves now."""
        if engine_args is self._engine_args:
            return
        with self._lock:
            self._engine_args = engine_args
            self._order.follow(rank_of(engine_args, self._args))
            # By deadlines, who comes last may be the first.
            self._predicts = engine_args.scheduling_policy != "deadline"

    def check(self, tenant: str, num_coming: int) -> None:
        """Refuse at once whom `enter` would refuse whatever its prompt is.

        Args:
            num_coming: requests of this tenant that are on their way here and may enter before.

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
    ) -> Leaver | None:
        """Let a request in, which must leave again. Of a probe only the queue's size matters.

        Args:
            arrived_at: when it came, by the clock; None is now. Its deadline runs from then on.
            num_queued: live requests beyond the engine's rows, wherever they are: the queue.

        Returns:
            Who is to give way to it, where the queue is full; see `is_leaving`.

        Raises:
            InvalidRequestError: its tenant is not served.
            QueueFullError: too much waits, in all or (TenantQueueFullError) of its tenant.
            RateLimitedError: its tenant has too many requests at once, or sends them too fast.
            LateRequestError: it would wait until after its deadline.
        """
        if request.is_probe:
            if self._is_full(num_queued):
                raise QueueFullError.of(str(self._args.max_queue_size))
            return None
        params, num_tokens, now = request.params, len(request.prompt_ids), self._clock()
        tenant, arrived_at = params.tenant, now if arrived_at is None else arrived_at
        args = self._limits_of(tenant)
        with self._lock:
            entry = self._entry_of(request, arrived_at, now)
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
            return None if last is None else self._give_way(last, maximum)

    def wait_s(self) -> float | None:
        """How long one would wait that comes behind all others; None while that is not known."""
        with self._lock:
            return self._wait.seconds(None, self._clock())

    def note_started(self, key: str) -> None:
        """A request waits no longer."""
        with self._lock:
            if (entry := self._live.get(key)) is not None:
                self._go_on(entry)
                self._wait_no_longer(entry, has_started=True)

    def note_joined(self, key: str) -> None:
        """A request waits for no step of its own: it gets what another one's steps give."""
        with self._lock:
            if (entry := self._live.get(key)) is not None:
                self._wait_no_longer(entry, has_started=False)

    def is_leaving(self, key: str) -> bool:
        """Whether a request still is to give way: it is live, and has not started meanwhile."""
        entry = self._live.get(key)
        return entry is not None and entry.is_leaving

    def leave(self, key: str) -> None:
        """A request has had its end; nothing happens when it is not in."""
        with self._lock:
            entry = self._live.pop(key, None)
            if entry is not None:
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
        """Raises InvalidRequestError: it is not served."""
        if not self._tenants.accepts(tenant):
            raise InvalidRequestError(f"tenant {shown(tenant)} is not known here")
        return self._tenants.of(tenant)

    def _entry_of(self, request: GenerationRequest, arrived_at: float, now: float) -> Entry:
        params = request.params
        time_s = inf if params.deadline_ms is None else params.deadline_ms / 1000
        self._num_entered += 1
        return Entry(
            key=request.key,
            tenant=params.tenant,
            num_tokens=len(request.prompt_ids),
            entered_at=now,
            number=self._num_entered,
            priority=params.priority,
            arrived_at=arrived_at,
            expires_at=arrived_at + time_s,
        )

    def _is_full(self, num_queued: int) -> bool:
        return num_queued - self._num_leaving >= self._args.max_queue_size

    def _check_room(self, entry: Entry, num_queued: int) -> tuple[str, Entry | None]:
        """Which limit is reached, and who is to give way, if anybody must.

        Raises:
            QueueFullError: nobody is to, or that would not be enough.
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
        self._live[entry.key] = entry
        self._order.add(entry)
        self._count_waiting(account, 1, entry.num_tokens)
        for wait in (self._wait, account.wait):
            wait.note_arrival(entry.num_tokens, entry.priority, entry.entered_at)
        self._forget_some()

    def _give_way(self, last: Entry, maximum: str) -> Leaver:
        """Count one as waiting no longer, which is live until it has been told."""
        self._wait_no_longer(last, has_started=False)
        last.is_leaving = True
        self._num_leaving += 1
        wait_s = self._wait_of(self._busy[last.tenant]).seconds(last.priority, self._clock())
        return Leaver(last.key, QueueFullError.of_leaver(maximum, wait_s))

    def _wait_of(self, account: _Account) -> QueueWait:
        return account.wait if self._args.fair_share else self._wait

    def _go_on(self, entry: Entry) -> None:
        """One that was to give way goes on, or has had its end."""
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
        """Refuse who would wait for longer than it has, by what waits that comes before it."""
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
        """Forget idle tenants when there are too many, those first that came longest ago."""
        for _ in range(_FORGOTTEN_AT_ONCE):
            num_idle = len(self._accounts) - len(self._busy)
            if num_idle <= MAX_REMEMBERED or len(self._accounts) <= 2 * MAX_REMEMBERED:
                return
            place = self._idle.first()
            assert place is not None
            self._idle.pop()
            del self._accounts[place[1]]


def _check(tenant: str, account: _Account, args: TenantArgs, num_coming: int = 0) -> None:
    num_live, num_waiting = account.num_live + num_coming, account.num_waiting + num_coming
    if args.max_concurrency is not None and num_live >= args.max_concurrency:
        raise RateLimitedError(
            f"tenant {shown(tenant)} has {num_live} requests here, as many as it may have at once;"
            " try again when one of them has ended",
            # Of n requests that began at random times, the first ends after 1/n of a mean duration.
            retry_after_s=None if account.life_s is None else account.life_s / num_live,
        )
    if args.max_queue_size is not None and num_waiting >= args.max_queue_size:
        raise TenantQueueFullError.of(f"{args.max_queue_size} requests of tenant {shown(tenant)}")


def _exceeds(num_waiting: int, num_tokens: int, maximum: int | None) -> bool:
    """Whether so many tokens more are too many; a request that waits alone may have any number."""
    return maximum is not None and num_waiting > 0 and num_waiting + num_tokens > maximum


def _filling(account: _Account, args: TenantArgs, now: float) -> float | None:
    """What is in a tenant's bucket now; None where there is no limit, and full should one come."""
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
