"""Keeps a server alive from outside: probes it, judges the results, repairs it."""
