"""Runs the tests as `make test` does: all of them, then what of real servers failed once more.

    python tests/run.py [arguments of pytest]

A test that starts processes depends on what the machine does beside it. Such a test gets a second
run, alone and in a fresh process, when all others are through. The whole passes with at most
`MAX_SECOND_RUNS` of them. All other tests run once. What fails after its test, such as a process
that is left behind, gets no second run.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

STARTS_PROCESSES = ("client", "e2e", "gateway", "launch", "page", "parallel", "supervision")
"""Folders whose tests may be run twice."""
MAX_SECOND_RUNS = 3


class Failures:
    """A plugin for pytest that keeps what failed.

    Attributes:
        errors: the first line of the error, by the test's id. is_broken: pytest itself failed, or
            a process that runs tests died.
        is_cut_off: some tests did not get their turn.
        has_leaks: something failed after its test, as where a process was left behind.
    """

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.is_broken = False
        self.is_cut_off = False
        self.has_leaks = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        """Keep that a process of xdist's died: nobody knows which tests it has not run."""
        self.is_broken |= error is not None

    def pytest_internalerror(self) -> None:
        """Keep that pytest itself failed: where a process of xdist's did, the exit code is 0."""
        self.is_broken = True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep whether the run ended early, as with `--exitfirst`."""
        self.is_cut_off = bool(session.shouldfail or session.shouldstop)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test that failed, or a fixture of it."""
        if report.failed:
            self.errors.setdefault(report.nodeid, first_line(report))
            self.has_leaks |= report.when == "teardown"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a file that cannot be read."""
        if report.failed:
            self.errors.setdefault(report.nodeid, first_line(report))


def first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return text.strip().partition("\n")[0]


def may_run_twice(test: str) -> bool:
    """Whether a test, by its id, is one of real servers."""
    path, _, name = test.partition("::")
    folders = Path(path).parts
    return bool(name) and folders[0] == "tests" and folders[1] in STARTS_PROCESSES


def passed(report: Path) -> int:
    """How many tests passed, by the report of a run in which none failed."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    return sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites)


def main(arguments: list[str]) -> int:
    """Run the tests; returns pytest's exit code, or 0 if a second run made up for the first."""
    failures = Failures()
    # What failed in an earlier run is not to count for the second run of this one.
    code = int(pytest.main([*arguments, "--cache-clear"], plugins=[failures]))
    if failures.is_broken:
        print("\npytest, or a process that ran tests, has failed: not all tests have run")
        return int(pytest.ExitCode.INTERNAL_ERROR)
    if code != pytest.ExitCode.TESTS_FAILED or not all(map(may_run_twice, failures.errors)):
        return code
    if failures.is_cut_off or failures.has_leaks:
        return code
    if not 0 < len(failures.errors) <= MAX_SECOND_RUNS:
        return code
    print(f"\n{len(failures.errors)} tests of real servers failed, and run once more\n", flush=True)
    of_first = ("--cov", "--junit")  # what the first run reports, of all tests
    rest = [argument for argument in arguments if not argument.startswith(of_first)]
    again = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        again += ["--junitxml", report.name]
        second = subprocess.run([sys.executable, "-m", "pytest", *rest, *again])
        if second.returncode:
            return second.returncode
        num_passed = passed(Path(report.name))
    if num_passed != len(failures.errors):
        print(f"\n{num_passed} tests of {len(failures.errors)} passed on the second run")
        return code
    print("\npassed on the second run:")
    for test, error in failures.errors.items():
        print(f"  {test}\n    first run: {error}")
    return 0


if __name__ == "__main__":
    # As `python -m pytest` does: processes that tests start import the tests' modules.
    sys.path.insert(0, os.getcwd())
    # A shell makes what it starts in the background ignore SIGINT, and so would all programs that
    # tests start, and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
