"""llama.cpp by its C interface, many sequences in one batch, with the fastest of several files.

The files, float16 and bfloat16 unless the settings say otherwise, are written on the spot, loaded
and timed in turns; the slower ones are let go of. The C interface is used because the Python class
above it has one sequence and copies all logits of every step.
"""

import os
import random
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
from gguf_file import write_gguf
from worker import Request, Wave, serve_engine

KINDS = ("f16", "bf16")
BATCH_TOKENS = 2048
NUM_TRIALS = 3
TRIAL_PROMPT, TRIAL_NEW = 128, 32
TRIAL_CONCURRENCY = (1, 8)


class _Context:
    """Room for some sequences of one model, and the batch that hands them over."""

    def __init__(self, model: Any, num_sequences: int, max_model_len: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * -(-max_model_len // 256) * 256  # each has whole pages
        params.n_seq_max = num_sequences
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {num_sequences} sequences")
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        chain = llama_cpp.llama_sampler_chain_default_params()
        self._sampler = llama_cpp.llama_sampler_chain_init(chain)
        llama_cpp.llama_sampler_chain_add(self._sampler, llama_cpp.llama_sampler_init_greedy())

    def complete(self, wave: Wave, requests: Sequence[Request]) -> None:
        """Complete all requests greedily: first the prompts, then all sequences step by step.

        Sequences that have ended leave the batch. The longest answers have the first sequences: a
        gap between the numbers of sequences would make llama.cpp compute the batch in parts.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        order = sorted(range(len(requests)), key=lambda index: -requests[index].max_tokens)
        last = [0] * len(requests)
        places: list[tuple[int, int, int, bool]] = [
            (token, position, sequence, position + 1 == len(requests[index].prompt))
            for sequence, index in enumerate(order)
            for position, token in enumerate(requests[index].prompt)
        ]
        for step in range(requests[order[0]].max_tokens):
            for start in range(0, len(places), BATCH_TOKENS):
                for sequence, token in self._decode(places[start : start + BATCH_TOKENS]):
                    last[sequence] = token
                    wave.add(order[sequence], [token])
            places = [
                (last[sequence], len(requests[index].prompt) + step, sequence, True)
                for sequence, index in enumerate(order)
                if step + 1 < requests[index].max_tokens
            ]

    def _decode(self, places: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute tokens at positions of sequences; sample after those that ask for it.

        Returns:
            Sequences and their next tokens.
        """
        batch = self._batch
        batch.n_tokens = len(places)
        for index, (token, position, sequence, samples) in enumerate(places):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = samples
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [
            (sequence, llama_cpp.llama_sampler_sample(self._sampler, self._context, index))
            for index, (_, _, sequence, samples) in enumerate(places)
            if samples
        ]

    def close(self) -> None:
        """Free the memory."""
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


class _Model:
    """One loaded file, and a context for each number of sequences that was asked for."""

    def __init__(self, path: Path, max_model_len: int) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False  # the kernel may drop mapped weights between turns
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        self._max_model_len = max_model_len
        self._contexts: dict[int, _Context] = {}

    def complete(self, wave: Wave, requests: Sequence[Request]) -> None:
        """Complete all requests greedily."""
        num = len(requests)
        if num not in self._contexts:
            self._contexts[num] = _Context(self._model, num, self._max_model_len)
        self._contexts[num].complete(wave, requests)

    def close(self) -> None:
        """Free the memory."""
        for context in self._contexts.values():
            context.close()
        llama_cpp.llama_model_free(self._model)


class LlamaCpp:
    """The fastest of the files."""

    def __init__(self, settings: dict[str, Any]) -> None:
        checkpoint, cache = Path(settings["model"]), Path(settings["cache"])
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        models = {}
        for kind in settings.get("kinds", KINDS):
            path = write_gguf(checkpoint, cache / f"{checkpoint.name}.{kind}.gguf", kind)
            models[kind] = _Model(path, settings["max_model_len"])
        seconds = _trial_seconds(models)
        taken = min(seconds, key=seconds.__getitem__)
        for kind, model in models.items():
            if kind != taken:
                model.close()
        self._model = models[taken]
        new_tokens = TRIAL_NEW * sum(TRIAL_CONCURRENCY)
        rates = ", ".join(f"{kind} {new_tokens / value:.1f}" for kind, value in seconds.items())
        self.notes = [
            f"{taken} taken: {rates} output tok/s (best of {NUM_TRIALS} turns at each of"
            f" {TRIAL_CONCURRENCY})",
            llama_cpp.llama_print_system_info().decode(),
        ]

    def complete(self, wave: Wave, requests: list[Request], sampling: dict[str, Any]) -> None:
        """See `worker.Engine`; greedy only."""
        if sampling:
            raise ValueError("this side decodes greedily only")
        self._model.complete(wave, requests)


def _trial_seconds(models: dict[str, _Model]) -> dict[str, float]:
    """The best times of each, in turns, over all numbers of prompts at once."""
    seconds = dict.fromkeys(models, 0.0)
    shuffler = random.Random(0)
    for count in TRIAL_CONCURRENCY:
        best = dict.fromkeys(models, float("inf"))
        for _ in range(NUM_TRIALS):
            requests = [
                Request([shuffler.randrange(1, 1000) for _ in range(TRIAL_PROMPT)], TRIAL_NEW)
                for _ in range(count)
            ]
            for kind, model in models.items():
                started = time.perf_counter()
                model.complete(Wave(count), requests)
                best[kind] = min(best[kind], time.perf_counter() - started)
        seconds = {kind: seconds[kind] + best[kind] for kind in models}
    return seconds


if __name__ == "__main__":
    serve_engine(LlamaCpp)
