"""A collector that takes spans by OTLP/HTTP and drops them, for what sending them costs.

    python loadtests/workers/otlp_sink.py

Prints its port. For each line on stdin it prints, as JSON, how many requests it has had and their
senders, which their user agents tell apart. It ends with stdin.
"""

import http.server
import json
import sys
import threading


class Sink(http.server.ThreadingHTTPServer):
    """Counts requests, and keeps the user agents of their senders."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.requests = 0
        self.senders: set[str] = set()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Sink

    def do_POST(self) -> None:
        """Take a request."""
        self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.requests += 1
            self.server.senders.add(self.headers.get("user-agent", ""))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    sink = Sink()
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    print(sink.server_port, flush=True)
    for _ in sys.stdin:
        with sink.lock:
            counted = {"requests": sink.requests, "senders": sorted(sink.senders)}
        print(json.dumps(counted), flush=True)
