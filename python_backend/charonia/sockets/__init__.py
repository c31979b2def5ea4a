"""Whole messages between processes, through stream sockets of any kind.

Owns framing, connections, access, and the limits of queues. Knows nothing about the content of a
message, or which processes these are: models of one Triton (`serving`), or ranks of one engine
(`parallel`).

    channel.py      framing: one message after the other, up to a maximum length
    connection.py   one end of a connection, for several threads, with a bounded outbox
    answering.py    answers to the messages of a connection, in their order
    server.py       accepts, checks and bounds connections; serves each in its own thread
    local.py        Unix sockets for processes of one user
"""
