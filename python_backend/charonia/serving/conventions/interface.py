"""The tensors of the models in one table: name, type, dimensions and meaning.

All other lists of them are made from this one. `make interface` writes the tensors of the
config.pbtxt files and the tables of model_repository/README.md
(`launch/commands/interface_files.py`), `raw_request` takes the types from here, `schema` the flags,
and tests hold the client against it. Must not know values.

To add an output, add a line to `OUTPUTS` and a property of its name to `responses.Answer`, and run
`make interface`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Datatype = Literal["BOOL", "FP16", "FP32", "INT32", "STRING", "UINT8", "UINT32", "UINT64"]
ONE = (1,)
ANY = (-1,)

INPUT_IDS = "input_ids"
DRAFT_IDS = "draft_input_ids"
CANCEL_SAMPLES = "cancel_samples"
REQUEST_KEY = "request_key"
SAMPLING_PARAMETERS = "sampling_parameters"
PROMPT_TEXT = "prompt_text"

CHUNK_PREFIX = "chunk_"
"""An output `x` of `scheduler` is the input `chunk_x` of `postprocessor`."""


@dataclass(frozen=True)
class Tensor:
    """An input or output.

    Attributes:
        dims: -1 is any size. meaning: description in Markdown.
    """

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    meaning: str = ""


@dataclass(frozen=True)
class Output(Tensor):
    """An output that a client can get.

    Attributes:
        flag: the input that asks for it; None if it is always sent or a parameter asks for it.
    """

    flag: str | None = None


@dataclass(frozen=True)
class ModelTensors:
    """The inputs and outputs of one model. All inputs are optional to Triton."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


OUTPUTS = (
    Output(
        "text_output",
        "STRING",
        ANY,
        "the text of each of the `n` samples, in order; in a stream the new text, maybe empty"
        " if `n` is above 1",
    ),
    Output(
        "finish_reason",
        "STRING",
        ANY,
        'for each sample: "None" until its end, then "stop", "length" or "cancelled"',
        "return_finish_reason",
    ),
    Output(
        "cumulative_logprob",
        "FP32",
        ANY,
        "for each sample: sum over all its tokens so far",
        "return_cumulative_logprob",
    ),
    Output(
        "logprobs",
        "STRING",
        ANY,
        "for each sample, JSON: for each new token"
        ' `{"<id>": {"logprob": x, "rank": r, "decoded_token": s}, …}`,'
        " the sampled one first; `x` is `null` if it is not a finite number; `null` if"
        " sampling did not ask for them",
        "return_logprobs",
    ),
    Output(
        "prompt_logprobs",
        "STRING",
        ONE,
        "JSON like `logprobs`, for the tokens of the prompt, `null` for the first; in the first"
        " response, if the sampling parameter of this name asks for them",
    ),
    Output("num_input_tokens", "UINT32", ONE, "tokens of the prompt", "return_num_input_tokens"),
    Output(
        "num_output_tokens",
        "UINT32",
        ANY,
        "tokens of each sample in this response",
        "return_num_output_tokens",
    ),
    Output(
        "output_ids",
        "INT32",
        ANY,
        "the new tokens of all samples, one sample after the other;"
        " `num_output_tokens` has their numbers",
        "return_token_ids",
    ),
    Output(
        "timing",
        "STRING",
        ONE,
        "JSON, in the last response: where its time went, numbers of tokens, what the engine did"
        " for it, use of drafts, whether the answer was cached, see [timing](#timing)",
        "return_timing",
    ),
)
FLAGS: Mapping[str, str] = {one.flag: one.name for one in OUTPUTS if one.flag is not None}
"""Flags (inputs that ask for an output), each with its output."""

