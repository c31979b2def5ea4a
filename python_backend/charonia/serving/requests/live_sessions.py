"""Which requests are live in the scheduler's process: one registry, by key.

Owns which of them are named. Must not know what becomes of a session, nor what else it holds.
"""

from charonia.serving.requests.session import Session


class LiveSessions:
    """The sessions that are live, by key. For all threads."""

    def __init__(self) -> None:
        self._all: dict[str, Session] = {}
        self._named: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_named(self) -> int:
        """How many are named, see `Session.is_named`."""
        return len(self._named)

    def get(self, key: str) -> Session | None:
        """The one of this key."""
        return self._all.get(key)

    def all(self) -> list[Session]:
        """Those that are live at this moment."""
        return list(self._all.values())

    def named(self) -> list[Session]:
        """Those of them that are named."""
        return list(self._named.values())

    def add(self, session: Session) -> bool:
        """Put a session in, unless there is one of its key; whether it is in."""
        if self._all.setdefault(session.key, session) is not session:
            return False
        if session.is_named:
            self._named[session.key] = session
        return True

    def remove(self, key: str) -> Session | None:
        """Take a session out, if it is there."""
        self._named.pop(key, None)
        return self._all.pop(key, None)
