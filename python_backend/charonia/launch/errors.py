"""The launcher's own error.

Owns `LaunchError`, whose text is one line for the terminal of the person who starts the server.
"""

from charonia.errors import CharoniaError


class LaunchError(CharoniaError):
    """The server cannot be started, or does not stay up. Unlike other errors it may name paths:
    it is shown to the operator, never to a client."""
