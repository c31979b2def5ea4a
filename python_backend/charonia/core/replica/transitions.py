"""What may happen to an engine, and what follows: its states, events, and their one table.

Owns that table. Must not know what is done in a state, nor when something happens.

                 ┌────────────────────────────── FOUND ──────────────────────────────┐
                 ▼                                                                   │
    STARTING ─FOUND─► SERVING ─DOUBTED─► CHECKING    asked what it is, after a failed step
                        │                 │ LOST
                        ├─LOST──────► REPLACING ─FAILED─► DOWN ⟲ FAILED    back-off, requests fail
                        │                 ▲ LOST            ▲ FAILED
                        ├─UNLOADED──► UNLOADED ─OVERDUE─► MISSED           requests fail
                        │                 ▲ │ ORDERED
                        └─ORDERED───► RELOADING ─FAILED─► RESTORING        the one before comes back

    any ─STOPPED─► STOPPED     the server is shutting down; an engine that goes now is no loss

That is the gist; the table below is complete. At the start an engine may still be loading, so none
counts as lost before Triton has called it loaded for seconds while nobody answered. One that is not
loaded then is looked for and never loaded: another scheduler may be at it, or an operator.

An engine that dies while it is loaded may have been killed as the one before it was, so REPLACING
and RESTORING STUMBLE once: it is loaded again at once, and requests wait on.

Whoever looks for an engine or loads it may be STUCK. Nobody waits for that any longer, but no other
attempt begins before it has ended.
"""

from collections.abc import Mapping
from enum import Enum, auto


class State(Enum):
    """What there is of an engine."""

    STARTING = auto()  # there was none yet; it is looked for
    SERVING = auto()  # steps run
    CHECKING = auto()  # it is asked what it is
    REPLACING = auto()  # it was lost; it is loaded anew
    DOWN = auto()  # it could not be loaded, or was of no use; that is tried again
    RELOADING = auto()  # an operator has ordered another one, which is loaded
    RESTORING = auto()  # that one could not be loaded; the one before is loaded again
    UNLOADED = auto()  # Triton has unloaded it; it is looked for
    MISSED = auto()  # for so long that nobody waits any more
    STOPPED = auto()  # the server is shutting down


class Event(Enum):
    """What happens to one."""

    FOUND = auto()  # the one that was looked for or loaded is there, and fits
    LOST = auto()  # it died, hangs, or does not answer
    STUMBLED = auto()  # it died while it was loaded, for once
    FAILED = auto()  # it cannot be loaded, or is of no use
    STUCK = auto()  # whoever looks for it or loads it does not come back
    UNLOADED = auto()  # Triton says that none is loaded
    DOUBTED = auto()  # a step failed, or what is known of the engine has become void
    ORDERED = auto()  # an operator orders another one
    OVERDUE = auto()  # it was waited for long enough
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
        Event.LOST: State.REPLACING,  # it was loaded again, and is no good
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
"""The state that follows when something happens in one. What is not here cannot happen."""


class IllegalTransitionError(RuntimeError):
    """Something happened that cannot, by the table: a bug of ours."""


def next_state(state: State, happened: Event) -> State:
    """What the table says.

    Raises:
        IllegalTransitionError: it says nothing of that.
    """
    try:
        return TRANSITIONS[state][happened]
    except KeyError:
        raise IllegalTransitionError(f"{happened.name} in state {state.name}") from None
