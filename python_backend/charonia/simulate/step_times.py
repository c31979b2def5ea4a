"""Times of steps: constants, or a fit to an engine's own record.

Owns the model of a step's time, its file and its fit. Must not know plans or requests.

    seconds = curve(tokens) + row * rows + context * cached tokens read + pair * (query, key) pairs

The curve is piecewise linear. On a GPU it is flat while reading the weights dominates,
and then rises with the arithmetic of the tokens.
"""

import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from charonia.errors import ConfigError, shown
from charonia.traces import StepRecord, StepWork, TraceRequest, read_requests, read_steps

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?)(s|ms|us|ns)")
_MAX_CONSTANT_S = 3600.0
_CONSTANTS = {
    "step": "seconds of a step, whatever is in it",
    "token": "more for each token",
    "row": "more for each request",
    "context": "more for each cached token that is read",
    "pair": "more for each query and key",
    "gap": "between two steps of which one waited in the engine",
    "gap_row": "more of that for each request",
    "transit": "to the engine and back",
    "intake": "from a request's coming until the scheduler plans with it",
    "host": "from a result to the next plan's sending",
    "host_row": "more of that for each request",
}
Numbers = npt.NDArray[np.float64]
_MIN_RECORDS = 50
_MAX_DRAFTING = 0.02  # of the steps: a resting drafter tries now and then whether drafts pay
_NUM_QUANTILES = 101
_MAX_RESIDUAL = 10.0  # times as long as predicted: it was interrupted, which is noise
_FASTEST = 0.1  # of the requests: those that came between steps, or at the end of one
_SAME_SIZE = 4  # times as many tokens are another size
_MAX_PAUSE_S = 1.0  # a longer pause between two steps is not the scheduler's work


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the time of steps, in seconds.

    Attributes:
        curve: (tokens, seconds), ascending in both; the last two points give the slope beyond.
        row, context, pair: addition for each of these, see `StepWork`.
        gap, gap_row, transit, intake, host, host_row: times around the engine's own time, see
            `--step-times` of `charonia simulate`.
        noise: for steps of at least so many tokens, quantiles of measured by predicted time, evenly
            spaced from 0 to 1; none for none.
    """

    curve: list[tuple[int, float]]
    row: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    gap: float = 0.0
    gap_row: float = 0.0
    transit: float = 0.0
    intake: float = 0.0
    host: float = 0.0
    host_row: float = 0.0
    noise: list[tuple[int, list[float]]] = []

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.curve]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError("the points of curve must have ascending numbers of tokens")
        if min(seconds for _, seconds in self.curve) < 0 or self.of(StepWork(1, 1, 1, 1)) <= 0:
            raise ValueError("a step must take longer than 0 s")

    @classmethod
    def load(cls, text: str) -> "StepTimes":
        """Read the value of `--step-times`: constants, a file of this model, or a record of steps.

        If a record of requests is beside that of the steps, the intake time is fitted to it.

        Raises:
            ConfigError: it is none of these, with the reason.
        """
        if "=" in text and not Path(text).exists():
            return cls._of_constants(text)
        path = Path(text)
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            requests = path.with_name(path.name.replace("steps", "requests"))
            has_requests = requests != path and requests.exists()
            steps = read_steps(path)
            _check_drafts(path.name, steps)
            return cls.fit(steps, read_requests(requests) if has_requests else ())
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path.name}: {error}") from None

    @classmethod
    def fit(
        cls, records: Sequence[StepRecord], requests: Sequence[TraceRequest] = ()
    ) -> "StepTimes":
        """Fit the model to measured step times, by least squares.

        Errors are weighted by the root of the predicted time, as if steps were made of many pieces
        of work. So the sum of the times is right for short and for long steps.

        Steps with drafts are left out, because the model has no drafting.

        Args:
            requests: of the same record; none leaves out the intake time.

        Raises:
            ConfigError: there are too few steps.
        """
        plain = [one for one in records if not one.num_drafts and one.seconds > 0]
        if len(plain) < _MIN_RECORDS:
            raise ConfigError(
                f"{len(plain)} steps without drafts are too few to learn their times from; at"
                f" least {_MIN_RECORDS} are needed"
            )
        knots = _knots([one.num_tokens for one in plain])
        features = np.array([_features(one.work, knots) for one in plain])
        seconds = np.array([one.seconds for one in plain])
        errors, kept = np.sqrt(seconds), np.ones(len(plain), dtype=bool)
        for _ in range(3):  # weights by measured times would favour steps that were fast by chance
            found = _non_negative_fit(features[kept], seconds[kept], errors[kept])
            predicted = np.maximum(features @ found, 1e-9)
            errors, kept = np.sqrt(predicted), seconds < _MAX_RESIDUAL * predicted
        curve = np.maximum.accumulate(np.maximum(found[: len(knots)], seconds.min() / 1000))
        fitted = cls(
            curve=[(int(k), float(s)) for k, s in zip(knots, curve, strict=True)],
            row=float(found[-3]),
            context=float(found[-2]),
            pair=float(found[-1]),
            noise=_noise([one.num_tokens for one in plain], seconds, features @ found),
        )
        return replace(fitted, intake=_intake(requests), **_around(records))

    def of(self, work: StepWork) -> float:
        """Return the seconds of a step in the engine, without noise."""
        return (
            self._at(work.num_tokens)
            + self.row * work.num_rows
            + self.context * work.num_context
            + self.pair * work.num_pairs
        )

    def _at(self, num_tokens: int) -> float:
        curve = self.curve
        if len(curve) == 1:
            return curve[0][1]
        place = bisect_right(curve, num_tokens, key=lambda point: point[0])
        place = min(max(place, 1), len(curve) - 1)
        (low, low_s), (high, high_s) = curve[place - 1], curve[place]
        return max(0.0, low_s + (num_tokens - low) * (high_s - low_s) / (high - low))

    @classmethod
    def _of_constants(cls, text: str) -> "StepTimes":
        values = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            match = _SECONDS.fullmatch(value.strip())
            seconds = inf if match is None else float(match[1]) * _UNITS[match[2]]
            if name.strip() not in _CONSTANTS or seconds > _MAX_CONSTANT_S:
                accepted = ", ".join(_CONSTANTS)
                raise ConfigError(
                    f"--step-times: {shown(part)} is no constant; accepted are {accepted}, each as"
                    f" a number with its unit (s, ms, us or ns), up to {_MAX_CONSTANT_S:g}s, for"
                    " example step=8ms,token=25us"
                )
            values[name.strip()] = seconds
        step, token = values.pop("step", 0.0), values.pop("token", 0.0)
        curve = [(0, step), (1, step + token)]
        if step + token <= 0:
            raise ConfigError("--step-times: a step must take longer than 0 s; give step or token")
        return replace(cls(curve=curve), **values)


class StepClock:
    """The times of one simulation's steps.

    Args:
        seed: of the noise.
    """

    def __init__(self, times: StepTimes, seed: int) -> None:
        self._times = times
        self._drawn = random.Random(seed)
        self._sizes = [size for size, _ in times.noise]
        self.transit_s = times.transit

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of the next step in the engine."""
        seconds = self._times.of(work)
        if self._sizes:
            place = bisect_right(self._sizes, work.num_tokens) - 1
            seconds *= self._drawn.choice(self._times.noise[max(place, 0)][1])
        return seconds

    def gap_s(self, num_rows: int) -> float:
        """Return the gap before a step of so many rows that waited in the engine."""
        return self._times.gap + self._times.gap_row * num_rows

    def host_s(self, num_rows: int) -> float:
        """Return the host's time to send a plan of so many rows."""
        return self._times.host + self._times.host_row * num_rows


