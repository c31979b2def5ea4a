"""Every alert fires in a real Prometheus when what it is about happens to a real server."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.metrics.metric_table import ENDS
from charonia_client import Client, RetryPolicy
from charonia_client.errors import CharoniaClientError
from record import circumstances, output_stem, write_record
from report import markdown_table
from support.e2e import endless_request, one_torch_thread, scrape, wait_for
from support.faults import held_loads, make_faulty_repository, paced
from support.prometheus import CONFIGURATION, Prometheus, running_prometheus
from support.serving import CHARONIA
from support.waiting import WAIT_S

pytestmark = [pytest.mark.observe, pytest.mark.timeout(1200)]

POLL_S = 0.1
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((CONFIGURATION.parent / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
OUTAGES = ("CharoniaEngineDown", "CharoniaSchedulerDown", "CharoniaScrapeDown")
OUTAGE_S = 10.0
"""Within this an outage must be an alert, whatever its rule says."""
HOLDS_AFTER_S = {
    "CharoniaReloadSlow": 0,
    "CharoniaNothingRuns": 60,  # no token within the window of its rate
    "CharoniaEngineRestarts": 5,  # the next engine is loaded, and counted
    "CharoniaErrors": 5,  # sixteen requests have their rows, and the queue is full
    "CharoniaTimeToFirstToken": 10,  # a row is free again after 30 steps of 0.3 s
    "CharoniaInterToken": 1,  # three steps of 0.3 s
    "CharoniaQueueGrows": 90,  # there is a past to compare with
    "CharoniaKvPressure": 60,  # the window of its average has nothing else
    "CharoniaDraftsRejected": 1,  # some steps of 0.3 s
    "CharoniaDeadlinesMissed": 3,  # the deadline, and a request that asks each second
    "CharoniaTenantRefused": 2,  # a tenth of a request per second, asked for each second
}
"""Seconds from the cause until the expression of an alert holds, at the longest."""
SLACK_S = 15.0
"""For a machine with other work."""
OUTPUT = "ALERTS_OUTPUT"
"""This variable of the environment may name the record, as --output of the load tests does."""
TENANTS = {"tenants": {"eager": {"requests_per_s": 0.1}}}
ALL_IDS = list(range(3, 250))
"""A prompt with every token: whichever comes next, it was there before, and is drafted after."""
taken: dict[str, float] = {}
"""Seconds until each alert fired."""


def target_of(server: TritonServer) -> str:
    return server.metrics_url.removeprefix("http://").removesuffix("/metrics")


def seconds(duration: str) -> float:
    """A duration as Prometheus writes it, of one unit."""
    return int(duration[:-1]) * {"s": 1.0, "m": 60.0}[duration[-1]]


def bound_s(alert: str) -> float:
    """Seconds from the cause within which an alert must fire.

    Its expression holds after a while; a scrape, a recording rule and the alert's own see that each
    at their next turn; and it must have held for some time.
    """
    if alert in OUTAGES:
        return OUTAGE_S
    every = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))["global"]
    turns = seconds(every["scrape_interval"]) + 2 * seconds(every["evaluation_interval"])
    held = seconds(RULES[alert].get("for", "0s"))
    return HOLDS_AFTER_S[alert] + turns + held + SLACK_S


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    """A table of all that fired, which is recorded where the environment names a place."""
    asked = os.environ.get(OUTPUT)
    stem = None if asked is None else output_stem(Path(asked), "alerts")
    about = circumstances("") | {"command": f"make observe-test {OUTPUT}={asked}"}
    yield
    fired = dict(sorted(taken.items(), key=lambda item: item[1]))
    rows = [[name, f"{after:.1f} s", f"{bound_s(name):g} s"] for name, after in fired.items()]
    table = markdown_table(["alert", "fired after", "at most"], rows)
    print(f"\n\n{table}")
    if stem is not None:
        found = {name: {"seconds": one, "bound_s": bound_s(name)} for name, one in fired.items()}
        written = write_record(stem, {**about, "alerts": found}, table=f"{table}\n")
        print(f"\n{written}")


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    """A random model that never stops by itself."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=4096, eos_token_id=None)


@contextlib.contextmanager
def watched(
    tmp_path: Path, model: Path, *settings: str, step_s: float = 0.01
) -> Iterator[tuple[TritonServer, Prometheus]]:
    """A server whose engine fails on order, and a Prometheus that watches it."""
    repository = make_faulty_repository(tmp_path / "repository", step_s=step_s)
    common = ("dtype=float32", "cpu_threads=1", *settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_torch_thread())
        server = stack.enter_context(
            running_server(model=model, settings=common, source=repository)
        )
        targets = {"charonia": [target_of(server)]}
        yield server, stack.enter_context(running_prometheus(tmp_path, targets))


