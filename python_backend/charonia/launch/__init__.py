"""Finds tritonserver, prepares a model repository for it, starts, supervises and stops it.

Owns the `charonia` command. Nothing else in the package may import it: a server knows nothing of
who started it. `server.run.running_server` is the way in for the benchmark and the tests.
"""
