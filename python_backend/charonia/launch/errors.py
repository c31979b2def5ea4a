"""The launcher's own errors.

Owns `LaunchError`, whose text is one line for the terminal of the person who starts the server, and
the kinds of it that must be told from the others.
"""

from charonia.errors import CharoniaError


class LaunchError(CharoniaError):
    """The server cannot be started, or does not stay up. Unlike other errors it may name paths:
    it is shown to the operator, never to a client."""


class LostError(LaunchError):
    """The server was lost after it had taken its first connections: a request may have ended it, so
    this does not say that it cannot be started."""


class CrashError(LaunchError):
    """The server crashed on its way up. On a busy machine it may, where waits.c is not in front of
    it; no other cause is known. So once is worth another try."""


class NotReadyError(LaunchError):
    """The server was not ready in time, perhaps for the same reason. So once is worth another try,
    and the error's notes say what was going on."""