@contextlib.contextmanager
def asking(
    server: TritonServer, prompt: list[int], every_s: float = 0.0, **sampling: Any
) -> Iterator[None]:
    """Send requests meanwhile: one after the other, or one every so many seconds."""
    stop = threading.Event()

    def ask() -> None:
        with (
            Client(server.grpc_url, retry=RetryPolicy(max_attempts=1)) as client,
            contextlib.suppress(CharoniaClientError),
        ):
            client.generate(prompt, {"ignore_eos": True, **sampling})  # type: ignore[typeddict-item]

    def run() -> None:
        threads = []
        while not stop.is_set():
            if not every_s:
                ask()
                continue
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
            stop.wait(every_s)
        for thread in threads:
            thread.join()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def note(prometheus: Prometheus, *names: str, since: float | None = None) -> None:
    """Wait for alerts to fire, each within its bound, and keep how long each took.

    Args:
        since: the moment of their cause, by the monotonic clock; None is now.
    """
    started, missing = time.monotonic() if since is None else since, set(names)
    while missing:
        firing, after = prometheus.firing(), time.monotonic() - started
        for name in missing & firing:
            taken[name] = after
        missing -= firing
        late = [name for name in names if taken.get(name, after) > bound_s(name)]
        assert not late, f"{', '.join(late)}: not within the bound, after {after:.1f} s"
        time.sleep(POLL_S)


def wait_restarts(server: TritonServer, number: int) -> None:
    name = "charonia_engine_restarts_total"
    assert wait_for(lambda: scrape(server)[name], lambda found: found == number) == number


def test_outages_and_what_waits_for_their_end(tmp_path: Path, model: Path) -> None:
    with watched(tmp_path, model) as (server, prometheus):
        finished = wait_for(lambda: prometheus.query("charonia_finished_total"), bool)
        assert {labels["reason"]: value for labels, value in finished} == dict.fromkeys(ENDS, 0.0)
        with endless_request(server):
            wait_for(lambda: prometheus.query("charonia_generation_tokens_total > 0"), bool)
            assert prometheus.firing() == set()
            with held_loads(server.repository):
                (engine,) = server.pids("engine")
                os.kill(engine, signal.SIGKILL)
                killed_at = time.monotonic()
                note(prometheus, "CharoniaEngineDown")
                note(prometheus, "CharoniaNothingRuns", since=killed_at)
            wait_restarts(server, 1)
            for number in (2, 3):
                (engine,) = server.pids("engine")
                os.kill(engine, signal.SIGKILL)
                if number == 2:
                    wait_restarts(server, number)
            note(prometheus, "CharoniaEngineRestarts")
        (scheduler,) = server.pids("scheduler")
        os.kill(scheduler, signal.SIGSTOP)
        try:
            note(prometheus, "CharoniaSchedulerDown")
        finally:
            os.kill(scheduler, signal.SIGCONT)
        wait_for(prometheus.firing, lambda names: "CharoniaSchedulerDown" not in names)
        assert server._page_server is not None
        server._page_server.close()
        note(prometheus, "CharoniaScrapeDown")


def test_a_reload_is_no_outage_unless_it_does_not_end(tmp_path: Path, model: Path) -> None:
    with watched(tmp_path, model) as (server, prometheus), contextlib.ExitStack() as stack:
        with held_loads(server.repository):
            command = [*CHARONIA, "reload", "--url", server.grpc_url]
            reload = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            note(prometheus, "CharoniaReloadSlow")
            command = [*CHARONIA, "top", "--once", "--url", target_of(server)]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert "reloading" in shown
        assert reload.wait(WAIT_S) == 0
        # It was not even pending, at any time.
        assert prometheus.query('last_over_time(ALERTS{alertname="CharoniaEngineDown"}[1h])') == []
        assert wait_for(prometheus.firing, lambda names: not names) == set()


def test_a_service_that_is_slow_or_refuses(tmp_path: Path, model: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps(TENANTS), encoding="utf-8")
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "adaptive": False,
    }
    settings = (
        "max_num_seqs=2",
        "scheduling_policy=deadline",
        f"speculative_config={json.dumps(speculation)}",
        f"scheduler.tenants_file={tenants}",
        "scheduler.fair_share=true",
    )
    with (
        watched(tmp_path, model, *settings, step_s=0.0) as (server, prometheus),
        asking(server, ALL_IDS, temperature=5.0, max_tokens=30),
        asking(server, [5, 6], every_s=1.0, tenant="eager", max_tokens=1),
        asking(server, [7, 8], every_s=1.0, tenant="late", max_tokens=30, deadline_ms=1500),
        asking(server, [9, 10], every_s=2.0, max_tokens=30),
        paced(server.repository, 0.3),
    ):
        note(
            prometheus,
            "CharoniaTenantRefused",
            "CharoniaInterToken",
            "CharoniaDeadlinesMissed",
            "CharoniaTimeToFirstToken",
            "CharoniaDraftsRejected",
            "CharoniaQueueGrows",
        )


def test_a_kv_cache_that_is_too_small_and_a_queue_that_is_full(tmp_path: Path, model: Path) -> None:
    """Sixteen requests grow to 14 blocks each, of 65. Of the others all but one are refused."""
    settings = (
        "max_num_seqs=16",
        "max_model_len=1024",
        "num_gpu_blocks_override=66",
        "scheduler.max_queue_size=1",
    )
    with contextlib.ExitStack() as stack:
        server, prometheus = stack.enter_context(watched(tmp_path, model, *settings))
        for number in range(16):
            stack.enter_context(asking(server, [5 + number] * 16, max_tokens=200))
        stack.enter_context(asking(server, [4], every_s=0.2, max_tokens=1))
        note(prometheus, "CharoniaKvPressure", "CharoniaErrors")


def test_every_alert_was_provoked(request: pytest.FixtureRequest) -> None:
    run = {item.function for item in request.session.items if isinstance(item, pytest.Function)}
    if not {test for name, test in globals().items() if name.startswith("test_")} <= run:
        pytest.skip("not all tests of this file were asked for")
    assert taken.keys() == RULES.keys()
