"""The registry of live sessions in the scheduler's process, by key.

Owns which of them are named. Must not know how sessions end, nor their other contents.
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
        """Number of named sessions, see `Session.is_named`."""
        return len(self._named)

    def get(self, key: str) -> Session | None:
        """The session with this key, or None."""
        return self._all.get(key)

    def all(self) -> list[Session]:
        """All live sessions."""
        return list(self._all.values())

    def named(self) -> list[Session]:
        """All named sessions."""
        return list(self._named.values())

    def add(self, session: Session) -> bool:
        """Add a session unless its key is taken; return whether it was added."""
        if self._all.setdefault(session.key, session) is not session:
            return False
        if session.is_named:
            self._named[session.key] = session
        return True

    def remove(self, key: str) -> Session | None:
        """Remove and return the session with this key, if there is one."""
        self._named.pop(key, None)
        return self._all.pop(key, None)
