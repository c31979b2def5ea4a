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
    """The server crashed on its way up. tritonserver 2.51.0 was seen to do so on an overloaded
    machine while models were loaded (boost::interprocess::lock_exception; others see it under load:
    https://github.com/triton-inference-server/server/issues/8882). So once is worth another try."""


class NotReadyError(LaunchError):
    """The server was not ready in time. Three starts were seen to stand still. Of one it is known
    that the engine had loaded its weights, of none whether tritonserver or the engine stood still.
    So once is worth another try, and the error's notes say what was going on."""
