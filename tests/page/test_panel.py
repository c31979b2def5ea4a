"""The panel's figures of first tokens, drafts and restarts, of a server that has all of them."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS_BLOCKS, ONE_THREAD, one_torch_thread
from support.gateway import Gateway, running_gateway
from support.observed import kill_engine
from support.page import Visit
from support.waiting import WAIT_S

pytestmark = pytest.mark.page

NONE = "\N{EN DASH}"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[TritonServer]:
    """A server that drafts, and whose engine may be killed."""
    settings = (ONE_THREAD, ENDLESS_BLOCKS, f"speculative_config={json.dumps(DRAFTS)}")
    with one_torch_thread(), running_server(model=model, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: TritonServer, chatting: Path) -> Iterator[Gateway]:
    with running_gateway([server.grpc_url], chatting, "--served-model-name", "small") as gateway:
        yield gateway


def figure(visit: Visit, label: str) -> Locator:
    """The value that the panel has under a label."""
    term = visit.page.locator("dt", has_text=re.compile(rf"^{re.escape(label)}$"))
    return visit.page.locator("#server dl > div", has=term).locator("dd")


def wait_shown(visit: Visit, label: str, is_good: Callable[[str], bool]) -> None:
    """Until the value under a label is good; the panel asks once a second."""
    deadline = time.monotonic() + WAIT_S
    while not is_good(text := figure(visit, label).inner_text()):
        assert time.monotonic() < deadline, (label, text)
        visit.page.wait_for_timeout(100)


def seconds(text: str) -> float:
    """A time as the page writes it, such as `1 min 3 s` or `12 ms`; NaN if it is none."""
    parts = re.findall(r"([\d.]+) (min|ms|s|h)\b", text)
    return sum(float(number) * SECONDS[unit] for number, unit in parts) if parts else math.nan


def percents(text: str) -> float:
    """A share as the page writes it; NaN if it is none."""
    number, _, unit = text.partition(" ")
    return float(number) if unit == "%" else math.nan


def stream(gateway: Gateway, prompt: list[int], **more: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "stream": True, **more}
    assert gateway.http.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")


def test_the_panel_shows_first_tokens_drafts_and_the_last_restart(
    visit: Visit, server: TritonServer, gateway: Gateway
) -> None:
    expect(figure(visit, "Restarts")).to_have_text("none", timeout=WAIT_S * 1000)
    for label in ("p50", "p99", "Drafts accepted"):
        expect(figure(visit, label)).to_have_text(NONE)

    stream(gateway, [5, 6, 7], temperature=1, seed=3, logit_bias={"9": 100, "10": 100})
    stream(gateway, [5, 6, 7], temperature=0, logit_bias={"9": 100})
    stream(gateway, list(range(5, 305)) * 40)  # its first token takes longer
    found = gateway.http.get("/v1/metrics").json()
    ttft, rate = found["ttft_ms"], found["acceptance_rate"]
    assert ttft["p99"] > 1.5 * ttft["p50"]
    assert 0.01 < rate < 0.99
    p50, p99 = (pytest.approx(ttft[name] / 1000, rel=0.06) for name in ("p50", "p99"))
    wait_shown(visit, "p99", lambda text: seconds(text) == p99)
    # Both are drawn at once. Before the last stream p99 was what p50 is now.
    assert seconds(figure(visit, "p50").inner_text()) == p50
    wait_shown(
        visit,
        "Drafts accepted",
        lambda text: percents(text) == pytest.approx(100 * rate, abs=0.51),
    )

    killed_at = time.monotonic()
    kill_engine(server)
    wait_shown(visit, "Restarts", lambda text: text.startswith("1, last ") and text.endswith("ago"))
    assert seconds(figure(visit, "Restarts").inner_text()) <= time.monotonic() - killed_at
