"""Plans that come from someone else than the scheduler, with its secret, to the real engine."""

import contextlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from charonia.launch.server import TritonServer
from charonia.protocol import (
    Hello,
    NewRow,
    RowSampling,
    RowStep,
    StepFailure,
    StepPlan,
    encode,
)
from charonia.serving.engine_host import NOT_THE_SCHEDULER
from charonia.serving.secret import FILE_NAME
from support.bystander import Bystander
from support.e2e import tensors, wait_idle
from support.sockets import StepsClient

NAN = float("nan")
INF = float("inf")
VOCAB_SIZE = 384


Ask = Callable[[Hello | StepPlan], Any]


@pytest.fixture
def engine_dir(server: TritonServer) -> Path:
    """Where the engine's secret and socket are."""
    return server.runtime_dir / "repository" / "engine" / "1"


@pytest.fixture
def secret(engine_dir: Path) -> str:
    """What the scheduler sends plans with."""
    path = engine_dir / FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text(encoding="ascii")


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
    ({"joins": [row(token_ids=[1] * 4096, num_prompt=4096)]}, "4096"),
    ({"joins": [row(num_prompt=4)]}, "num_prompt is 4"),
    ({"joins": [row(num_computed=3)]}, "num_computed is 3"),
    ({"joins": [row(num_computed=-1)]}, "num_computed is -1"),
    ({"joins": [row(block_ids=[0])]}, "block id is 0"),
    ({"joins": [row(block_ids=[2049])]}, "block id is 2049"),
    ({"joins": [row(block_ids=[-1])]}, "block id is -1"),
    ({"joins": [row(block_ids=[7, 7])]}, "more than once"),
    ({"joins": [row(block_ids=list(range(1, 300)))]}, "number of blocks is 299"),
    ({"joins": [row()], "rows": [RowStep(3, 4)]}, "num_tokens is 4"),
    ({"joins": [row()], "rows": [RowStep(3, 0)]}, "num_tokens is 0"),
    ({"joins": [row()], "rows": [RowStep(3, -5)]}, "num_tokens is -5"),
    ({"joins": [row()], "rows": [RowStep(3, 3, [9999])]}, "block id is 9999"),
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


def test_triton_hands_no_plan_to_the_engine(server: TritonServer, secret: str) -> None:
    plan = np.frombuffer(encode(StepPlan(epoch=1, step_id=0, secret=secret)), dtype=np.uint8)
    with (
        contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client,
        pytest.raises(InferenceServerException, match=NOT_THE_SCHEDULER),
    ):
        client.infer("engine", tensors({"plan": plan}))


def test_the_engine_refuses_every_plan_that_is_out_of_range_and_goes_on(
    server: TritonServer, ask_engine: Ask
) -> None:
    def refusal(plan: StepPlan) -> str:
        reply = ask_engine(plan)
        assert isinstance(reply, StepFailure), reply
        return reply.message

    wait_idle(server)
    before = ask_engine(Hello(secret="")).epoch
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
    assert ask_engine(Hello(secret="")).epoch == before, "a refused plan changed the engine"
    assert bystander.token_ids == bystander.undisturbed()


def test_the_scheduler_keeps_its_engine_when_another_plan_came_between(
    server: TritonServer, ask_engine: Ask
) -> None:
    """Somebody with the secret resets the engine: the next plan is refused, a new epoch opens."""
    restarts = wait_idle(server)["charonia_engine_restarts_total"]
    pids = server.pids("engine")
    with Bystander(server, seed=11) as bystander:
        ask_engine(StepPlan(epoch=ask_engine(Hello(secret="")).epoch + 1, step_id=0, reset=True))
        bystander.wait_tokens(50)
    assert server.pids("engine") == pids
    assert wait_idle(server)["charonia_engine_restarts_total"] == restarts
    assert bystander.token_ids == bystander.undisturbed()
