"""What comes to the real engine from someone else than its scheduler."""

import contextlib
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from charonia.launch.server.tritonserver import TritonServer
from charonia.protocol import (
    Hello,
    NewRow,
    RowSampling,
    RowStep,
    StepFailure,
    StepPlan,
)
from charonia.serving.messages.executor import STEPS_SOCKET
from support.bystander import Bystander
from support.e2e import (
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    error_of,
    ids_of,
    request_inputs,
    stream_grpc,
    tensors,
    wait_idle,
)
from support.sockets import StepsClient

NAN = float("nan")
INF = float("inf")
VOCAB_SIZE = 384
MAX_ROW_BLOCKS = MAX_MODEL_LEN // 16


Ask = Callable[[Hello | StepPlan], Any]


@pytest.fixture
def engine_dir(server: TritonServer) -> Path:
    """Where the engine's socket is."""
    return server.runtime_dir / "repository" / "engine" / "1"


@pytest.fixture
def ask_engine(engine_dir: Path) -> Iterator[Ask]:
    """Sends a message beside the scheduler's own, and returns the engine's reply."""
    with contextlib.closing(StepsClient(engine_dir)) as client:
        yield client.ask


def row(**changes: Any) -> NewRow:
    """A row that could join."""
    values: dict[str, Any] = {
        "row": 3,
        "token_ids": [1, 2, 3],
        "num_prompt": 3,
        "num_computed": 0,
        "block_ids": [7],
        "sampling": RowSampling(seed=1),
    }
    return NewRow(**(values | changes))


def sampled(**values: Any) -> NewRow:
    return row(sampling=RowSampling(**({"seed": 1} | values)))


STEP = RowStep(3, 3)
OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"joins": [row(row=64)]}, "row 64"),
    ({"joins": [row(row=-1)]}, "row -1"),
    ({"joins": [row(row=2**40)]}, "row 1099511627776"),
    ({"joins": [row(), row()]}, "more than once"),
    ({"joins": [row(token_ids=[VOCAB_SIZE])]}, "384"),
    ({"joins": [row(token_ids=[-1, 2, 3])]}, "-1"),
    ({"joins": [row(token_ids=[2**62, 2, 3])]}, str(2**62)),
    ({"joins": [row(token_ids=[])]}, "number of token_ids is 0"),
    (
        {"joins": [row(token_ids=[1] * MAX_MODEL_LEN, num_prompt=MAX_MODEL_LEN)]},
        f"number of token_ids is {MAX_MODEL_LEN}",
    ),
    ({"joins": [row(num_prompt=4)]}, "num_prompt is 4"),
    ({"joins": [row(num_computed=3)]}, "num_computed is 3"),
    ({"joins": [row(num_computed=-1)]}, "num_computed is -1"),
    ({"joins": [row(block_ids=[0])]}, "block id is 0"),
    ({"joins": [row(block_ids=[NUM_BLOCKS + 1])]}, f"block id is {NUM_BLOCKS + 1}"),
    ({"joins": [row(block_ids=[-1])]}, "block id is -1"),
    ({"joins": [row(block_ids=[7, 7])]}, "more than once"),
    (
        {"joins": [row(block_ids=list(range(1, MAX_ROW_BLOCKS + 2)))]},
        f"number of blocks is {MAX_ROW_BLOCKS + 1}",
    ),
    ({"joins": [row()], "rows": [RowStep(3, 4)]}, "num_tokens is 4"),
    ({"joins": [row()], "rows": [RowStep(3, 0)]}, "num_tokens is 0"),
    ({"joins": [row()], "rows": [RowStep(3, -5)]}, "num_tokens is -5"),
    ({"joins": [row()], "rows": [RowStep(3, 3, [99999])]}, "block id is 99999"),
    ({"joins": [row()], "rows": [STEP, STEP]}, "more than once"),
    ({"joins": [row(block_ids=[])], "rows": [STEP]}, "0 blocks do not hold 3 tokens"),
    ({"rows": [STEP]}, "row 3 cannot compute"),
    ({"leaves": [3]}, "row 3 cannot leave"),
    ({"joins": [sampled(seed=-1)]}, "seed is -1"),
    ({"joins": [sampled(temperature=NAN)]}, "temperature is nan"),
    ({"joins": [sampled(temperature=-1.0)]}, "temperature is -1"),
    ({"joins": [sampled(top_p=0.0)]}, "top_p 0"),
    ({"joins": [sampled(top_k=-1)]}, "top_k -1"),
    ({"joins": [sampled(logit_bias={VOCAB_SIZE: 1.0})]}, "384"),
    ({"joins": [sampled(logit_bias={1: INF})]}, "inf"),
    ({"joins": [sampled(stop_ids=[VOCAB_SIZE])]}, "384"),
    ({"joins": [sampled(bad_words_ids=[[-1]])]}, "-1"),
    ({"joins": [sampled(bad_words_ids=[[]])]}, "empty"),
    ({"joins": [sampled(num_logprobs=21)]}, "num_logprobs is 21"),
]


