"""Eight streams at once over every way in, as tests need them that break something meanwhile.

Owns their prompts and sampling, what a complete one is, and how they come to their ends. Must not
know what is broken.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.faults import paced
from support.live_stream import LiveStream

NUM_TOKENS = 1500
VOCAB_SIZE = 384
POISON = VOCAB_SIZE - 1
"""A token id that is in no prompt."""
_draw = random.Random(2)
PROMPTS = [
    [_draw.randrange(1, POISON) for _ in range(length)] for length in (1, 2, 5, 15, 16, 33, 60, 100)
]
WAYS_IN = [*[("grpc", "scheduler")] * 4, *[("grpc", "llm")] * 2, *[("http", "scheduler")] * 2]


def start_streams(urls: dict[str, str], **options: Any) -> list[LiveStream]:
    """One stream per prompt, all under way: tokens came of each, and many are to come.

    Half of them are greedy and half sample with a seed; `options` change their sampling.
    """
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | options
    streams = [
        LiveStream(
            urls[protocol],
            prompt,
            protocol=protocol,
            model=model,
            temperature=0.8 * (index % 2),
            seed=index,
            **sampling,
        )
        for index, (prompt, (protocol, model)) in enumerate(zip(PROMPTS, WAYS_IN, strict=True))
    ]
    for stream in streams:
        stream.wait_tokens(3)
    ended = [stream.error or stream.finish_reason for stream in streams if stream.is_over]
    assert not ended, ended
    return streams


def check_complete(stream: LiveStream, token_ids: list[int]) -> None:
    """Assert that a stream ended as it should, with these tokens."""
    stream.wait_over()
    assert stream.error is None, stream.error
    assert stream.finish_reason == "length"
    assert stream.token_ids == token_ids
    assert stream.num_empty == 0


def finish(repository: Path, streams: Iterable[LiveStream]) -> list[list[int]]:
    """Have streams go on as fast as a faulty engine can, and end as they should; their tokens."""
    streams = list(streams)
    with paced(repository, 0):
        for stream in streams:
            check_complete(stream, stream.token_ids)
    return [stream.token_ids for stream in streams]
