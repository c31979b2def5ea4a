"""What a response carries: the value of each output, made only where it was asked for.

Owns the outputs' values; which outputs there are says `interface`. Must not know senders or
threads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from charonia.engine.outputs import Chunk, name_logprobs
from charonia.protocol import TokenLogprobs
from charonia.serving.interface import OUTPUTS, REQUEST_KEY
from charonia.serving.schema import OutputOptions
from charonia.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """A chunk as its client sees it: one property for each output of the interface.

    A list is a tensor of its elements, anything else a tensor of one element, and None no tensor
    at all in this response.

    Attributes:
        chunk: without an error, but that it was cancelled.
        echo: comes in front of the text, as only a whole answer has it.
    """

    chunk: Chunk
    echo: str
    tokenizer: Tokenizer

    @property
    def text_output(self) -> str:
        return self.echo + self.chunk.text

    @property
    def finish_reason(self) -> str:
        if self.chunk.error is not None:
            return "cancelled"
        return self.chunk.finish_reason or "None"

    @property
    def cumulative_logprob(self) -> float | None:
        return self.chunk.cumulative_logprob

    @property
    def logprobs(self) -> str:
        return self._named(self.chunk.logprobs)

    @property
    def prompt_logprobs(self) -> str | None:
        entries = self.chunk.prompt_logprobs
        return None if entries is None else self._named(entries)

    @property
    def num_input_tokens(self) -> int | None:
        return self.chunk.num_prompt_tokens or None  # cancelled before they were counted

    @property
    def num_output_tokens(self) -> int:
        return len(self.chunk.token_ids)

    @property
    def output_ids(self) -> list[int]:
        return list(self.chunk.token_ids)

    @property
    def timing(self) -> str | None:
        return None if self.chunk.timing is None else json.dumps(self.chunk.timing)

    def _named(self, entries: Sequence[TokenLogprobs | None] | None) -> str:
        """JSON: an object per position, `null` for one that nothing predicts; `null` for none."""
        if entries is None:
            return "null"
        named = [entry and name_logprobs(entry, self.tokenizer) for entry in entries]
        return msgspec.json.encode(named).decode()


def chunk_outputs(
    answer: Answer, options: OutputOptions, request_key: str = ""
) -> dict[str, list[Any]]:
    """The outputs of one response.

    Args:
        request_key: for who reports the response, where one does.
    """
    names = [one.name for one in OUTPUTS if one.name in options.names]
    values = {name: getattr(answer, name) for name in names}
    outputs = {
        name: value if isinstance(value, list) else [value]
        for name, value in values.items()
        if value is not None
    }
    if options.has_key:
        outputs[REQUEST_KEY] = [request_key]
    return outputs
