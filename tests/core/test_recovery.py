"""The table of an engine's states, walked from end to end, and what each state means for others."""

from collections.abc import Callable

import pytest

from charonia.core.replica.recovery import SILENT_START_S, Recovery
from charonia.core.replica.transitions import (
    TRANSITIONS,
    Event,
    IllegalTransitionError,
    State,
    next_state,
)
from charonia.errors import (
    ConfigError,
    EngineDiedError,
    EngineUnloadedError,
    ServerStoppingError,
)
from charonia.metrics.metric_table import ENGINE_STATES
from charonia.metrics.metrics import Metrics
from support.echo import EchoExecutor

INFO = EchoExecutor().info()
PAIRS = [(state, happened) for state in State for happened in Event]
HAPPENINGS = {
    Event.FOUND: lambda recovery: recovery.note_found(INFO, 0),
    Event.LOST: lambda recovery: recovery.lose(EngineDiedError("it died"), 0),
    Event.UNLOADED: lambda recovery: recovery.unload(0),
    Event.DOUBTED: lambda recovery: recovery.doubt(),
    Event.ORDERED: lambda recovery: recovery.order(0),
    Event.OVERDUE: lambda recovery: recovery.wait_no_longer(0),
    Event.STOPPED: lambda recovery: recovery.stop(0),
    Event.FAILED: lambda recovery: recovery.note_missing(ConfigError("it is of no use"), 0),
    Event.STUCK: lambda recovery: recovery.give_up(EngineDiedError("it takes too long"), 0),
    Event.STUMBLED: lambda recovery: recovery.stumble(EngineDiedError("it died")),
}


def make_recovery(clock: Callable[[], float] = lambda: 0.0) -> Recovery:
    return Recovery(metrics=Metrics(), clock=clock, log=lambda line: None)


def paths() -> dict[State, list[Event]]:
    """The shortest way to each state that can be reached."""
    found: dict[State, list[Event]] = {State.STARTING: []}
    todo = [State.STARTING]
    for state in todo:
        for happened, after in TRANSITIONS[state].items():
            if after not in found:
                found[after] = [*found[state], happened]
                todo.append(after)
    return found


def in_state(state: State) -> Recovery:
    recovery = make_recovery()
    for happened in paths()[state]:
        HAPPENINGS[happened](recovery)
    assert recovery.state is state
    return recovery


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(TRANSITIONS) == set(State) == set(paths())


def test_from_every_state_but_the_last_there_is_a_way_to_serve_again_and_one_to_the_end():
    for state in set(State) - {State.STOPPED}:
        assert TRANSITIONS[state][Event.STOPPED] is State.STOPPED
        reached = {state}
        while (more := {t for s in reached for t in TRANSITIONS[s].values()} | reached) != reached:
            reached = more
        assert State.SERVING in reached
    assert set(TRANSITIONS[State.STOPPED].values()) == {State.STOPPED}


@pytest.mark.parametrize(("state", "happened"), PAIRS, ids=lambda one: one.name)
def test_what_happens_leads_where_the_table_says_or_is_refused(state, happened):
    recovery = in_state(state)
    if happened in TRANSITIONS[state]:
        HAPPENINGS[happened](recovery)
        assert recovery.state is TRANSITIONS[state][happened] is next_state(state, happened)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{happened.name} in state {state.name}"):
            HAPPENINGS[happened](recovery)
        assert recovery.state is state


def test_metrics_show_every_state_and_that_one_is_present():
    assert [state.name.lower() for state in State] == list(ENGINE_STATES)
    for state in State:
        gauges = in_state(state)._metrics.gauges
        assert gauges.keys() == {("charonia_engine_state", name) for name in ENGINE_STATES}
        for name in ENGINE_STATES:
            is_present = name == state.name.lower()
            assert gauges["charonia_engine_state", name] == is_present, (state, name)


@pytest.mark.parametrize("state", State, ids=lambda one: one.name)
def test_requests_are_refused_exactly_where_nothing_is_to_be_waited_for(state):
    recovery = in_state(state)
    refuses = {State.STARTING, State.DOWN, State.MISSED, State.STOPPED}
    assert (recovery.down_reason is not None) == (state in refuses)
    assert recovery.is_serving == (state is State.SERVING)


@pytest.mark.parametrize("state", State, ids=lambda one: one.name)
def test_an_engine_is_looked_for_or_loaded_in_every_state_that_has_none(state):
    recovery = in_state(state)
    recovery._retry_at = 0.0
    assert recovery.is_due == (state not in (State.SERVING, State.STOPPED))


LOOKING = (State.STARTING, State.CHECKING, State.UNLOADED, State.MISSED)
STUMBLING = (State.REPLACING, State.RESTORING)
LOADING = (State.REPLACING, State.DOWN, State.RELOADING, State.RESTORING)


@pytest.mark.parametrize("state", [*LOOKING, *LOADING], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("error", "looking", "loading"),
    [
        (EngineDiedError("dead"), Event.LOST, Event.FAILED),
        (EngineUnloadedError("unloaded"), Event.UNLOADED, Event.FAILED),
        (ConfigError("of no use"), Event.FAILED, Event.FAILED),
        (ServerStoppingError("no more calls"), Event.STOPPED, Event.STOPPED),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else one.name,
)
def test_what_an_error_means_depends_on_what_was_tried(state, error, looking, loading):
    happened = looking if state in LOOKING else loading
    if state is State.STARTING and isinstance(error, EngineDiedError):
        happened = Event.UNLOADED  # it may still be loading, or the server has not started either
    recovery = in_state(state)
    assert recovery.is_to_be_loaded == (state in LOADING)
    if state in STUMBLING and happened is Event.FAILED and isinstance(error, EngineDiedError):
        recovery.note_missing(error, 0)
        assert recovery.state is state, "once is no failure"
        assert recovery.is_due
    recovery.note_missing(error, 0)
    assert recovery.state is TRANSITIONS[state][happened]


NOT_YET = (EngineUnloadedError("unloaded"), ServerStoppingError("no calls yet"))


@pytest.mark.parametrize("not_yet", NOT_YET, ids=lambda error: type(error).__name__)
def test_an_engine_is_lost_at_the_start_when_it_is_loaded_and_silent_for_long(not_yet):
    now = 100.0
    recovery = make_recovery(lambda: now)

    def look(error: EngineDiedError) -> State:
        nonlocal now
        assert recovery.is_due
        recovery.note_missing(error, 0)
        now += 0.75 * SILENT_START_S
        return recovery.state

    silent = EngineDiedError("nobody answers")
    for error in (silent, not_yet, silent, silent, not_yet, not_yet, not_yet):
        assert look(error) is State.STARTING, "it may be loading"
    assert look(silent) is State.STARTING
    assert look(silent) is State.STARTING
    assert look(silent) is State.REPLACING
    assert recovery.is_due
    assert recovery.down_reason is None
