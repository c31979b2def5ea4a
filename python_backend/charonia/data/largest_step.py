"""The largest step that an engine may have to run, computed before there is a KV cache.

Owns its shape, and running it. Must not know what is measured.

    max_num_batched_tokens 16, max_num_seqs 4, max_model_len 12

    row 0   ░░░░░░░░ ████████████   as many tokens as a row may have
    row 1             ░░░░░░░░░░█   one token each, for the largest number of rows
    row 2             ░░░░░░░░░░█
    row 3             ░░░░░░░░░░█
            ░ context, only if the memory of attention depends on it

All block tables refer to the same block, whose content does not matter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from charonia.config import EngineArgs
from charonia.data.basis import Basis
from charonia.data.comm import ModelRank
from charonia.data.loaded_models import PROMPT_LOGPROBS_SLICE, LoadedModel, Models
from charonia.data.model.paged import PagedModel
from charonia.data.ops.base import StepBatch
from charonia.data.sampling.sampler import SampledRow, Sampler
from charonia.protocol import RowSampling

_BLOCK = 1  # block 0 is the null block
_COSTLY = RowSampling(
    seed=0, top_p=0.9, min_p=0.01, frequency_penalty=0.1, repetition_penalty=1.1, num_logprobs=20
)
"""Sampling parameters that take the most memory in the sampler."""


class _Row(NamedTuple):
    num_tokens: int
    context_len: int


def run_largest_step(
    basis: Basis,
    models: Models,
    model_rank: ModelRank,
    draft_rank: ModelRank | None,
    *,
    pool_tokens: int,
    sampler: Sampler | None,
) -> None:
    """Compute one step of the largest shape with all models. All ranks must call this at once.

    Args:
        model_rank, draft_rank: of this rank, as in `Models.load`.
        pool_tokens: the most tokens of the KV cache, and so of all contexts together.
        sampler: of the rank that samples; None on the others.

    Raises:
        RankLostError: another rank was lost meanwhile.
        Exception: the step's own error, if there is not enough memory.
    """
    if basis.ops.attends_in_pieces:
        pool_tokens = 0
    num_lines = _num_lines(basis.args)
    parts = [(models.target, model_rank, basis.max_model_len, sampler)]
    if models.draft is not None and draft_rank is not None:
        parts.append((models.draft, draft_rank, basis.max_draft_len, None))
    with torch.inference_mode():
        for model, its_rank, max_len, its_sampler in parts:
            rows = largest_rows(basis.args, max_len, pool_tokens)
            _run(basis, model, rows, num_lines, its_rank, its_sampler, is_led=sampler is not None)


def largest_rows(args: EngineArgs, max_model_len: int, pool_tokens: int) -> list[_Row]:
    """The rows of that step: tokens to compute, and length of the context including them."""
    num_rows = min(args.most_rows, args.most_step_tokens)
    left, counts = args.most_step_tokens, []
    for later in reversed(range(num_rows)):
        counts.append(min(max_model_len, left - later))
        left -= counts[-1]
    spare = max(pool_tokens - sum(counts), 0)
    num_short = counts.count(1)
    contexts = []
    for count in counts:
        share = spare if count > 1 else spare // num_short
        contexts.append(count + min(max_model_len - count, share))
        if count > 1:
            spare -= contexts[-1] - count
    return [_Row(*row) for row in zip(counts, contexts, strict=True)]


def _num_lines(args: EngineArgs) -> int:
    """The number of lines of logits that are in memory at once."""
    if args.pipeline_parallel_size > 1:  # those of prompts are received as they arrive
        return args.most_step_tokens
    drafts = args.speculative_config.max_drafts if args.speculative_config else 0
    return min(max(args.most_rows * (1 + drafts), PROMPT_LOGPROBS_SLICE), args.most_step_tokens)


def _run(
    basis: Basis,
    model: LoadedModel,
    rows: Sequence[_Row],
    num_lines: int,
    model_rank: ModelRank,
    sampler: Sampler | None,
    *,
    is_led: bool,
) -> None:
    batch = _batch(rows, basis.args.block_size, basis.device)
    paged = PagedModel(model.decoder, model.kv_store(_BLOCK + 1, basis.device))
    num_tokens = batch.query_starts[-1]
    lines = list(range(max(num_tokens - num_lines, 0), num_tokens))
    pending = paged.forward(batch, lines)
    if not (is_led or model_rank.place.is_last):
        return
    logits = pending()
    if sampler is not None:
        history = torch.zeros(max(row.context_len for row in rows), dtype=torch.int64)
        sampler.sample(logits, [SampledRow(_COSTLY, history, len(history))] * len(lines))


def _batch(rows: Sequence[_Row], block_size: int, device: torch.device) -> StepBatch:
    positions = torch.cat(
        [torch.arange(row.context_len - row.num_tokens, row.context_len) for row in rows]
    )
    query_starts = [0]
    for row in rows:
        query_starts.append(query_starts[-1] + row.num_tokens)
    num_blocks = -(-max(row.context_len for row in rows) // block_size)
    return StepBatch(
        token_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        slots=(_BLOCK * block_size + positions % block_size).to(device),
        query_starts=query_starts,
        context_lens=[row.context_len for row in rows],
        block_tables=torch.full((len(rows), num_blocks), _BLOCK).to(device),
        block_size=block_size,
    )
