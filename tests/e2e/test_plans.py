"""Plans that come from someone else than the scheduler, with its secret, to the real engine."""

import contextlib
import stat
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from charonia.launch.server import TritonServer
from charonia.protocol import (
    EngineInfo,
    Hello,
    NewRow,
    RowSampling,
    RowStep,
    StepFailure,
    StepPlan,
    decode_reply,
    encode,
)
from support.bystander import Bystander
from support.e2e import tensors, wait_idle

NAN = float("nan")
INF = float("inf")
VOCAB_SIZE = 384


@pytest.fixture
def secret(server: TritonServer) -> str:
    """What the scheduler sends plans with."""
    path = server.runtime_dir / "repository" / "engine" / "1" / "plan.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text(encoding="ascii")


def ask_engine(server: TritonServer, message: Hello | StepPlan) -> Any:
    """What the engine replies; raises its error."""
    plan = np.frombuffer(encode(message), dtype=np.uint8)
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        reply = client.infer("engine", tensors({"plan": plan})).as_numpy("reply")
    return decode_reply(reply.tobytes())


def refusal(server: TritonServer, plan: StepPlan) -> str:
    """Why the engine refuses a plan: an error, or a step that failed."""
    try:
        reply = ask_engine(server, plan)
    except InferenceServerException as error:
        return error.message()
    assert isinstance(reply, StepFailure), reply
    return reply.message


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


def test_the_engine_refuses_every_plan_that_is_out_of_range_and_goes_on(
    server: TritonServer, secret: str
) -> None:
    def epoch() -> int:
        info = ask_engine(server, Hello(secret=secret))
        assert isinstance(info, EngineInfo)
        return info.epoch

    wait_idle(server)
    before = epoch()
    out_of_sequence = [
        (StepPlan(epoch=before, step_id=0, reset=True, secret=secret), "epoch of a reset"),
        (StepPlan(epoch=before + 1, step_id=4, reset=True, secret=secret), "step_id 4 with reset"),
        (StepPlan(epoch=before, step_id=0, secret=secret), "out of sequence"),
        (StepPlan(epoch=before + 1, step_id=1, secret=secret), "out of sequence"),
    ]
    with Bystander(server, seed=10) as bystander:
        for values, says in OUT_OF_RANGE:
            plan = StepPlan(epoch=before + 1, step_id=0, reset=True, secret=secret, **values)
            assert says in refusal(server, plan)
        for plan, says in out_of_sequence:
            assert says in refusal(server, plan)
        bystander.wait_tokens(20)
    assert epoch() == before, "a refused plan changed the engine"
    assert bystander.token_ids == bystander.undisturbed()


def test_the_scheduler_keeps_its_engine_when_another_plan_came_between(
    server: TritonServer, secret: str
) -> None:
    """Somebody with the secret resets the engine: the next plan is refused, a new epoch opens."""
    restarts = wait_idle(server)["charonia_engine_restarts_total"]
    pids = server.pids("engine")
    with Bystander(server, seed=11) as bystander:
        epoch = ask_engine(server, Hello(secret=secret)).epoch
        ask_engine(server, StepPlan(epoch=epoch + 1, step_id=0, reset=True, secret=secret))
        bystander.wait_tokens(50)
    assert server.pids("engine") == pids
    assert wait_idle(server)["charonia_engine_restarts_total"] == restarts
    assert bystander.token_ids == bystander.undisturbed()
