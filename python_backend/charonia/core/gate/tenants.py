"""The tenants: weights and limits of each, from a file that is read again when it changes.

Owns the file's format and the present values. Must not know requests.

    {
      "unknown": "accept",
      "default": {"max_queue_size": 100},
      "tenants": {
        "search": {"weight": 4},
        "batch": {"weight": 1, "requests_per_s": 20, "max_concurrency": 64}
      }
    }
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from charonia.config import PositiveInt, convert
from charonia.errors import ConfigError, shown
from charonia.events import event, warning_event
from charonia.metrics.metric_table import OTHERS

LOOK_EVERY_S = 1.0
"""Interval at which the file is checked for changes, in seconds."""
MAX_LABELS = 64
"""Most tenants with a label of their own in metrics. Tenants that were removed from the file count,
too, because their series stay."""

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
"""Bounded below, so that a division by it stays meaningful."""


class TenantArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weight, limits and targets of one tenant; None sets no limit and no target.

    Attributes:
        weight: its share of the engine and of the cache, in proportion to the others' weights, with
            `fair_share`.
        max_concurrency: most live requests, waiting or running.
        max_queue_size: most requests that wait for their first step.
        max_queue_tokens: most prompt tokens of these; a request that waits alone may have more.
        requests_per_s: most requests per second, in the long run.
        burst: most requests at once; None is the number of one second, at least one.
        ttft_target_ms: target for the time to a request's first token; metrics count how many met
            it.
        inter_token_target_ms: target for a request's mean time between tokens; counted likewise.
        low_priority: its requests are degraded first, like those with a `priority` above 0; see the
            scheduler's `degradation_ladder`.
    """

    weight: Rate = 1.0
    max_concurrency: PositiveInt | None = None
    max_queue_size: PositiveInt | None = None
    max_queue_tokens: PositiveInt | None = None
    requests_per_s: Rate | None = None
    burst: PositiveInt | None = None
    ttft_target_ms: Positive | None = None
    inter_token_target_ms: Positive | None = None
    low_priority: bool = False

    def __post_init__(self) -> None:
        if self.burst is not None and self.requests_per_s is None:
            raise ValueError("burst is given without requests_per_s")

    @property
    def bucket_size(self) -> float:
        """Most requests at once."""
        return float(self.burst or max(1.0, self.requests_per_s or 1.0))


class TenantTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of the file.

    Attributes:
        unknown: whether tenants that are not in the file are served, each with `default`.
        default: for these, and for requests without a tenant, whose name is "".
        tenants: by name.
    """

    unknown: Literal["accept", "refuse"] = "accept"
    default: TenantArgs = TenantArgs()
    tenants: dict[str, TenantArgs] = {}

    @classmethod
    def from_file(cls, path: Path) -> "TenantTable":
        """Read a file.

        Raises:
            ConfigError: it cannot be read, a key is repeated in an object, or a value is unknown,
                ill-typed or out of range; the message names the value and its place.
        """
        try:
            text = path.read_bytes()
            values = msgspec.json.decode(text, type=dict[str, Any])
            json.loads(text, object_pairs_hook=partial(_check_repeated, path.name))
        except OSError as error:
            raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too
            raise ConfigError(f"{path.name} is not a JSON object: {error}") from None
        try:
            return convert(values, cls, "key")
        except ConfigError as error:
            raise ConfigError(f"{path.name}: {error}") from None


class Tenants:
    """The present values of each tenant. For all threads; `refresh` is for one thread.

    Args:
        path: of the file; None treats all tenants alike, without limits.
        has_shares: whether fair shares are on, so that weights have an effect.
        log: takes one line.

    Raises:
        ConfigError: as `TenantTable.from_file`; or a weight has no effect, or a name is reserved.
    """

    def __init__(
        self, path: Path | None = None, *, has_shares: bool = False, log: Callable[[str], None]
    ) -> None:
        self._path = path
        self._has_shares = has_shares
        self._log = log
        self._seen: object = _state_of(path) if path is not None else None
        self._looked_at = 0.0
        self._labels: dict[str, None] = {}
        self._table = self._read(path) if path is not None else TenantTable()

    def of(self, tenant: str) -> TenantArgs:
        """The values of a tenant."""
        table = self._table
        return table.tenants.get(tenant, table.default)

    def accepts(self, tenant: str) -> bool:
        """Return whether this tenant is served."""
        table = self._table
        return table.unknown == "accept" or tenant in table.tenants

    def weight_of(self, tenant: str) -> float:
        """The weight of a tenant."""
        return self.of(tenant).weight

    def label_of(self, tenant: str) -> str:
        """Return its label in metrics: its name if it is in the file, else `OTHERS`."""
        return tenant if tenant in self._labels else OTHERS

    @property
    def labels(self) -> list[str]:
        """All labels of tenants in metrics."""
        return [*self._labels, OTHERS]

    def refresh(self, now: float) -> None:
        """Read the file again if it has changed. A wrong file changes nothing and is logged.

        Args:
            now: seconds, monotonic.
        """
        if self._path is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        state = _state_of(self._path)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._table = self._read(self._path)
        except ConfigError as error:
            self._log(warning_event("tenants_not_reloaded", reason=str(error)))
        else:
            self._log(event("tenants_reloaded", tenants=len(self._table.tenants)))

    def _read(self, path: Path) -> TenantTable:
        table = TenantTable.from_file(path)
        weighty = {"default": table.default, **table.tenants}
        for name, args in weighty.items():
            if args.weight != 1.0 and not self._has_shares:
                raise ConfigError(
                    f"{path.name}: the weight of {shown(name)} has no effect without the"
                    " scheduler's parameter fair_share"
                )
        if OTHERS in table.tenants:
            raise ConfigError(
                f"{path.name}: no tenant may be called {shown(OTHERS)}: so metrics call those that"
                " are not in the file"
            )
        for name in table.tenants:
            if name and len(self._labels) < MAX_LABELS:
                self._labels[name] = None
        return table


def _check_repeated(name: str, pairs: list[tuple[str, Any]]) -> None:
    """Raises ConfigError: an object of the file of this name has a key twice."""
    counts = Counter(key for key, _ in pairs)
    for key, count in counts.items():
        if count > 1:
            raise ConfigError(f"{name}: the key {shown(key)} is there {count} times in one object")


def _state_of(path: Path) -> tuple[int, int, int, int] | None:
    """A value that changes when a file is written or replaced; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
