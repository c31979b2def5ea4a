"""What is on the metrics page: tritonserver's own part, and what the schedulers say."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from charonia.metrics import merged_page, page_socket
from charonia.metrics.merged_page import MergedPage
from charonia.metrics.metric_table import BY_NAME
from charonia.metrics.page_server import NoPageError
from charonia.metrics.page_socket import (
    METRICS_SOCKET,
    Sample,
    serve_metrics,
)
from charonia.sockets.channel import Channel
from charonia.sockets.local import listen
from support.e2e import wait_for
from support.waiting import WAIT_S

TRITON = b"# HELP nv_a Triton's.\n# TYPE nv_a counter\nnv_a 1\n"
STEPS, PLANS = "charonia_step_seconds", "charonia_plan_seconds"


def samples(name: str) -> list[Sample]:
    """What a scheduler says of a histogram."""
    return [
        Sample(name, "_bucket", {"le": "0.005"}, 1.0),
        Sample(name, "_bucket", {"le": "0.01"}, 1.0),
        Sample(name, "_bucket", {"le": "+Inf"}, 3.0),
        Sample(name, "_count", {}, 3.0),
        Sample(name, "_sum", {}, 7.25),
    ]


class Triton:
    """Answers as tritonserver's metrics port does."""

    def __init__(self) -> None:
        self.status = 200
        self.num_asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_parts, self.pause_s = 1, 0.0  # of its page, and after each
        triton = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                triton.num_asked += 1
                triton.may_answer.wait(WAIT_S)
                with contextlib.suppress(ConnectionError):
                    self.send_response(triton.status)
                    self.end_headers()
                    for _ in range(triton.num_parts):
                        self.wfile.write(TRITON)
                        time.sleep(triton.pause_s)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/metrics"

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def triton() -> Iterator[Triton]:
    with contextlib.closing(Triton()) as triton:
        yield triton


@pytest.fixture
def page(tmp_path: Path, triton: Triton, monkeypatch: pytest.MonkeyPatch) -> Iterator[MergedPage]:
    monkeypatch.setattr(merged_page, "SCHEDULERS_S", WAIT_S)
    monkeypatch.setattr(merged_page, "TRITON_S", WAIT_S)
    with contextlib.closing(MergedPage(tmp_path, lambda: triton.url)) as page:
        yield page