def test_strangers_neither_reach_nor_disturb_the_engine(
    server: TritonServer, engine_dir: Path
) -> None:
    """Big messages and small ones, from four clients, one after the other without a pause."""
    assert stat.S_IMODE((engine_dir / STEPS_SOCKET).stat().st_mode) == 0o600
    before = wait_idle(server)
    (process,) = server.model_processes("engine")
    resident = process.memory_info().rss
    sampling = {"max_tokens": 1500, "temperature": 1.5, "seed": 12, "ignore_eos": True}
    inputs = request_inputs([5, 6, 7], sampling, stream=True, return_token_ids=True)
    undisturbed = ids_of(stream_grpc(server, inputs))
    is_over = threading.Event()
    refusals: set[str] = set()

    def flood(size: int) -> None:
        question = tensors({"question": np.zeros(size, dtype=bool)})
        with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
            while not is_over.is_set():
                refusals.add(str(error_of(lambda: client.infer("engine", question)).message()))

    with ThreadPoolExecutor(4) as threads:
        floods = threads.map(flood, [6_000_000, 6_000_000, 1, 1])
        try:
            assert ids_of(stream_grpc(server, inputs)) == undisturbed
        finally:
            is_over.set()
        list(floods)
    assert refusals
    assert all("unexpected shape for input 'question'" in text for text in refusals), refusals
    assert process.memory_info().rss - resident < 64 * 2**20
    after = wait_idle(server)
    changed = {
        name: count
        for name, count in after.items()
        if name.startswith(("charonia_engine_failures", "charonia_engine_restarts"))
        and count != before.get(name, 0)
    }
    assert not changed
    assert server.model_processes("engine") == [process]


def test_the_engine_refuses_every_plan_that_is_out_of_range_and_goes_on(
    server: TritonServer, ask_engine: Ask
) -> None:
    def refusal(plan: StepPlan) -> str:
        reply = ask_engine(plan)
        assert isinstance(reply, StepFailure), reply
        return reply.message

    wait_idle(server)
    before = ask_engine(Hello()).epoch
    out_of_sequence = [
        (StepPlan(epoch=before, step_id=0, reset=True), "epoch of a reset"),
        (StepPlan(epoch=before + 1, step_id=4, reset=True), "step_id 4 with reset"),
        (StepPlan(epoch=before, step_id=0), "out of sequence"),
        (StepPlan(epoch=before + 1, step_id=1), "out of sequence"),
    ]
    with Bystander(server, seed=10) as bystander:
        for values, says in OUT_OF_RANGE:
            assert says in refusal(StepPlan(epoch=before + 1, step_id=0, reset=True, **values))
        for plan, says in out_of_sequence:
            assert says in refusal(plan)
        bystander.wait_tokens(20)
    assert ask_engine(Hello()).epoch == before, "a refused plan changed the engine"
    assert bystander.token_ids == bystander.undisturbed()


def test_the_scheduler_keeps_its_engine_when_another_plan_came_between(
    server: TritonServer, ask_engine: Ask
) -> None:
    """Another process of this user resets it: the next plan is refused, a new epoch opens."""
    restarts = wait_idle(server)["charonia_engine_restarts_total"]
    pids = server.pids("engine")
    with Bystander(server, seed=11) as bystander:
        ask_engine(StepPlan(epoch=ask_engine(Hello()).epoch + 1, step_id=0, reset=True))
        bystander.wait_tokens(50)
    assert server.pids("engine") == pids
    assert wait_idle(server)["charonia_engine_restarts_total"] == restarts
    assert bystander.token_ids == bystander.undisturbed()