INPUTS = (
    Tensor(
        "text_input",
        "STRING",
        ONE,
        "the prompt, at most 16 MiB and at most `max_model_len` tokens, see below",
    ),
    Tensor(INPUT_IDS, "INT32", ANY, "the prompt as token ids, instead of `text_input`"),
    Tensor(
        DRAFT_IDS,
        "INT32",
        ANY,
        "a guess at the first tokens of the answer, which the model verifies: right tokens cost"
        " less, and no token changes. Needs `speculative_config`",
    ),
    Tensor(
        "stream",
        "BOOL",
        ONE,
        "one response per new text; by default one response in all. Not on `generate`",
    ),
    Tensor(SAMPLING_PARAMETERS, "STRING", ONE, "a JSON object, at most 1 MiB"),
    Tensor(
        "exclude_input_in_output",
        "BOOL",
        ONE,
        "by default the prompt is prepended, but never in a stream, where `false` is an error",
    ),
    *(Tensor(flag, "BOOL", ONE, f"adds the output `{name}`") for flag, name in FLAGS.items()),
    Tensor(
        "return_cancelled_output",
        "BOOL",
        ONE,
        "without a stream, a cancelled request returns its output so far, with `finish_reason`"
        ' "cancelled", instead of an error; no effect on streams',
    ),
    Tensor(
        "cancel",
        "BOOL",
        ONE,
        "cancels the live requests of this request id and `tenant`; no other input is needed",
    ),
    Tensor(
        CANCEL_SAMPLES,
        "INT32",
        ANY,
        "with `cancel`: cancel only these of the `n` samples, by index from 0",
    ),
)
"""The inputs of clients."""

_PROBE = Tensor("probe", "BOOL", ONE)
_BETWEEN = (Tensor(REQUEST_KEY, "STRING", ANY), Tensor(PROMPT_TEXT, "STRING", ANY))
_KEY_OF_CHUNK = Tensor(REQUEST_KEY, "STRING", ONE)


def _inputs(names: Collection[str]) -> tuple[Tensor, ...]:
    return tuple(one for one in INPUTS if one.name in names)


MODELS: Mapping[str, ModelTensors] = {
    "llm": ModelTensors(INPUTS, OUTPUTS),
    "scheduler": ModelTensors((*INPUTS, _PROBE, *_BETWEEN), (*OUTPUTS, _KEY_OF_CHUNK)),
    "generate": ModelTensors(tuple(one for one in INPUTS if one.name != "stream"), OUTPUTS),
    "tokenizer": ModelTensors(
        _inputs({"text_input", INPUT_IDS, SAMPLING_PARAMETERS, "cancel"}),
        (*_inputs({INPUT_IDS}), *_BETWEEN),
    ),
    "postprocessor": ModelTensors(
        (*(replace(one, name=CHUNK_PREFIX + one.name) for one in OUTPUTS), _KEY_OF_CHUNK),
        OUTPUTS,
    ),
}
"""The tensors of each model. `probe` asks for the state of the scheduler and its engine, see
`probing`. `request_key` and `prompt_text` are exchanged between models only, see `schema`."""


@dataclass(frozen=True)
class EnsembleStep:
    """A step of `llm`: maps each tensor name of the model to the ensemble's name."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def ensemble_steps() -> Iterator[EnsembleStep]:
    """The steps of `llm`.

    Between the steps, the outputs of `tokenizer` are called `ids`, `key` and `prompt_text`, and
    those of a chunk have a prefix. All other names are kept. `scheduler` gets ids instead of text.
    """
    between = {INPUT_IDS: "ids", REQUEST_KEY: "key"}
    chunk = {one.name: CHUNK_PREFIX + one.name for one in OUTPUTS}
    chunk[REQUEST_KEY] = "chunk_key"

    def names(tensors: tuple[Tensor, ...], called: Mapping[str, str]) -> dict[str, str]:
        return {one.name: called.get(one.name, one.name) for one in tensors}

    tokenizer, scheduler, last = (MODELS[m] for m in ("tokenizer", "scheduler", "postprocessor"))
    asked = tuple(one for one in scheduler.inputs if one.name not in ("text_input", "probe"))
    yield EnsembleStep("tokenizer", names(tokenizer.inputs, {}), names(tokenizer.outputs, between))
    yield EnsembleStep("scheduler", names(asked, between), names(scheduler.outputs, chunk))
    yield EnsembleStep("postprocessor", names(last.inputs, chunk), names(last.outputs, {}))
