"""What a hostile client does to a server, and what a neighbour and the machine notice of it.

target.py     the server, as an attacker sees it, and what an attack is
wire.py       attacks of bytes: on ports, sockets, half requests
clients.py    attacks of clients that vanish or never read
calls.py      attacks of requests that are whole: heavy, many, nonsense
catalogue.py  all attacks
neighbour.py  an honest client beside them
trial.py      one attack beside the neighbour, and what came of it
"""
