"""What watches a server, on real parts: `make observe-test`.

Without Prometheus (Debian: prometheus; or PROMETHEUS names it) the tests with it are not collected,
and without rsyslog (Debian: rsyslog; or RSYSLOGD names it) those of the log.
"""

import sys
from pathlib import Path

from support import prometheus, rsyslog

sys.path.append(str(Path(__file__).parents[2] / "loadtests"))  # for how runs are recorded

collect_ignore = []
if prometheus.PROGRAM is None:
    collect_ignore += ["test_alerts.py", "test_dashboards.py"]
if rsyslog.PROGRAM is None:
    collect_ignore += ["test_logs.py"]
