"""A collector that takes spans by OTLP/HTTP and drops them, for what sending them costs.

    python loadtests/workers/otlp_sink.py

Prints its port, and when stdin is closed the number of senders, which their user agents tell apart.
"""

import http.server
import sys
import threading
from typing import ClassVar


class Sink(http.server.BaseHTTPRequestHandler):
    """Takes every body. `senders`: their user agents."""

    senders: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        """Take a request."""
        self.rfile.read(int(self.headers["content-length"]))
        Sink.senders.add(self.headers.get("user-agent", ""))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    print(len(Sink.senders), flush=True)
