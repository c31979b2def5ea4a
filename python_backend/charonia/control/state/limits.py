"""The limits that every request and every step stays within.

Owns the arithmetic of capacity: what an engine's size means for a request. Knows nothing about the
requests that exist.
"""

from dataclasses import dataclass, field

from charonia.errors import ConfigError, InvalidRequestError, PromptTooLongError
from charonia.protocol import EngineInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity of an engine, as the scheduler plans with it.

    Attributes:
        num_blocks: KV blocks with the null block 0, which is never handed out.
        block_size: tokens per block.
        max_model_len: tokens of a request, prompt and output together.
        max_num_seqs: rows. max_num_batched_tokens: token budget of a step.
        max_draft_len: longest context of the engine's draft model, in tokens; 0 without one.
        flops_per_token: floating-point operations of a token in the model, but for attention.
        watches_memory: whether the engine reports how many blocks there is memory for as it runs.
        num_stages: stages of the engine's pipeline.
        async_scheduling: whether a step is planned while the one before it computes, for the same
            rows. It has no effect on a pipeline, which overlaps steps of different rows.
        overlaps: whether a request may be in two steps in flight.
        max_steps_in_flight: plans that may be made before the first of them is applied.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_len: int = 0
    num_stages: int = 1
    async_scheduling: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    watches_memory: bool = False
    flops_per_token: float = 0.0
    overlaps: bool = field(init=False, default=False)
    max_steps_in_flight: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        # Every step asks for these more than once.
        object.__setattr__(self, "overlaps", self.async_scheduling and self.num_stages == 1)
        object.__setattr__(self, "max_steps_in_flight", self.num_stages + self.overlaps)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} must be at least "
                f"max_model_len ({self.max_model_len}) when enable_chunked_prefill is false"
            )

    @classmethod
    def of_engine(
        cls,
        info: EngineInfo,
        *,
        async_scheduling: bool = False,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
    ) -> "Limits":
        """Derive the limits from an engine's capacity.

        `max_model_len` is lowered to what the pool can hold, so that any admitted request can
        finish alone.

        Raises:
            ConfigError: the values contradict each other.
        """
        pool_tokens = (info.num_blocks - 1) * info.kv.block_size
        return cls(
            num_blocks=info.num_blocks,
            block_size=info.kv.block_size,
            max_model_len=min(info.max_model_len, pool_tokens),
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_draft_len=info.max_draft_len,
            num_stages=info.num_stages,
            async_scheduling=async_scheduling,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            watches_memory=info.watches_memory,
            flops_per_token=2.0 * info.num_parameters,
        )

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV cache has room for."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse a prompt that can never be served.

        Raises:
            InvalidRequestError: the prompt is empty.
            PromptTooLongError: the prompt leaves no room for one generated token.
        """
        if num_tokens < 1:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        if num_tokens >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens; at most {self.max_model_len - 1} are "
                f"accepted (max_model_len {self.max_model_len} less one to generate)"
            )
