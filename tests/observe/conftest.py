"""What watches a server, on real parts: `make observe-test`.

Without Prometheus (Debian: prometheus; or PROMETHEUS names it) the tests here are not collected.
"""

from support.prometheus import PROGRAM

if PROGRAM is None:
    collect_ignore_glob = ["test_*.py"]
