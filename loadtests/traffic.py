"""Recorded traffic as a benchmark asks for it: lengths of prompts and answers, in their order.

Owns which requests of a trace are asked for, and which are left out. Must not know rounds or sides.
"""

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.errors import ConfigError
from charonia.traces import read_requests


class TrafficError(Exception):
    """A trace cannot be asked for; the text names the option that would change that."""


@dataclass(frozen=True)
class Traffic:
    """The requests of one trace that are short enough.

    Attributes:
        name: of the file, without its endings.
        lengths: tokens of each prompt and of its answer, in the order in which they came.
        most_tokens: of prompt and answer together; longer requests are left out.
        share_left_out: of the requests that have an answer.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    most_tokens: int
    share_left_out: float

    def stretch(self, count: int, shuffler: random.Random) -> tuple[tuple[int, int], ...]:
        """Return `count` consecutive requests, from a place that is drawn."""
        start = shuffler.randrange(len(self.lengths) - count + 1)
        return self.lengths[start : start + count]

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        prompts, answers = zip(*self.lengths, strict=True)
        return {
            "name": self.name,
            "num_requests": len(self.lengths),
            "most_tokens": self.most_tokens,
            "share_left_out": self.share_left_out,
            "mean_prompt_tokens": statistics.mean(prompts),
            "mean_new_tokens": statistics.mean(answers),
        }


def read_traffic(folder: Path, name: str, *, most_tokens: int, num_requests: int) -> Traffic:
    """Read one file of the folder. Requests without an answer were refused and do not count.

    Args:
        most_tokens: of prompt and answer together. num_requests: that are asked for at once.

    Raises:
        TrafficError: there is no such file, it is no trace, or has too few such requests.
    """
    path = folder / name
    if not path.is_file():
        raise TrafficError(f"--traces: there is no {name} in {folder}")
    try:
        requests = read_requests(path)
    except ConfigError as error:
        raise TrafficError(f"--trace-files: {error}") from None
    answered = [(one.input_length, one.output_length) for one in requests if one.output_length]
    lengths = tuple(both for both in answered if sum(both) <= most_tokens)
    if len(lengths) < num_requests:
        raise TrafficError(
            f"--trace-tokens: {name} has {len(lengths)} requests of at most {most_tokens} tokens; "
            f"--trace-requests asks for {num_requests} at once"
        )
    left_out = 1 - len(lengths) / len(answered)
    return Traffic(name.split(".")[0], lengths, most_tokens, left_out)
