"""A plugin for pytest: the end of its output tells what failed, and what the servers logged last.

Owns that summary. Must not know what is tested.
"""

import gc
import sys
from collections.abc import Generator, Iterator

import pytest
from _pytest.terminal import TerminalReporter

from run import first_line

SECTION = "last lines of a server's log"
MAX_LINES = 45
"""Most lines of the summary, whatever failed."""
MAX_LOG_LINES = 8
"""Most lines of each server, per test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the servers of this process logged last to the report of a failure."""
    report = yield
    if report.failed:
        for tail in _log_tails():
            report.sections.append((SECTION, "\n".join(tail[-MAX_LOG_LINES:])))
    return report


def _log_tails() -> Iterator[list[str]]:
    """Yield the last lines of each server that this process knows, if possible the bad ones."""
    # Only where a server was started is the module there.
    if (module := sys.modules.get("charonia.launch.server.tritonserver")) is None:
        return
    for each in gc.get_objects():
        if type(each) is module.TritonServer and (tail := each.log_tail):
            yield list(filter(module.is_interesting, tail)) or tail


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print each test that failed, the first line of its error, and the logs of its servers."""
    failed = [
        report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])
    ]
    if not failed:
        return
    terminalreporter.section("what failed")
    num_lines = max(2, MAX_LINES // len(failed))
    for report in failed:
        logs = [content for title, content in report.sections if title == SECTION]
        num_each = (num_lines - 2) // max(1, len(logs))  # nobody knows which one matters
        terminalreporter.line(report.nodeid)
        terminalreporter.line(f"    {first_line(report)}")
        for line in (line for log in logs if num_each for line in log.splitlines()[-num_each:]):
            terminalreporter.line(f"    | {line}")
