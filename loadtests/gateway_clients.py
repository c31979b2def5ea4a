"""Run official clients against a real gateway, and record their versions and what was checked.

    make gateway-clients
    make gateway-clients ARGS="--only lm_eval --output /tmp/clients"

The tests are in tests/clients. The record goes to results/ only if the commit holds all files.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from typing import Any

import pytest

from command_line import add_output, make_parser
from paths import ROOT
from record import circumstances, output_stem, write_record
from report import markdown_table

TESTS = ROOT / "tests" / "clients"
PACKAGES = {
    "openai (Python)": ("openai",),
    "LangChain ChatOpenAI": ("langchain-openai", "langchain-core", "openai"),
    "LiteLLM hosted_vllm/": ("litellm", "openai"),
    "lm-eval local-completions": ("lm-eval", "transformers", "torch"),
}
NODE_PACKAGES = {
    "openai (npm)": ("openai",),
    "AI SDK": ("ai", "@ai-sdk/openai-compatible"),
}


class Results:
    """A plugin for pytest that keeps what came of each test.

    Attributes:
        checks: by client and test: "passed", or the first line of the error.
    """

    def __init__(self) -> None:
        self.checks: dict[str, dict[str, str]] = defaultdict(dict)
        self._clients: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep which client each test is of."""
        for item in items:
            module = item.getparent(pytest.Module)
            assert module is not None
            self._clients[item.nodeid] = module.obj.CLIENT

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a test ended."""
        checks = self.checks[self._clients[report.nodeid]]
        name = report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " ")
        if report.failed:
            checks[name] = str(report.longrepr).strip().splitlines()[-1]
        elif report.skipped:
            checks[name] = "skipped"
        elif report.when == "call":
            checks.setdefault(name, "passed")


def versions_of(client: str) -> dict[str, str]:
    """The versions of a client's packages."""
    if client in PACKAGES:
        return {name: version(name) for name in PACKAGES[client]}
    found = {"node": _output("node", "--version")}
    for name in NODE_PACKAGES[client]:
        package = TESTS / "node_modules" / name / "package.json"
        found[name] = json.loads(package.read_text(encoding="utf-8"))["version"]
    return found


def as_markdown(about: dict[str, Any], clients: dict[str, Any]) -> str:
    """A table with a row for each client, and what was checked below it."""
    rows = []
    for name, found in clients.items():
        checks = found["checks"].values()
        num_passed = sum(check == "passed" for check in checks)
        versions = ", ".join(f"{one} {number}" for one, number in found["versions"].items())
        rows.append([name, versions, f"{num_passed} of {len(checks)}"])
    machine = about["machine"].get("Model name", "unknown")
    head = (
        f"{about['date']}, commit {about['commit']}, {about['machine'].get('CPU(s)')} x {machine}"
    )
    table = markdown_table(["client", "versions", "checks passed"], rows)
    lists = [
        f"- {name}: " + "; ".join(f"{check} ({end})" for check, end in found["checks"].items())
        for name, found in clients.items()
    ]
    return f"{head}, Python {about['python']}\n\n{table}\n" + "\n".join(lists) + "\n"


def main() -> None:
    """Run the tests, and write the record."""
    options = _parser().parse_args()
    stem = output_stem(options.output, "gateway-clients")
    about = circumstances("gateway_clients.py") | {"system": platform.platform(terse=True)}
    results = Results()
    arguments = [
        str(TESTS),
        "-q",
        "-p",
        "no:cacheprovider",
        "--override-ini=filterwarnings=default",
    ]
    if options.only:
        arguments += ["-k", options.only]
    code = pytest.main(arguments, plugins=[results])
    clients = {
        name: {"versions": versions_of(name), "checks": checks}
        for name, checks in results.checks.items()
    }
    if clients:
        table = as_markdown(about, clients)
        print(table)
        print(write_record(stem, about | {"clients": clients}, table=table))
    sys.exit(code)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--only", metavar="EXPRESSION", help="tests to run, as for pytest's -k")
    add_output(parser, "gateway-clients", "md")
    return parser


if __name__ == "__main__":
    main()
