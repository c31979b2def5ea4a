"""The outputs of a response; each is made only if it was asked for.

Owns the values of outputs; `interface` has the list of outputs. Must not know senders or threads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from charonia.core.output.outputs import Chunk, name_logprobs
from charonia.protocol import TokenLogprobs
from charonia.serving.conventions.interface import OUTPUTS, REQUEST_KEY
from charonia.serving.conventions.schema import OutputOptions
from charonia.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """The new output of a request, with a property for each output of the interface.

    A list becomes a tensor of its elements, any other value a tensor of one element, and None no
    tensor in this response.

    Attributes:
        samples: a chunk of each sample, in order; an empty one if the sample has no new output. The
            only possible error is a cancellation.
        echo: put in front of each text; empty in streams.
    """

    samples: Sequence[Chunk]
    echo: str
    tokenizer: Tokenizer

    @property
    def text_output(self) -> list[str]:
        return [self.echo + chunk.text for chunk in self.samples]

    @property
    def finish_reason(self) -> list[str]:
        return [
            chunk.finish_reason or ("None" if chunk.error is None else "cancelled")
            for chunk in self.samples
        ]

    @property
    def cumulative_logprob(self) -> list[float] | None:
        found = [chunk.cumulative_logprob for chunk in self.samples]
        if all(value is None for value in found):
            return None
        return [0.0 if value is None else value for value in found]  # a sample without tokens

    @property
    def logprobs(self) -> list[str]:
        return [self._named(chunk.logprobs) for chunk in self.samples]

    @property
    def prompt_logprobs(self) -> str | None:
        entries = self.samples[0].prompt_logprobs
        return None if entries is None else self._named(entries)

    @property
    def num_input_tokens(self) -> int | None:
        # A sample may have no token yet; all may be cancelled before the prompt is counted.
        return max(chunk.num_prompt_tokens for chunk in self.samples) or None

    @property
    def num_output_tokens(self) -> list[int]:
        return [len(chunk.token_ids) for chunk in self.samples]

    @property
    def output_ids(self) -> list[int]:
        return [token_id for chunk in self.samples for token_id in chunk.token_ids]

    @property
    def timing(self) -> str | None:
        timing = next((chunk.timing for chunk in self.samples if chunk.timing is not None), None)
        return None if timing is None else json.dumps(timing)

    def _named(self, entries: Sequence[TokenLogprobs | None] | None) -> str:
        """JSON: an object per position, or `null` for the first of a prompt; `null` without any."""
        if entries is None:
            return "null"
        named = [entry and name_logprobs(entry, self.tokenizer) for entry in entries]
        return msgspec.json.encode(named).decode()


def chunk_outputs(
    answer: Answer, options: OutputOptions, request_key: str = ""
) -> dict[str, list[Any]]:
    """The outputs of one response.

    Args:
        request_key: `Session.chunk_key`, for the model that reports the response, if any does.
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
