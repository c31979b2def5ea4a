"""The state machine of an engine: states, events and the table of transitions.

Owns that table. Must not know what is done in a state, nor when an event happens.

                 ┌────────────────────────────── FOUND ──────────────────────────────┐
                 ▼                                                                   │
    STARTING ─FOUND─► SERVING ─DOUBTED─► CHECKING    connected to again, after a failed step
                        │                 │ LOST
                        ├─LOST──────► REPLACING ─FAILED─► DOWN ⟲ FAILED    back-off, requests fail
                        │                 ▲ LOST            ▲ FAILED
                        ├─UNLOADED──► UNLOADED ─OVERDUE─► MISSED           requests fail
                        │                 ▲ │ ORDERED
                        └─ORDERED───► RELOADING ─FAILED─► RESTORING        reload the old engine

    any ─STOPPED─► STOPPED     the server is shutting down; losing an engine is no failure now

The diagram is a summary; the table below is complete. At the start an engine may still be loading.
So it counts as lost only if Triton calls it loaded but it does not answer for some seconds. An
engine that is not loaded at the start is looked for and never loaded: another scheduler or an
operator may be loading it.

An engine that dies while it is loaded may have been killed from outside, like the one before it. So
REPLACING and RESTORING allow one STUMBLED: the engine is loaded again at once, and requests wait
on.

An attempt to find or load an engine may be STUCK. Requests then stop waiting for it, but no other
attempt begins before it has ended.
"""

from collections.abc import Mapping
from enum import Enum, auto


class State(Enum):
    """State of an engine."""

    STARTING = auto()  # there was no engine yet; it is looked for
    SERVING = auto()  # steps run
    CHECKING = auto()  # the engine is connected to again
    REPLACING = auto()  # the engine was lost; a new one is loaded
    DOWN = auto()  # the engine could not be loaded or used; attempts go on
    RELOADING = auto()  # an operator has ordered another engine; it is loaded
    RESTORING = auto()  # that failed; the old engine is loaded again
    UNLOADED = auto()  # Triton has unloaded the engine; it is looked for
    MISSED = auto()  # as UNLOADED, for so long that requests no longer wait
    STOPPED = auto()  # the server is shutting down


class Event(Enum):
    """An event in the life of an engine."""

    FOUND = auto()  # an engine was found or loaded, and can be used
    LOST = auto()  # the engine died, hangs, or does not answer
    STUMBLED = auto()  # the engine died while it was loaded, for the first time
    FAILED = auto()  # the engine cannot be loaded or used
    STUCK = auto()  # the attempt to find or load it does not end
    UNLOADED = auto()  # Triton says that no engine is loaded
    DOUBTED = auto()  # a step failed, or the state is uncertain
    ORDERED = auto()  # an operator orders another engine
    OVERDUE = auto()  # the wait for an unloaded engine has timed out
    STOPPED = auto()  # the server takes no more calls, or this process ends


TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.STARTING: {
        Event.FOUND: State.SERVING,
        Event.LOST: State.REPLACING,
        Event.UNLOADED: State.STARTING,
        Event.FAILED: State.DOWN,
        Event.DOUBTED: State.STARTING,
        Event.STOPPED: State.STOPPED,
    },
    State.SERVING: {
        Event.LOST: State.REPLACING,
        Event.UNLOADED: State.UNLOADED,
        Event.DOUBTED: State.CHECKING,
        Event.ORDERED: State.RELOADING,
        Event.STOPPED: State.STOPPED,
    },
    State.CHECKING: {
        Event.FOUND: State.SERVING,
        Event.LOST: State.REPLACING,
        Event.UNLOADED: State.UNLOADED,
        Event.FAILED: State.DOWN,
        Event.STUCK: State.DOWN,
        Event.DOUBTED: State.CHECKING,
        Event.STOPPED: State.STOPPED,
    },
    State.REPLACING: {
        Event.FOUND: State.SERVING,
        Event.STUMBLED: State.REPLACING,
        Event.FAILED: State.DOWN,
        Event.STUCK: State.DOWN,
        Event.DOUBTED: State.REPLACING,
        Event.STOPPED: State.STOPPED,
    },
    State.DOWN: {
        Event.FOUND: State.SERVING,
        Event.FAILED: State.DOWN,
        Event.DOUBTED: State.DOWN,
        Event.ORDERED: State.RELOADING,
        Event.STOPPED: State.STOPPED,
    },
    State.RELOADING: {
        Event.FOUND: State.SERVING,
        Event.FAILED: State.RESTORING,
        Event.STUCK: State.DOWN,
        Event.STOPPED: State.STOPPED,
    },
    State.RESTORING: {
        Event.FOUND: State.SERVING,
        Event.STUMBLED: State.RESTORING,
        Event.FAILED: State.DOWN,
        Event.STUCK: State.DOWN,
        Event.DOUBTED: State.RESTORING,
        Event.STOPPED: State.STOPPED,
    },
    State.UNLOADED: {
        Event.FOUND: State.SERVING,
        Event.LOST: State.REPLACING,  # it was loaded again, but does not answer
        Event.UNLOADED: State.UNLOADED,
        Event.FAILED: State.DOWN,
        Event.DOUBTED: State.UNLOADED,
        Event.ORDERED: State.RELOADING,
        Event.OVERDUE: State.MISSED,
        Event.STOPPED: State.STOPPED,
    },
    State.MISSED: {
        Event.FOUND: State.SERVING,
        Event.LOST: State.DOWN,
        Event.UNLOADED: State.MISSED,
        Event.FAILED: State.DOWN,
        Event.DOUBTED: State.MISSED,
        Event.ORDERED: State.RELOADING,
        Event.STOPPED: State.STOPPED,
    },
    State.STOPPED: {
        Event.DOUBTED: State.STOPPED,
        Event.STOPPED: State.STOPPED,
    },
}
"""The next state, by state and event. Events that are missing cannot happen."""


class IllegalTransitionError(RuntimeError):
    """An event that the table does not allow in this state: a bug of ours."""


def next_state(state: State, happened: Event) -> State:
    """The next state, by the table.

    Raises:
        IllegalTransitionError: the event cannot happen in this state.
    """
    try:
        return TRANSITIONS[state][happened]
    except KeyError:
        raise IllegalTransitionError(f"{happened.name} in state {state.name}") from None
