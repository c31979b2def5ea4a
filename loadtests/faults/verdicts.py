"""Criteria of a campaign.

Owns the verdicts and their bounds. Must not know how anything was observed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from faults.growth import Growth, growths
from faults.kinds import KINDS
from faults.outcome import FaultRecord, Outcome
from support.live_stream import WRONG_ANSWER

MAX_SHM_BYTES_PER_DEATH = 2 * 2**20
"""Triton leaves about 1 MiB of shared memory behind for each model process that dies."""


@dataclass(frozen=True)
class Verdict:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str


def verdicts(outcome: Outcome) -> list[Verdict]:
    """All that must hold, in the order of the report."""
    return [
        _complete(outcome),
        _costs(outcome),
        *_answers(outcome),
        *_poisoned(outcome),
        *_spared(outcome),
        *_at_rest(outcome),
    ]


def _complete(outcome: Outcome) -> Verdict:
    num_struck = sum(fault.outage is not None for fault in outcome.faults)
    found = f"{num_struck} of {outcome.num_asked}"
    if outcome.stopped_by is not None:
        found += f"; stopped: {outcome.stopped_by}"
    holds = num_struck == outcome.num_asked and outcome.stopped_by is None
    return Verdict("every fault struck, and what it broke came back", holds, found)


def _costs(outcome: Outcome) -> Verdict:
    dear = [
        f"fault {fault.number} ({fault.kind}): {fault.num_engines} engines,"
        f" {fault.num_servers} servers"
        for fault in outcome.faults
        if fault.num_engines > KINDS[fault.kind].max_engines
        or fault.num_servers > KINDS[fault.kind].max_servers
    ]
    found = _found(dear, len(outcome.faults), "faults")
    return Verdict("no fault cost more than it must", not dear, found)


def _answers(outcome: Outcome) -> list[Verdict]:
    errors = [answer for answer in outcome.answers if answer.error is not None]
    doubled = [each for each in errors if (each.error or "").startswith(WRONG_ANSWER)]
    excused = {id(answer) for answer in outcome.excused()}
    lost = [each for each in errors if id(each) not in excused and each not in doubled]
    hanging = {lane for fault in outcome.faults for lane in fault.hanging} | {*outcome.hanging}
    unequal = [answer for answer in outcome.answers if not answer.equals]
    outlived = sum(answer.restarts for answer in outcome.answers)
    num = len(outcome.answers)

    def found(bad: Iterable[object]) -> str:
        return _found([*bad], num, "requests")

    said = (f"{each.who} through {each.entry}: {each.error}" for each in lost)
    return [
        Verdict(
            "no request lost that need not be",
            bool(num) and not lost,
            f"{found(said)}; {len(excused)} ended with an error that the fault made them",
        ),
        Verdict("no request answered twice", not doubled, found(each.error for each in doubled)),
        Verdict("no request hung", not hanging, found(sorted(hanging))),
        Verdict(
            "every answer equal to its undisturbed run",
            len(errors) < num and not unequal,
            f"{found(each.who for each in unequal)}; they outlived {outlived} restarts in all",
        ),
    ]


def _poisoned(outcome: Outcome) -> list[Verdict]:
    poisoned = [fault for fault in outcome.faults if fault.kind == "poison"]
    survived = [f"fault {fault.number}" for fault in poisoned if not fault.is_answered_right]
    if not poisoned:
        return []
    found = _found(survived, len(poisoned), "of them")
    return [Verdict("poisoned requests failed, and alone", not survived, found)]


def _spared(outcome: Outcome) -> list[Verdict]:
    """Clients that had not to wait got tokens while the rest was being mended."""
    faults = [fault for fault in outcome.faults if None not in (fault.pause, fault.outage)]
    waited = [
        f"fault {fault.number} ({fault.kind}): {fault.pause:.1f} s of {fault.outage:.1f}"
        for fault in faults
        if (fault.pause or 0.0) >= max(fault.outage or 0.0, outcome.max_pause)
    ]
    if not faults:
        return []
    found = _found(waited, len(faults), "faults")
    return [Verdict("nobody waited who had not to", not waited, found)]


def _at_rest(outcome: Outcome) -> list[Verdict]:
    left = Verdict("nothing left after the server's end", not outcome.left, _list(outcome.left))
    if len(outcome.rests) < 2:
        return [left, Verdict("the server came to rest", False, "it was not observed at rest")]
    others = outcome.rests[1:]
    busy = [f"{name} = {value:g}" for rest in others for name, value in rest.busy.items() if value]
    roles = [rest.footprint.roles for rest in outcome.rests]
    grown = growths(outcome.rests, outcome.faults)
    return [
        Verdict("no leaked block, nothing running", not busy, _list(busy)),
        left,
        Verdict(
            "no leaked process",
            all(each == roles[0] for each in roles),
            ", ".join(str(sum(each.values())) for each in roles) + " at rest",
        ),
        _shared_memory(outcome),
        _memory(grown),
        _bounded("open file", [(each.role, each.num_fds, each.max_fds) for each in grown]),
        _bounded("thread", [(each.role, each.num_threads, each.max_threads) for each in grown]),
    ]


def _shared_memory(outcome: Outcome) -> Verdict:
    grown = outcome.rests[-1].footprint.shm_bytes - outcome.rests[0].footprint.shm_bytes
    num = max(sum(fault.num_engines + _has_lost_model(fault) for fault in outcome.faults), 1)
    return Verdict(
        "no leaked shared memory but what Triton leaves",
        grown <= MAX_SHM_BYTES_PER_DEATH * num,
        f"{grown / 2**20:.1f} MiB more after {num} deaths, {grown / 2**20 / num:.2f} each",
    )


def _has_lost_model(fault: FaultRecord) -> bool:
    return KINDS[fault.kind].loses not in ("engine", "server")


def _memory(grown: Sequence[Growth]) -> Verdict:
    """Judges resident memory, and shows the processes that grew most for what they may."""
    above = [each for each in grown if each.rss_bytes > each.max_rss_bytes]
    shown = sorted(grown, key=lambda each: each.rss_bytes / each.max_rss_bytes, reverse=True)
    found = [
        f"{each.role} {each.rss_bytes / 2**20:+.1f} MiB"
        + (f" over {each.num_faults} faults" if each.num_faults else ", a new one")
        + f" of {each.max_rss_bytes / 2**20:.0f}"
        for each in above or shown
    ]
    return Verdict("no process grew", bool(grown) and not above, _list(found))


def _bounded(what: str, grown: Sequence[tuple[str, int, int]]) -> Verdict:
    """Judges what each role has more, by how much more it may have."""
    above = [one for one in grown if one[1] > one[2]]
    shown = sorted(grown, key=lambda one: one[1] / one[2], reverse=True)
    found = [f"{role} {more:+d} of {most}" for role, more, most in above or shown]
    return Verdict(f"no leaked {what}", bool(grown) and not above, _list(found))


def _found(bad: Sequence[object], total: int, what: str) -> str:
    return f"{len(bad)} of {total} {what}" + (f": {_list(bad)}" if bad else "")


def _list(values: Sequence[object], most: int = 3) -> str:
    """The first few values, each once."""
    shown = list(dict.fromkeys(map(str, values)))
    text = "; ".join(shown[:most]) or "nothing"
    return text + (f"; and {len(shown) - most} more" if len(shown) > most else "")
