"""Whole messages between processes, through stream sockets of any kind.

Owns all of it: framing, connections, who is served, how much may wait. Must not know what is in a
message or which processes these are: models of one Triton (`serving`), or ranks of one engine
(`parallel`).

    channel.py      the framing: one message after the other, none longer than its limit
    connection.py   one end that several threads may use; what waits to be sent is bounded
    server.py       who connects: made sure of, bounded, served each in a thread of its own
    local.py        sockets that are files, for processes of one user
"""