@pytest.fixture
def add_scheduler(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Adds a scheduler to the repository: its name, and what it does when it is asked."""
    with contextlib.ExitStack() as stack:

        def add(name: str, read: Callable[[], list[Sample]]) -> None:
            (tmp_path / name / "1").mkdir(parents=True)
            server = serve_metrics(tmp_path / name / "1" / METRICS_SOCKET, read, log=pytest.fail)
            stack.enter_context(contextlib.closing(server))

        yield add


def samples_of(page: bytes) -> dict[tuple[str, str, str], float]:
    """Values by name, model and bound; asserts that each family is there once."""
    families = list(text_string_to_metric_families(page.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, sample.labels.get("model", ""), sample.labels.get("le", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_it_begins_with_tritons_own_part_and_without_schedulers_that_is_all(
    page: MergedPage,
) -> None:
    assert page.read() == TRITON


def test_the_histograms_of_all_schedulers_follow_each_family_once(
    page: MergedPage, add_scheduler: Callable[..., None]
) -> None:
    add_scheduler("one", lambda: samples(STEPS) + samples("unheard_of"))
    add_scheduler("two", lambda: samples(STEPS) + samples(PLANS))
    read = page.read()
    assert read.startswith(TRITON)
    found = samples_of(read)
    for model in ("one", "two"):
        assert found["charonia_scheduler_up", model, ""] == 1
        counts = [found[f"{STEPS}_bucket", model, bound] for bound in ("0.005", "0.01", "+Inf")]
        assert counts == [1, 1, 3]
        assert found[f"{STEPS}_count", model, ""] == 3
        assert found[f"{STEPS}_sum", model, ""] == 7.25
    assert f"# HELP {STEPS} {BY_NAME[STEPS].help}\n# TYPE {STEPS} histogram\n" in read.decode()
    assert (f"{PLANS}_count", "one", "") not in found
    assert f'{STEPS}_count{{model="one",version="1"}}' in read.decode()
    assert b"unheard_of" not in read


@pytest.mark.parametrize(
    "sample",
    [
        Sample("charonia_step_seconds", "_sum\n", {}, 1.0),
        Sample("charonia_step_seconds", "_bucket", {}, 1.0),
        Sample("charonia_step_seconds", "_bucket", {"": "0.5"}, 1.0),
        Sample("charonia_step_seconds", "_bucket", {"le": "0.123"}, 1.0),
        Sample("charonia_step_seconds", "_count", {"version": "9"}, 1.0),
        Sample("charonia_scheduler_up", "", {}, 0.0),
        Sample("charonia_generation_tokens_total", "", {}, 1.0),
        Sample("vllm:cache_config_info", "", {"block_size": "16"}, 1.0),
        Sample("vllm:cache_config_info", "_sum", {"block_size": "16", "num_gpu_blocks": "9"}, 1.0),
    ],
)
def test_what_no_scheduler_says_is_left_out(
    page: MergedPage, add_scheduler: Callable[..., None], sample: Sample
) -> None:
    add_scheduler("faulty", lambda: [sample, *samples(PLANS)])
    add_scheduler("well", lambda: samples(PLANS))
    faulty, well = (
        {key[0::2]: value for key, value in samples_of(page.read()).items() if key[1] == model}
        for model in ("faulty", "well")
    )
    assert faulty == well
    assert well[f"{PLANS}_count", ""] == 3


def test_what_a_metric_says_by_its_labels_is_said_of_each_scheduler_that_has_it(
    page: MergedPage, add_scheduler: Callable[..., None]
) -> None:
    labels = {"block_size": "16", "num_gpu_blocks": "99"}
    add_scheduler("one", lambda: [Sample("vllm:cache_config_info", "", labels, 1.0)])
    add_scheduler("two", list)
    read = page.read().decode()
    on_page = (
        'block_size="16",engine="0",model="one",model_name="one",num_gpu_blocks="99",version="1"'
    )
    assert f"vllm:cache_config_info{{{on_page}}} 1.0\n" in read
    assert read.count("vllm:cache_config_info{") == 1


def test_vllms_names_have_the_labels_by_which_vllms_dashboards_select(
    page: MergedPage, add_scheduler: Callable[..., None]
) -> None:
    ours, theirs = "charonia_inter_token_seconds", "vllm:inter_token_latency_seconds"
    add_scheduler("one", lambda: samples(ours) + samples(theirs))
    read = page.read().decode()
    assert f'{ours}_count{{model="one",version="1"}} 3.0\n' in read
    assert f'{theirs}_sum{{engine="0",model="one",model_name="one",version="1"}} 7.25\n' in read


def test_a_scheduler_is_asked_before_triton_whose_page_it_brings_up_to_date(
    page: MergedPage, add_scheduler: Callable[..., None], triton: Triton
) -> None:
    order: list[int] = []

    def read() -> list[Sample]:
        order.append(triton.num_asked)
        return []

    add_scheduler("scheduler", read)
    page.read()
    page.read()
    assert order == [0, 1]


def test_a_scheduler_that_does_not_answer_is_down_and_the_rest_is_there(
    page: MergedPage,
    add_scheduler: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = page_socket._ask

    def ask_and_let_answer(path: Path, stack: contextlib.ExitStack) -> Channel | None:
        channel = ask(path, stack)
        if channel is not None and "well" in path.parts:
            assert not wait_for(channel.is_quiet, lambda is_quiet: not is_quiet)
        return channel

    monkeypatch.setattr(merged_page, "SCHEDULERS_S", 0.3)
    monkeypatch.setattr(page_socket, "_ask", ask_and_let_answer)
    add_scheduler("well", lambda: samples(STEPS))
    (tmp_path / "hung" / "1").mkdir(parents=True)
    with listen(tmp_path / "hung" / "1" / METRICS_SOCKET):
        read = page.read()
    assert read.startswith(TRITON)
    found = samples_of(read)
    assert found["charonia_scheduler_up", "hung", ""] == 0
    assert found["charonia_scheduler_up", "well", ""] == 1
    assert ("charonia_step_seconds_count", "hung", "") not in found
    assert found["charonia_step_seconds_count", "well", ""] == 3


def test_without_triton_there_is_no_page(page: MergedPage, triton: Triton, tmp_path: Path) -> None:
    triton.status = 500
    with pytest.raises(NoPageError, match=r"cannot be read: .*500"):
        page.read()
    for url, reason in (
        (None, "tritonserver does not run"),
        ("http://127.0.0.1:1/metrics", "cannot be read: .*refused"),
        ("nonsense", "cannot be read"),
        ("http://[", "cannot be read"),
    ):
        with (
            contextlib.closing(MergedPage(tmp_path, lambda url=url: url)) as other,
            pytest.raises(NoPageError, match=reason),
        ):
            other.read()


def test_a_triton_that_is_silent_is_given_up(
    page: MergedPage, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_page, "SCHEDULERS_S", 0.1)
    monkeypatch.setattr(merged_page, "TRITON_S", 0.1)
    triton.may_answer.clear()
    try:
        with pytest.raises(NoPageError, match="cannot be read: timed out"):
            page.read()
    finally:
        triton.may_answer.set()


def test_a_triton_whose_page_comes_little_by_little_is_given_up(
    page: MergedPage, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_page, "SCHEDULERS_S", 0.1)
    monkeypatch.setattr(merged_page, "TRITON_S", 0.1)
    triton.num_parts, triton.pause_s = 100, 0.02
    with pytest.raises(NoPageError, match="cannot be read: it is not complete after"):
        page.read()
