"""Draw every dashboard in front of a real server under load: `make dashboards-picture`.

    python loadtests/dashboards_picture.py --output /tmp/pictures

A server with two ranks, drafts, tenants and slower tiers, and a gateway, are asked by more and more
clients, more than the server has rows for. Halfway through the engine is killed. A real Prometheus
scrapes both, with charonia's own configuration; the pictures have what it then answers to the
dashboards' queries.

It needs Prometheus (Debian: prometheus; or PROMETHEUS names the program).
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

from paths import ROOT, TESTS

# It shares the server, its clients and Prometheus with the tests, and how a dashboard is drawn with
# those who have a server of their own.
sys.path += [str(TESTS), str(ROOT / "docker" / "grafana")]

from picture import NAMES, Source, draw

from command_line import exit_on_sigterm, make_parser, positive
from support.observed import MAX_NUM_SEQS, client, kill_engine, observed_server, targets_of
from support.prometheus import PROGRAM, running_prometheus

MAX_CLIENTS = 2 * MAX_NUM_SEQS


def main() -> None:
    """Run as the command line says."""
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--seconds", type=positive, default=240, help="default: %(default)s")
    options = parser.parse_args()
    if PROGRAM is None:
        parser.error("prometheus is needed (Debian: apt-get install prometheus)")
    exit_on_sigterm("dashboards_picture")
    options.output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dashboards-")))
        server, gateway = stack.enter_context(observed_server(folder))
        targets = targets_of(server, gateway)
        prometheus = stack.enter_context(running_prometheus(folder, targets))
        started = time.monotonic()
        for number in range(MAX_CLIENTS):
            stack.enter_context(client(server, gateway, number))
            if number == MAX_CLIENTS // 2:
                kill_engine(server)
            until = started + options.seconds * (number + 1) / MAX_CLIENTS
            time.sleep(max(until - time.monotonic(), 0.0))
        source = Source(prometheus.url, options.seconds)
        for name in NAMES:
            path = options.output / f"{name}.png"
            draw(name, source, path)
            print(path)


if __name__ == "__main__":
    main()
