"""An engine that makes no steps although probes ask for them hangs; an idle one does not."""

import asyncio

import pytest
from msgspec import UnsetType

from charonia.gateway.figures import Figures
from charonia.gateway.progress import FRESH_S, STEP_TIMEOUT_S, Progress
from charonia.gateway.rest import status
from charonia.gateway.upstream import Server, Upstream
from charonia.supervision.server import probes
from charonia_client import AsyncClient, EngineState
from support.waiting import Clock


def state(step_age_s: float | None, *, is_up: bool = True) -> EngineState:
    return EngineState(is_up=is_up, reason=None, step_age_s=step_age_s, turn_age_s=0.0)


class Engine:
    """An idle engine, which makes a step for a probe that finds none in the last second.

    Attributes:
        hangs: whether it makes none. delay_s: what an answer takes, half of it each way.
    """

    def __init__(self, last_step_at: float) -> None:
        self.hangs = False
        self.delay_s = 0.0
        self._last_step_at = last_step_at

    def probe(self, progress: Progress, at: float) -> bool:
        """Probe it; returns whether it seems to hang."""
        age_s = at + self.delay_s / 2 - self._last_step_at
        if age_s > FRESH_S and not self.hangs:
            self._last_step_at = at + self.delay_s / 2 + 0.001
        progress.note(state(age_s), at, at + self.delay_s)
        return progress.hangs


def test_the_supervisor_calls_the_same_steps_recent() -> None:
    assert FRESH_S == probes.FRESH_S


@pytest.mark.parametrize("pause_s", [0.1, 0.9, 1.0, 2.5, 5.0, 10.0, 29.99, 30.0, 3600.0])
@pytest.mark.parametrize("delays_s", [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (1.9, 0.2)])
def test_an_idle_engine_never_hangs_however_often_it_is_asked(
    pause_s: float, delays_s: tuple[float, float]
) -> None:
    progress, engine = Progress(), Engine(last_step_at=-1e6)
    now = 0.0
    for number in range(50):
        engine.delay_s = delays_s[number % 2]
        assert not engine.probe(progress, now)
        now += max(pause_s, engine.delay_s)


@pytest.mark.parametrize("pause_s", [0.1, 1.0, 5.0, 9.0])
def test_an_engine_that_hangs_is_found_in_time_and_serves_again_with_its_next_step(
    pause_s: float,
) -> None:
    progress, engine = Progress(), Engine(last_step_at=-1e6)
    now = 0.0
    for _ in range(3):
        assert not engine.probe(progress, now)
        now += pause_s
    engine.hangs = True
    began_at, found_at = now, None
    while found_at is None:
        if engine.probe(progress, now):
            found_at = now
        now += pause_s
    assert found_at - began_at + FRESH_S >= STEP_TIMEOUT_S
    assert found_at - began_at <= FRESH_S + STEP_TIMEOUT_S + 3 * pause_s
    assert engine.probe(progress, now + 100), "it does as long as no step ends"
    engine.hangs = False
    engine.probe(progress, now + 101)  # asks for the step
    assert not engine.probe(progress, now + 102)


def test_a_step_that_takes_long_is_no_hang_and_one_that_ended_counts() -> None:
    progress = Progress()
    for second in range(9):
        progress.note(state(5.0 + second), second, second)
        assert not progress.hangs
    progress.note(state(0.5), 9.0, 9.0)
    for now, missed_s in ((14.0, 0.0), (16.0, 2.0), (14.0 + STEP_TIMEOUT_S, STEP_TIMEOUT_S)):
        assert not progress.hangs
        progress.note(state(now - 8.5), now, now)
        assert progress.missed_s == missed_s
    assert progress.hangs


def test_an_engine_without_any_step_hangs_but_one_that_is_loaded_does_not() -> None:
    progress = Progress()
    for now in (0.0, 5.0, STEP_TIMEOUT_S):
        assert not progress.hangs
        progress.note(state(None), now, now)
    assert progress.hangs
    progress.note(state(None, is_up=False), 41.0, 41.0)
    assert not progress.hangs
    for now in (50.0, 50.0 + STEP_TIMEOUT_S - 0.1):
        progress.note(state(None), now, now)
        assert not progress.hangs


def test_an_idle_engine_does_not_hang_because_nobody_asked_for_long() -> None:
    """What the last answer has told counts until the next one comes."""
    progress = Progress()
    progress.note(state(100.0), 0.0, 0.0)
    progress.note(state(29.0), 29.0, 29.0)
    assert not progress.hangs, "and so it is asked at any later time"


@pytest.fixture
def ages_s(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How old a server's last step is, by its URL; probes are answered with that."""
    found = {"hung:1": 0.0, "good:1": 0.0}

    async def probe(client: AsyncClient) -> EngineState:
        return state(found[client._settings.url])

    monkeypatch.setattr(AsyncClient, "probe", probe)
    return found


def test_a_server_whose_engine_hangs_is_not_ready_and_is_chosen_last(
    ages_s: dict[str, float],
) -> None:
    clock = Clock()

    async def health(upstream: Upstream) -> list[tuple[bool, str | None]]:
        clock.now += 1.0
        found = await status.health(upstream, None, is_draining=False, says_live=False)
        assert not isinstance(found.servers, UnsetType)
        return [(one.ready, one.reason) for one in found.servers]

    async def main() -> None:
        upstream = Upstream(["hung:1", "good:1"], "scheduler", clock=clock.monotonic)
        hung, good = upstream.servers
        ready = (True, None)
        assert await health(upstream) == [ready, ready]
        ages_s["hung:1"] = 50.0
        assert await health(upstream) == [ready, ready], "it may just begin"
        clock.now += STEP_TIMEOUT_S
        assert await health(upstream) == [(False, "the engine hangs: no step for 31 s"), ready]
        assert (hung.is_known_down, good.is_known_down) == (True, False)
        assert not hung.takes_none, "requests wait for the next engine"
        assert {chosen(upstream) for _ in range(4)} == {good}
        figures = await status.metrics(upstream, Figures(), 0)
        assert [one.is_up for one in figures.servers] == [False, True]
        ages_s["hung:1"] = 0.1
        assert await health(upstream) == [ready, ready]
        assert not hung.is_known_down
        await upstream.close()

    asyncio.run(main())


def test_a_gateway_whose_only_engine_hangs_is_not_ready(ages_s: dict[str, float]) -> None:
    clock = Clock()

    async def main() -> None:
        upstream = Upstream(["hung:1"], "scheduler", clock=clock.monotonic)
        ages_s["hung:1"] = 50.0
        statuses = []
        for _ in range(4):
            found = await status.health(upstream, None, is_draining=False, says_live=False)
            statuses.append(found.status)
            clock.now += STEP_TIMEOUT_S / 2 + 0.1
        assert statuses == ["ready", "ready", "not ready", "not ready"]
        await upstream.close()

    asyncio.run(main())


def chosen(upstream: Upstream) -> Server:
    """The server that the next request goes to."""
    return upstream._choose(set())
