"""A real Prometheus that scrapes servers under test, with charonia's own configuration.

Owns that process and how it is asked. Must not know what is asked for.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from support.e2e import wait_for
from support.waiting import WAIT_S

CONFIGURATION = Path(__file__).parents[2] / "docker" / "prometheus" / "prometheus.yml"
_ADDRESS = re.compile(r'msg="Listening on".* address=(\S+)\n')
PROGRAM = os.environ.get("PROMETHEUS") or shutil.which("prometheus")


class Prometheus:
    """A running one.

    Args:
        folder: for its files. targets: `host:port` by job.

    Attributes:
        url: where it answers.
    """

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        assert PROGRAM is not None
        config = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
        config["rule_files"] = [str(CONFIGURATION.parent / name) for name in config["rule_files"]]
        config["scrape_configs"] = [
            job | {"static_configs": [{"targets": list(targets[job["job_name"]])}]}
            for job in config["scrape_configs"]
            if job["job_name"] in targets
        ]
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log_path = folder / "prometheus.log"
        self._log = self._log_path.open("w")
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=self._log,
        )
        self.url = ""
        self._http = httpx.Client(timeout=WAIT_S)
        if not wait_for(self._is_ready, lambda ready: ready or self._process.poll() is not None):
            self.close()
            raise AssertionError(self._log_path.read_text(encoding="utf-8"))

    def _is_ready(self) -> bool:
        """Return whether it answers; learn its address from the log."""
        address = _ADDRESS.search(self._log_path.read_text(encoding="utf-8"))
        if address is None:
            return False
        self.url = f"http://{address[1]}"
        self._http.base_url = httpx.URL(self.url)
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/-/ready").is_success
        return False

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The labels and values that an expression has now."""
        reply = self._http.get("/api/v1/query", params={"query": expr})
        assert reply.is_success, (expr, reply.text)
        result: list[Any] = reply.json()["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in result]

    def label_values(self, label: str, series: str) -> list[str]:
        """The values that a label of these series has, which Grafana asks for by `label_values`."""
        reply = self._http.get(f"/api/v1/label/{label}/values", params={"match[]": series})
        assert reply.is_success, (series, reply.text)
        values: list[str] = reply.json()["data"]
        return values

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        found = self.query('ALERTS{alertstate="firing"}')
        return {labels["alertname"] for labels, _ in found}

    def close(self) -> None:
        """End it."""
        self._http.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these targets."""
    with contextlib.closing(Prometheus(folder, targets)) as found:
        yield found
