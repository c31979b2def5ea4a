"""The tensors of TensorRT-LLM's convention, as `interface` has charonia's own.

The names, types and dimensions are those of tensorrtllm_backend r24.10 and r25.03
(all_models/inflight_batcher_llm). The batch dimension, which comes first, is left out. Must not
know values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from charonia.serving.conventions.interface import ANY, ONE, ModelTensors, Tensor

MAX_BATCH_SIZE = 64
"""Largest batch of the models."""
_TABLE = (-1, -1)
_WORD_LIST = (2, -1)


@dataclass(frozen=True)
class Refused(Tensor):
    """An input of the convention for a feature that charonia does not have.

    Attributes:
        neutral: values that are accepted because they have no effect; empty tensors are, too.
    """

    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FacadeTensors(ModelTensors):
    """The inputs and outputs of a model of the convention.

    Attributes:
        called: the model's names for names in the scheduler's errors.
    """

    called: Mapping[str, str]

    @property
    def accepted(self) -> tuple[Tensor, ...]:
        """The inputs that are used or ignored."""
        return tuple(one for one in self.inputs if not isinstance(one, Refused))

    @property
    def refused(self) -> tuple[Refused, ...]:
        """The inputs that are refused."""
        return tuple(one for one in self.inputs if isinstance(one, Refused))


_NO_BEAMS = "without effect: for beam search only"
_NO_DECODER = "without effect: for models with an encoder only"
_NO_DECAY = "without effect: for `runtime_top_p_decay` only"
_SAMPLING = (
    Tensor("pad_id", "INT32", ONE, "without effect: nothing is padded"),
    Tensor("temperature", "FP32", ONE, "default 1"),
    Tensor("repetition_penalty", "FP32", ONE, "default 1"),
    Tensor("presence_penalty", "FP32", ONE, "default 0"),
    Tensor("frequency_penalty", "FP32", ONE, "default 0"),
    Tensor("min_length", "INT32", ONE, "tokens before the text may end; default 0"),
    Tensor(
        "random_seed",
        "UINT64",
        ONE,
        "default 0; each further sequence has the next number",
    ),
    Tensor("num_return_sequences", "INT32", ONE, "answers to each prompt, 1 to 64; default 1"),
    Tensor("return_log_probs", "BOOL", ONE, "adds `cum_log_probs` and `output_log_probs`"),
    Tensor("return_num_input_tokens", "BOOL", ONE, "adds `num_input_tokens`"),
    Tensor("return_num_output_tokens", "BOOL", ONE, "adds `num_output_tokens`"),
    Tensor(
        "exclude_input_in_output",
        "BOOL",
        ONE,
        "by default an answer that is not streamed begins with the prompt",
    ),
)
_REFUSED = (
    Refused("beam_width", "INT32", ONE, neutral=(1,)),
    Refused("return_context_logits", "BOOL", ONE, neutral=(False,)),
    Refused("return_generation_logits", "BOOL", ONE, neutral=(False,)),
    Refused("return_kv_cache_reuse_stats", "BOOL", ONE, neutral=(False,)),
    Refused("return_perf_metrics", "BOOL", ONE, neutral=(False,)),
    Refused("prompt_embedding_table", "FP16", _TABLE),
    Refused("prompt_vocab_size", "INT32", ONE, neutral=(0,)),
    Refused("lora_task_id", "UINT64", ONE),
    Refused("lora_weights", "FP16", _TABLE),
    Refused("lora_config", "INT32", (-1, 3)),
    Refused("guided_decoding_guide_type", "STRING", ONE, neutral=(b"",)),
    Refused("guided_decoding_guide", "STRING", ONE, neutral=(b"",)),
)
_TEXT_INPUTS = (
    Tensor(
        "end_id",
        "INT32",
        ONE,
        "the token that ends the text, instead of the checkpoint's own; -1 for none",
    ),
    Tensor("text_input", "STRING", ONE, "the prompt"),
    Tensor("max_tokens", "INT32", ONE, "to generate at most"),
    Tensor("stream", "BOOL", ONE, "one response per new text; default one in all"),
    Tensor(
        "top_k", "INT32", ONE, "0 is as if left out; without it and `top_p` the likeliest is taken"
    ),
    Tensor("top_p", "FP32", ONE, "0 is none, as is 1"),
    Tensor(
        "stop_words",
        "STRING",
        ANY,
        "texts that end the answer, which has them; empty ones are none",
    ),
    Tensor(
        "bad_words", "STRING", ANY, "words whose tokens do not come, see below; empty ones are none"
    ),
    Tensor("embedding_bias_words", "STRING", ANY, "texts whose tokens' logits are changed"),
    Tensor("embedding_bias_weights", "FP32", ANY, "by so much, one for each of these texts"),
    Tensor("length_penalty", "FP32", ONE, _NO_BEAMS),
    *_SAMPLING,
    *_REFUSED,
    Refused("decoder_text_input", "STRING", ONE, neutral=(b"",)),
    Refused("prompt_table_extra_id", "UINT64", ANY),
)
_TOKEN_INPUTS = (
    Tensor(
        "end_id",
        "INT32",
        ONE,
        "the token that ends the answer, which is without it; by default, and with -1, none does",
    ),
    Tensor("input_ids", "INT32", ANY, "the prompt"),
    Tensor("input_lengths", "INT32", ONE, "how many of `input_ids` are the prompt"),
    Tensor("request_output_len", "INT32", ONE, "tokens to generate at most"),
    Tensor("streaming", "BOOL", ONE, "one response per step; default one in all"),
    Tensor("stop", "BOOL", ONE, "ends the live requests of this request id"),
    Tensor(
        "runtime_top_k",
        "INT32",
        ONE,
        "0 is as if left out; without it and `runtime_top_p` the likeliest token is taken",
    ),
    Tensor("runtime_top_p", "FP32", ONE, "0 is none, as is 1"),
    Tensor(
        "stop_words_list",
        "INT32",
        _WORD_LIST,
        "words that end the answer, as texts, wherever they begin: all ids, and where each ends",
    ),
    Tensor("bad_words_list", "INT32", _WORD_LIST, "words whose tokens do not come, see below"),
    Tensor("embedding_bias", "FP32", ANY, "added to the logits, one for each token id"),
    Tensor(
        "draft_input_ids", "INT32", ANY, "a guess at the answer's first tokens, see `scheduler`"
    ),
    Tensor(
        "retention_token_range_starts",
        "INT32",
        ANY,
        "of the prompt, how long the cache keeps it, see `cache_priority`; the next three have one "
        "value for each",
    ),
    Tensor("retention_token_range_ends", "INT32", ANY, "-1 is the prompt's end"),
    Tensor("retention_token_range_priorities", "INT32", ANY, "0 to 100, what is low goes first"),
    Tensor("retention_token_range_durations_ms", "INT32", ANY, "-1, and the default, is for ever"),
    Tensor("retention_decode_priority", "INT32", ONE, "of what is generated"),
    Tensor("retention_decode_duration_ms", "INT32", ONE, "of that; -1 as above"),
    Tensor("len_penalty", "FP32", ONE, _NO_BEAMS),
    Tensor("runtime_top_p_min", "FP32", ONE, _NO_DECAY),
    Tensor("runtime_top_p_reset_ids", "INT32", ONE, _NO_DECAY),
    Tensor("decoder_input_ids", "INT32", ANY, _NO_DECODER),
    Tensor("decoder_input_lengths", "INT32", ONE, _NO_DECODER),
    Tensor("early_stopping", "BOOL", ONE, _NO_BEAMS),
    Tensor("beam_search_diversity_rate", "FP32", ONE, _NO_BEAMS),
    *_SAMPLING,
    *_REFUSED,
    Refused("draft_logits", "FP32", _TABLE),
    Refused("draft_acceptance_threshold", "FP32", ONE),
    Refused("runtime_top_p_decay", "FP32", ONE, neutral=(1.0,)),
    Refused("prompt_table_extra_ids", "UINT64", ANY),
    Refused("context_phase_params", "UINT8", ANY),
)
_OUTPUTS = (
    Tensor("cum_log_probs", "FP32", ANY, "[beam]: of all tokens so far"),
    Tensor("output_log_probs", "FP32", _TABLE, "[beam, token]: of the response's tokens"),
    Tensor("batch_index", "INT32", ONE, "which request of the batch; where there are several"),
    Tensor("sequence_index", "INT32", ONE, "which of its sequences; where there are several"),
    Tensor("num_input_tokens", "INT32", ONE, "of the prompt"),
    Tensor("num_output_tokens", "INT32", ONE, "of this response"),
    Tensor("context_logits", "FP32", _TABLE, "never given, as are those below"),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
    Tensor("kv_cache_alloc_new_blocks", "INT32", ONE),
    Tensor("kv_cache_reused_blocks", "INT32", ONE),
    Tensor("kv_cache_alloc_total_blocks", "INT32", ONE),
)
_TEXT_OUTPUTS = (
    Tensor(
        "text_output",
        "STRING",
        ANY,
        "[beam], without the batch's dimension: the text; streaming: the new one",
    ),
    *_OUTPUTS,
)
_TOKEN_OUTPUTS = (
    Tensor("output_ids", "INT32", _TABLE, "[beam, token]: the tokens; streaming: the new ones"),
    Tensor("sequence_length", "INT32", ANY, "[beam]: how many these are"),
    *_OUTPUTS,
    Tensor("context_phase_params", "UINT8", ANY),
)
_SAMPLING_NAMES = {"min_tokens": "min_length", "seed": "random_seed"}
_TEXT_NAMES = {
    **_SAMPLING_NAMES,
    "stop": "stop_words",
    "stop_token_ids": "end_id",
    "logit_bias": "embedding_bias_weights",
}
_TOKEN_NAMES = {
    **_SAMPLING_NAMES,
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "stop": "stop_words_list",
    "stop_token_ids": "end_id",
    "bad_words": "bad_words_list",
    "cache_priority": "retention_token_range",
    "ttl_s": "duration in seconds",
    "logit_bias": "embedding_bias",
}

MODELS: Mapping[str, FacadeTensors] = {
    "ensemble": FacadeTensors(_TEXT_INPUTS, _TEXT_OUTPUTS, _TEXT_NAMES),
    "tensorrt_llm_bls": FacadeTensors(
        (
            *_TEXT_INPUTS,
            Refused("num_draft_tokens", "INT32", ONE, neutral=(0,)),
            Refused("use_draft_logits", "BOOL", ONE, neutral=(False,)),
        ),
        _TEXT_OUTPUTS,
        _TEXT_NAMES,
    ),
    "tensorrt_llm": FacadeTensors(_TOKEN_INPUTS, _TOKEN_OUTPUTS, _TOKEN_NAMES),
    "preprocessing": FacadeTensors(
        (
            Tensor("QUERY", "STRING", ONE, "the prompt"),
            Tensor("REQUEST_OUTPUT_LEN", "INT32", ONE, "handed on"),
            Tensor("BAD_WORDS_DICT", "STRING", ANY, "empty ones are none"),
            Tensor("STOP_WORDS_DICT", "STRING", ANY, "empty ones are none"),
            Tensor("EMBEDDING_BIAS_WORDS", "STRING", ANY),
            Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", ANY),
            Tensor("END_ID", "INT32", ONE, "default the checkpoint's"),
            Tensor("PAD_ID", "INT32", ONE, "default `END_ID`"),
            Refused("DECODER_QUERY", "STRING", ONE, neutral=(b"",)),
            Refused("PROMPT_TABLE_EXTRA_ID", "UINT64", ANY),
        ),
        (
            Tensor("INPUT_ID", "INT32", ANY, "padded to the batch's longest"),
            Tensor("REQUEST_INPUT_LEN", "INT32", ONE),
            Tensor("BAD_WORDS_IDS", "INT32", _WORD_LIST),
            Tensor("STOP_WORDS_IDS", "INT32", _WORD_LIST),
            Tensor("EMBEDDING_BIAS", "FP32", ANY),
            Tensor("REQUEST_OUTPUT_LEN", "INT32", ONE),
            Tensor("OUT_END_ID", "INT32", ONE),
            Tensor("OUT_PAD_ID", "INT32", ONE),
            Tensor("DECODER_INPUT_ID", "INT32", ANY, "one token, for those who hand it on"),
            Tensor("REQUEST_DECODER_INPUT_LEN", "INT32", ONE, "1"),
            Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", ANY, "never given"),
        ),
        {"bad_words": "BAD_WORDS_DICT"},
    ),
    "postprocessing": FacadeTensors(
        (
            Tensor("TOKENS_BATCH", "INT32", _TABLE, "[beam, token]"),
            Tensor("SEQUENCE_LENGTH", "INT32", ANY, "[beam]: how many of these count"),
            Tensor("CUM_LOG_PROBS", "FP32", ANY, "handed on, as are those below"),
            Tensor("OUTPUT_LOG_PROBS", "FP32", _TABLE),
            Tensor("CONTEXT_LOGITS", "FP32", _TABLE),
            Tensor("GENERATION_LOGITS", "FP32", (-1, -1, -1)),
            Tensor("BATCH_INDEX", "INT32", ONE),
        ),
        (
            Tensor("OUTPUT", "STRING", ANY, "[batch · beam]: the texts"),
            Tensor("OUT_CUM_LOG_PROBS", "FP32", ANY),
            Tensor("OUT_OUTPUT_LOG_PROBS", "FP32", _TABLE),
            Tensor("OUT_CONTEXT_LOGITS", "FP32", _TABLE),
            Tensor("OUT_GENERATION_LOGITS", "FP32", (-1, -1, -1)),
            Tensor("OUT_BATCH_INDEX", "INT32", ONE),
        ),
        {},
    ),
}
