"""Distillation of the draft: texts that the target wrote, and the target's logits for each token.

Owns the prefixes, the sampling and the loss (Hinton, Vinyals, Dean 2015, arXiv 1503.02531; on the
target's own texts: Zhou et al. 2023, DistillSpec, arXiv 2310.08461). Must not know the training
loop.
"""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from charonia import LLM, SamplingParams
from charonia.demo.loop import LossFunction, cross_entropy, inputs_of, model_logits

# Temperatures of requests; 0 is greedy.
TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
PREFIX_TOKENS = (16, 256)
# A temperature below 1 focuses the loss on tokens that could be chosen greedily.
LOSS_TEMPERATURES = (1.0, 0.5)


def make_prefixes(documents: list[list[int]], count: int, *, seed: int) -> list[list[int]]:
    """Cut prefixes of PREFIX_TOKENS tokens from anywhere in the documents."""
    rng = random.Random(seed)
    weights = [len(document) for document in documents]
    prefixes = []
    for document in rng.choices(documents, weights, k=count):
        length = rng.randint(*PREFIX_TOKENS)
        start = rng.randrange(max(len(document) - length, 1))
        prefixes.append(document[start : start + length])
    return prefixes


def sample_texts(
    folder: Path, prefixes: list[list[int]], *, max_tokens: int, seed: int
) -> list[list[int]]:
    """Let the checkpoint in `folder` continue each prefix, at mixed temperatures."""
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            seed=seed + index,
        )
        for index in range(len(prefixes))
    ]
    written = write(folder, prefixes, params)
    return [prefix + ids for prefix, ids in zip(prefixes, written, strict=True)]


def write(folder: Path, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Return the tokens that the checkpoint in `folder` adds to each prompt."""
    threads = torch.get_num_threads()
    with LLM(model=str(folder), device="cpu", cpu_threads=threads, cpu_binding="none") as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def distillation_loss(teacher: LlamaForCausalLM) -> LossFunction:
    """Make the loss KL(teacher || model) in nats per token, averaged over LOSS_TEMPERATURES.

    Tokens that are marked as not to be learned do not count.
    """

    def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:  # [rows, length + 1]
        inputs = inputs_of(batch)
        wanted, logits = teacher_logits(teacher, inputs), model_logits(model, inputs)
        learned = batch[:, 1:] >= 0
        # Where nothing is to be learned the model is taken to agree. Masking the divergence instead
        # gave NaN gradients when compiled by torch 2.13.
        logits = torch.where(learned[..., None], logits, wanted)
        losses = [divergence(wanted / heat, logits / heat) for heat in LOSS_TEMPERATURES]
        return torch.stack(losses).mean() * (learned.numel() / learned.sum())

    return loss_of


def rehearsal_loss(teacher: LlamaForCausalLM, edit_share: float) -> LossFunction:
    """Make the loss of learning to edit without forgetting (Li, Hoiem 2016, arXiv 1606.09282).

    The first rows of a batch are files, learned half from their tokens and half from `teacher`.
    The last `edit_share` of them are edits. Both parts have the same weight.
    """

    def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:  # [rows, length + 1]
        num_files = len(batch) - round(len(batch) * edit_share)
        inputs = inputs_of(batch)
        wanted = teacher_logits(teacher, inputs[:num_files])
        logits = model_logits(model, inputs)
        files, edits = logits[:num_files], logits[num_files:]
        rehearsed = divergence(wanted, files)
        read = cross_entropy(files, batch[:num_files])
        return (rehearsed + read) / 2 + cross_entropy(edits, batch[num_files:])

    return loss_of


def teacher_logits(teacher: LlamaForCausalLM, inputs: torch.Tensor) -> torch.Tensor:
    """Compute `model_logits` without a gradient."""
    with torch.no_grad():
        return model_logits(teacher, inputs)


def divergence(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(softmax(wanted) || softmax(logits)), the mean in nats over [rows, length, vocabulary]."""
    return F.kl_div(
        F.log_softmax(logits.flatten(0, 1), -1),
        F.log_softmax(wanted.flatten(0, 1), -1),
        log_target=True,
        reduction="batchmean",
    )
