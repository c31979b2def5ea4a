"""Limits of the machine for a model, with which measured rates are compared.

Pure functions of a model's shape, of the work, and of one reading of the machine (see
workers/limits_worker.py). Roofline: a step takes as long as its multiplications at the bf16 rate,
or as reading the weights once, whichever is longer; reading the KV cache comes on top. Prompts are
multiplied with the keys and values of their own tokens, too.
"""

import json
from dataclasses import dataclass
from pathlib import Path

BYTES_PER_VALUE = 2  # bfloat16 or float16
FLOP_PER_PARAMETER = 2  # a multiplication and an addition


@dataclass(frozen=True)
class Machine:
    """One reading."""

    read_gb_s: float
    gemm_gflop_s: float


@dataclass(frozen=True)
class ModelCost:
    """Cost of a token.

    Attributes:
        body_parameters: of the layers' matrices, which every token is multiplied with.
        head_parameters: of the output matrix; only rows that sample are multiplied with it. Rows
            looked up in the embedding cost next to nothing.
        kv_bytes_per_token: of all layers, keys and values.
        attention_width: of all layers and heads: a token has as many multiplications with the key
            of each token that it looks at, and with its value.
    """

    body_parameters: int
    head_parameters: int
    kv_bytes_per_token: int
    attention_width: int = 0

    @classmethod
    def of_llama(cls, checkpoint: Path) -> "ModelCost":
        """Read a config.json; families with other layers have other costs."""
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(
            body_parameters=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_parameters=config["vocab_size"] * hidden,
            kv_bytes_per_token=layers * 2 * kv_heads * head_dim * BYTES_PER_VALUE,
            attention_width=layers * heads * head_dim,
        )

    @property
    def weight_bytes(self) -> int:
        """Read in every step that samples."""
        return (self.body_parameters + self.head_parameters) * BYTES_PER_VALUE

    def decode_bytes(self, context: float) -> float:
        """Read to produce one token of one sequence after `context` tokens."""
        return self.weight_bytes + context * self.kv_bytes_per_token


@dataclass(frozen=True)
class Work:
    """A wave: so many prompts at once, of so many tokens each, and so many new tokens for each."""

    concurrency: int
    prompt_tokens: int
    new_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens in the cache at a decode step, on average over the steps."""
        return self.prompt_tokens + self.new_tokens / 2


def prefill_seconds(cost: ModelCost, machine: Machine, work: Work) -> float:
    """All prompts in one step; the last row of each samples the first token."""
    pairs = work.prompt_tokens * (work.prompt_tokens + 1) // 2
    multiplications = work.concurrency * (
        work.prompt_tokens * cost.body_parameters
        + cost.head_parameters
        + 2 * pairs * cost.attention_width
    )
    return max(_compute(multiplications, machine), _read(cost.weight_bytes, machine))


def decode_step_seconds(cost: ModelCost, machine: Machine, work: Work) -> float:
    """One new token for each sequence, at the wave's mean context."""
    parameters = work.concurrency * (cost.body_parameters + cost.head_parameters)
    kv_bytes = work.concurrency * work.mean_context * cost.kv_bytes_per_token
    return max(_compute(parameters, machine), _read(cost.weight_bytes, machine)) + _read(
        kv_bytes, machine
    )


def wave_seconds(cost: ModelCost, machine: Machine, work: Work) -> float:
    """The whole wave: the prefill gives the first token, decode steps the others."""
    steps = work.new_tokens - 1
    return prefill_seconds(cost, machine, work) + steps * decode_step_seconds(cost, machine, work)


def output_limit(cost: ModelCost, machine: Machine, work: Work) -> float:
    """Output tokens per second of a wave, at most."""
    return work.concurrency * work.new_tokens / wave_seconds(cost, machine, work)


def prompt_limit(cost: ModelCost, machine: Machine, work: Work) -> float:
    """Prompt tokens per second of a prefill, at most."""
    return work.concurrency * work.prompt_tokens / prefill_seconds(cost, machine, work)


def achieved_gb_s(cost: ModelCost, tokens_per_second: float, work: Work) -> float:
    """Return the memory that decoding one sequence at this rate reads, in GB/s."""
    return tokens_per_second * cost.decode_bytes(work.mean_context) / 1e9


def _compute(multiplications: float, machine: Machine) -> float:
    return multiplications * FLOP_PER_PARAMETER / (machine.gemm_gflop_s * 1e9)


def _read(num_bytes: float, machine: Machine) -> float:
    return num_bytes / (machine.read_gb_s * 1e9)
