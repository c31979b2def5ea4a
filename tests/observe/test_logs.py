"""The log of a real server comes through a real rsyslog in time, with all that it says."""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.e2e import one_torch_thread, wait_for
from support.rsyslog import Rsyslog, running_rsyslog
from support.serving import Serving
from support.waiting import WAIT_S

pytestmark = pytest.mark.observe

SHIPPED_WITHIN_S = 5.0
PROMPT = "what a client wrote"
LIFE = ["request_received", "request_started", "request_first_token", "request_ended"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def url(checkpoint: Callable[..., Path], folder: Path) -> Iterator[str]:
    """The gateway of a server that logs to a file."""
    arguments = (
        *("--gateway", "--gateway-port", "0", "--log-format", "json", "--log-level", "debug"),
        *("--otlp-traces-endpoint", "http://127.0.0.1:9"),  # nobody takes the traces
    )
    model = checkpoint("LlamaForCausalLM", max_position_embeddings=2048)
    with one_torch_thread(), (folder / "serve.log").open("ab") as log:
        serving = Serving("--model", model, *arguments, stderr=log)
        with serving.process:
            (url,) = re.findall(r"OpenAI +(\S+)/v1", serving.wait_announced())
            assert wait_for(lambda: is_ready(url), bool)
            yield url
            serving.process.terminate()


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Rsyslog]:
    with running_rsyslog(folder) as agent:
        yield agent


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/ready").status_code == 200
    return False


def ask(url: str, name: str, trace_id: str) -> None:
    reply = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True},
        headers={"x-request-id": name, "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        timeout=WAIT_S,
    )
    assert reply.is_success, reply.text


def has_all(records: list[dict[str, Any]], name: str) -> bool:
    """Whether all lines of a request are there: two of the gateway, the others the scheduler's."""
    of_gateway = with_field(records, "request_id", name)
    return (len(of_gateway), len(of(records, f"{name}-0"))) == (2, len(LIFE))


def with_field(records: list[dict[str, Any]], field: str, value: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get(field) == value]


def test_from_a_trace_id_one_gets_to_the_lines_of_its_request_in_time(
    agent: Rsyslog, url: str
) -> None:
    taken = []
    for index in range(3):
        trace_id = f"4bf92f3577b34da6a3ce929d0e0e473{index}"
        ask(url, f"mine-{index}", trace_id)
        asked_at = time.monotonic()
        records = wait_for(agent.records, partial(has_all, name=f"mine-{index}"))
        taken.append(time.monotonic() - asked_at)
        found = with_field(records, "trace_id", trace_id)
        received, request = with_field(found, "source", "charonia")
        assert (received["event"], received["level"]) == ("request_received", "debug")
        assert (request["event"], request["level"], request["status"]) == ("request", "info", 200)
        assert request["request_id"] == f"mine-{index}"
        ended = of(found, f"mine-{index}-0")[-1]
        assert (ended["tokens"], ended["outcome"]) == (3, "length")
        assert ended["total_seconds"] > 0
    print(f"\nlines were shipped after {', '.join(f'{s:.2f} s' for s in taken)}")
    assert max(taken) < SHIPPED_WITHIN_S


def of(records: list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    """The scheduler's lines of a request."""
    found = with_field(with_field(records, "request_id", request_id), "source", "scheduler")
    assert [record["event"] for record in found] == LIFE[: len(found)]
    return found


def test_each_line_is_shipped_as_it_was_written(agent: Rsyslog, url: str, folder: Path) -> None:
    def written() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "serve.log").read_text().splitlines()]

    ask(url, "last", "4bf92f3577b34da6a3ce929d0e0e4739")
    shipped = wait_for(agent.records, partial(has_all, name="last"))
    assert {record.pop("host", "") for record in shipped} != {""}
    # All in the order in which they were written; the last ones may be on their way.
    assert shipped == written()[: len(shipped)]
    assert has_all(shipped, "last")
    tritons = [record for record in shipped if record["source"].endswith(".cc")]
    assert {record["level"] for record in tritons} >= {"info"}
    assert not any(PROMPT in json.dumps(record) for record in shipped)


def test_what_is_no_record_is_shipped_as_a_warning(tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text('Segmentation fault\n{"level": "info", "seconds": 0.25}\n')
    with running_rsyslog(tmp_path) as agent:
        first, second = wait_for(agent.records, lambda found: len(found) == 2)
    assert first.pop("host") == second.pop("host") != ""
    assert first == {"source": "other", "level": "warning", "message": "Segmentation fault"}
    assert second == {"level": "info", "seconds": 0.25}
