"""Keeps a server alive, beside it: what probes it, what judges the findings, what repairs it."""
