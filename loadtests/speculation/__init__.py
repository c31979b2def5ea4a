"""The parts of loadtests/speculation_bench.py."""
