"""The registry of the live requests in the scheduler's process, by key.

Owns which sessions there are, and how many of them are named. Must not know how sessions end, nor
their other contents.
"""

import threading

from charonia.serving.requests.session import Session


class LiveSessions:
    """The sessions that are live, by key. For all threads.

    Attributes:
        num_named: how many of them are named, see `Session.is_named`.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._lock = threading.Lock()
        self.num_named = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, session: Session) -> bool:
        return self._by_key.get(session.key) is session

    def get(self, key: str) -> Session | None:
        """The session with this key, or None."""
        return self._by_key.get(key)

    def all(self) -> list[Session]:
        """All live sessions."""
        return list(self._by_key.values())

    def add(self, session: Session) -> bool:
        """Add a session unless its key is taken; return whether it was added."""
        with self._lock:
            if self._by_key.setdefault(session.key, session) is not session:
                return False
            self.num_named += session.is_named
        return True

    def remove(self, session: Session) -> bool:
        """Remove a session; return whether it was live."""
        with self._lock:
            if self._by_key.get(session.key) is not session:
                return False
            del self._by_key[session.key]
            self.num_named -= session.is_named
        return True
