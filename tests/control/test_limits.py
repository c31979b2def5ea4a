"""What a request and a step stay within."""

import msgspec
import pytest

from charonia.control import Limits
from charonia.errors import ConfigError, InvalidRequestError
from support.echo import EchoExecutor
from support.scheduling import make_request, make_scheduler


def test_the_pool_bounds_the_length_of_a_request():
    info = EchoExecutor(num_blocks=5, block_size=16, max_model_len=4096).info()
    assert Limits.of_engine(info).max_model_len == 64


@pytest.mark.parametrize("num_tokens", [0, 64, 65])
def test_a_prompt_that_can_never_be_served_is_refused(num_tokens):
    with pytest.raises(InvalidRequestError, match=r"empty|at most 63"):
        make_scheduler().add(make_request("a", num_tokens))


def test_without_chunking_the_budget_must_hold_the_longest_prompt():
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 32"):
        make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=32)


def test_a_record_from_before_they_had_what_follows_from_others_is_read():
    limits = Limits(17, 4, 64, 2, 6, async_scheduling=True)
    recorded = msgspec.to_builtins(limits)
    del recorded["overlaps"], recorded["max_steps_in_flight"]
    read = msgspec.convert(recorded, Limits)
    assert read == limits
    assert (read.overlaps, read.max_steps_in_flight) == (True, 2)
