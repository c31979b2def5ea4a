"""Attacks of hostile clients on a server, and their effects on a neighbour and the machine.

target.py     the server, as an attacker sees it, and the type of attacks
wire.py       attacks of bytes: on ports, sockets, half requests
clients.py    attacks of clients that vanish or never read
calls.py      attacks of requests that are whole: heavy, many, nonsense
catalogue.py  all attacks
neighbour.py  an honest client beside them
trial.py      one attack beside the neighbour, and its outcome
"""
