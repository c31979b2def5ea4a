"""What the engine's process and its ranks say to each other arrives as it was meant."""

from dataclasses import fields
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from charonia.config import EngineArgs, SpeculativeConfig
from charonia.data.ops.base import StepBatch
from charonia.parallel.messages import (
    BEAT,
    Allocate,
    Allocated,
    Form,
    Join,
    Lines,
    Loaded,
    Measure,
    Message,
    Move,
    Moved,
    Prepared,
    Ready,
    Refusal,
    Setup,
    batch_of,
    decode,
    encode,
    forward_of,
)
from charonia.protocol import BlockLoad, BlockSave

COUNT = st.integers(0, 2**62)
PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
DIGESTS = st.dictionaries(st.text(), st.text())
CONFIGS = st.builds(
    SpeculativeConfig,
    model=PATHS,
    quantization=st.sampled_from(["auto", "int8", "w8a8", None]),
    draft_tensor_parallel_size=st.integers(1, 2),
)
ARGS = st.builds(
    EngineArgs,
    model=PATHS,
    dtype=st.sampled_from(["auto", "bfloat16"]),
    tensor_parallel_size=st.integers(2, 8),
    rank_timeout_s=st.floats(2, 100),
    speculative_config=st.none() | CONFIGS,
)
MESSAGES = st.one_of(
    st.builds(Join, st.text(), COUNT, st.text(), st.none() | COUNT),
    st.builds(Setup, COUNT, ARGS, COUNT, COUNT),
    st.builds(Prepared, st.text(), st.booleans(), st.dictionaries(st.text(), DIGESTS)),
    st.builds(Form, st.lists(st.none() | st.text())),
    st.just(Loaded()),
    st.just(Measure()),
    st.builds(Ready, COUNT, COUNT),
    st.builds(Refusal, st.text(), st.text()),
    st.builds(Allocate, COUNT, COUNT),
    st.just(Allocated()),
    st.builds(Lines, st.text(), COUNT, COUNT),
    st.builds(
        Move,
        st.lists(st.builds(BlockSave, COUNT, COUNT, COUNT, st.binary(), st.booleans())),
        st.lists(st.builds(BlockLoad, COUNT, COUNT, COUNT, st.binary())),
        st.lists(COUNT),
        st.booleans(),
    ),
    st.builds(Moved, st.lists(COUNT), st.lists(COUNT)),
)


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    num_tokens, num_blocks = sum(lengths), draw(st.integers(1, 4))

    def numbers(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        values = draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count))
        return torch.tensor(values).view(shape)

    return StepBatch(
        token_ids=numbers(num_tokens),
        positions=numbers(num_tokens),
        slots=numbers(num_tokens),
        query_starts=[sum(lengths[:row]) for row in range(len(lengths) + 1)],
        context_lens=draw(st.lists(COUNT, min_size=len(lengths), max_size=len(lengths))),
        block_tables=numbers(len(lengths), num_blocks),
        block_size=draw(st.integers(1, 256)),
    )


@given(MESSAGES)
def test_a_message_arrives_as_it_was_sent_and_is_no_beat(message: Message) -> None:
    data = encode(message)
    assert data != BEAT
    assert decode(data) == message


@given(batches(), st.text(), st.lists(st.integers(0, 1000)))
def test_a_pass_arrives_as_it_was_sent(batch: StepBatch, model: str, lines: list[int]) -> None:
    message = decode(encode(forward_of(model, batch, lines)))
    assert (message.model, message.lines) == (model, lines)  # type: ignore[union-attr]
    assert equal(batch_of(message, torch.device("cpu")), batch)  # type: ignore[arg-type]


def test_a_pass_may_be_cut_out_of_larger_tensors() -> None:
    """The engine's tables are views of what it has for all rows."""
    table = torch.arange(60).view(6, 10)
    batch = StepBatch(
        token_ids=table[0, ::2],
        positions=table[1, :5],
        slots=table[2, 5:],
        query_starts=[0, 2, 5],
        context_lens=[2, 9],
        block_tables=table[4:, 1:4],
        block_size=16,
    )
    assert equal(batch_of(forward_of("target", batch, [1, 4]), torch.device("cpu")), batch)


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x80", b"GET / HTTP/1.1\r\n\r\n", encode(Ready(1, 64))[:-1]], ids=repr
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)


def equal(one: StepBatch, other: StepBatch) -> bool:
    def values(batch: StepBatch) -> list[Any]:
        found = (getattr(batch, field.name) for field in fields(batch))
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in found]

    return values(one) == values(other)


def test_arguments_that_no_engine_takes_are_no_message() -> None:
    data = encode(Setup(1, EngineArgs(model="a-model"), 0, 1))
    with pytest.raises(msgspec.DecodeError, match="model has a character that no path can have"):
        decode(data.replace(b"a-model", b"a\0model"))
