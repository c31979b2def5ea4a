"""Answers to the messages of one connection, in their order.

Owns when an answer is made and sent. Knows nothing about the messages.
"""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from charonia.sockets.connection import Connection

Answer = Callable[[], bytes]
"""Finishes the work of a message and returns the reply."""
Begin = Callable[[bytes], Answer | None]
"""Begins the work of a message; None hangs up."""


def answer_each(connection: Connection, begin: Begin, *, spin: float = 0.0) -> None:
    """Answer one message after the other, until no more come.

    Args:
        spin: seconds to poll for the next message after a reply, see `Channel.receive`.
    """
    for answer in _begun(connection, begin, spin):
        connection.send(answer())


def answer_overlapping(connection: Connection, begin: Begin, *, spin: float = 0.0) -> None:
    """Begin messages while earlier ones are still unanswered; a second thread answers."""
    answers: SimpleQueue[Answer | None] = SimpleQueue()
    ender = threading.Thread(
        target=_end_all, args=(connection, answers), name="charonia-answers", daemon=True
    )
    ender.start()
    try:
        for answer in _begun(connection, begin, spin):
            answers.put(answer)
    finally:
        answers.put(None)
        ender.join()


def _begun(connection: Connection, begin: Begin, spin: float) -> Iterator[Answer]:
    for message in connection.messages(spin=spin):
        answer = begin(message)
        if answer is None:
            return
        yield answer


def _end_all(connection: Connection, answers: "SimpleQueue[Answer | None]") -> None:
    """Answer one message after the other; all of them, even if the other end has gone."""
    while (answer := answers.get()) is not None:
        try:
            connection.send(answer())
        except OSError:
            pass  # the other end has gone
        except BaseException:
            connection.hang_up()  # or the other end would wait for this answer for ever
            raise