def _check_drafts(name: str, steps: Sequence[StepRecord]) -> None:
    num_drafting = sum(1 for one in steps if one.num_drafts)
    if num_drafting > _MAX_DRAFTING * len(steps):
        raise ConfigError(
            f"{name}: {num_drafting} of {len(steps)} steps verified drafts, which cannot be"
            " simulated; record with speculative_config=null"
        )


def _knots(sizes: Sequence[int]) -> list[int]:
    """Choose the knots of the curve, in tokens: powers of two where steps were seen."""
    least, most = min(sizes), max(sizes)
    powers = [2**n for n in range(32) if least < 2**n < most]
    seen = np.asarray(sizes)
    used = [n for n in powers if np.sum((seen > n / 1.5) & (seen < n * 1.5)) >= 5]
    return [least, *used, most] if most > least else [least]


def _noise(
    sizes: Sequence[int], seconds: Numbers, predicted: Numbers
) -> list[tuple[int, list[float]]]:
    """Return how steps of similar size scatter, scaled so that their mean time is as measured."""
    order = np.argsort(sizes, kind="stable")
    found, first = [], 0
    while first < len(order):
        least = sizes[order[first]]
        last = first
        while last < len(order) and (
            last - first < _MIN_RECORDS or sizes[order[last]] < _SAME_SIZE * least
        ):
            last += 1
        if len(order) - last < _MIN_RECORDS:
            last = len(order)
        part = order[first:last]
        ratio = seconds[part] / np.maximum(predicted[part], 1e-9)
        quantiles = np.quantile(ratio, np.linspace(0, 1, _NUM_QUANTILES))
        quantiles *= seconds[part].sum() / predicted[part].sum() / quantiles.mean()
        found.append((int(least), [float(value) for value in quantiles]))
        first = last
    return found


