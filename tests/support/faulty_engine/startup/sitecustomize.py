"""Installs the faults in a rank that the engine starts, before the rank's own program runs."""

import sys

if "charonia.parallel.worker" in sys.orig_argv:
    import faulty_steps

    faulty_steps.install()