def _features(work: StepWork, knots: Sequence[int]) -> list[float]:
    """Return the model's linear inputs: the share of each knot; rows, cached tokens and pairs."""
    shares = [0.0] * len(knots)
    place = bisect_right(knots, work.num_tokens)
    if place == len(knots):
        shares[-1] = 1.0
    else:
        low, high = knots[place - 1], knots[place]
        shares[place] = (work.num_tokens - low) / (high - low)
        shares[place - 1] = 1.0 - shares[place]
    return [*shares, float(work.num_rows), float(work.num_context), float(work.num_pairs)]


def _non_negative_fit(features: Numbers, seconds: Numbers, errors: Numbers) -> Numbers:
    """Least squares of errors in units of `errors`, with coefficients of at least 0.

    The most negative coefficient is left out, again and again. This is not always the optimum of
    Lawson and Hanson (1974, "Solving Least Squares Problems", chapter 23), but no worse than the
    data.
    """
    found = np.zeros(features.shape[1])
    used = list(np.flatnonzero(features.any(axis=0)))
    weighted = features / errors[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    wanted = seconds / errors
    while used:
        solution = np.linalg.lstsq(weighted[:, used] / scale[used], wanted, rcond=None)[0]
        if solution.min() >= 0:
            found[used] = solution / scale[used]
            break
        used.pop(int(solution.argmin()))
    return found


def _around(records: Sequence[StepRecord]) -> dict[str, float]:
    """Fit the times around the engine's own: transit, and gaps and the host's work by rows."""
    gaps, transits, hosts = [], [], []
    for before, step in pairwise(records):
        if step.submitted_at <= before.ended_at:
            gap = step.ended_at - before.ended_at - step.seconds
            if gap < _MAX_PAUSE_S:
                gaps.append((step.num_rows, gap))
            continue
        transits.append(step.ended_at - step.submitted_at - step.seconds)
        pause = step.submitted_at - before.ended_at
        if step.num_rows > step.num_joins and pause < _MAX_PAUSE_S:
            hosts.append((step.num_rows, pause))
    host, host_row = _line(hosts)
    gap, gap_row = _line(gaps)
    return {
        "gap": gap,
        "gap_row": gap_row,
        "transit": _mean(transits),
        "host": host,
        "host_row": host_row,
    }


def _intake(requests: Sequence[TraceRequest]) -> float:
    """Fit the intake time, from requests that did not have to wait for the end of a step."""
    seconds = [one.intake_ms / 1000 for one in requests if one.intake_ms is not None]
    return float(np.quantile(seconds, _FASTEST)) if seconds else 0.0


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds at zero rows, and per row, both not negative."""
    if not points:
        return 0.0, 0.0
    rows, seconds = np.array(points).T
    features = np.stack([np.ones_like(rows), rows], axis=1)
    base, slope = _non_negative_fit(features, seconds, np.ones_like(seconds))
    return float(base), float(slope)


def _mean(values: Sequence[float]) -> float:
    """The mean, at least 0: a result that is seen late makes the next one seem early."""
    kept = [value for value in values if value < _MAX_PAUSE_S]
    return max(0.0, fmean(kept)) if kept else 0.0
