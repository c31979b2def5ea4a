"""llama.cpp on one sequence, by its C interface, with the faster of float16 and bfloat16.

Both files are written on the spot, loaded and timed in turns; the slower one is let go of. The C
interface is used because the Python class above it copies all logits of every step.
"""

import os
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
from gguf_file import write_gguf
from worker import Wave, serve_engine

KINDS = ("f16", "bf16")
NUM_TRIALS = 3
TRIAL_PROMPT, TRIAL_NEW = 128, 32


class _Model:
    """One loaded file and its context."""

    def __init__(self, path: Path, max_model_len: int) -> None:
        num_threads = os.cpu_count() or 1
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_mmap = False  # the kernel may drop mapped weights between turns
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_model_len
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = num_threads
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        chain = llama_cpp.llama_sampler_chain_default_params()
        self._sampler = llama_cpp.llama_sampler_chain_init(chain)
        llama_cpp.llama_sampler_chain_add(self._sampler, llama_cpp.llama_sampler_init_greedy())

    def complete(self, wave: Wave, prompt: list[int], max_tokens: int) -> None:
        """Complete one prompt greedily."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        token_ids = prompt
        for _ in range(max_tokens):
            array = (llama_cpp.llama_token * len(token_ids))(*token_ids)
            batch = llama_cpp.llama_batch_get_one(array, len(token_ids))
            if llama_cpp.llama_decode(self._context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            token_ids = [llama_cpp.llama_sampler_sample(self._sampler, self._context, -1)]
            wave.add(0, token_ids)

    def close(self) -> None:
        """Free the memory."""
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


class LlamaCpp:
    """The faster of the two files."""

    def __init__(self, settings: dict[str, Any]) -> None:
        checkpoint = Path(settings["model"])
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        models = {
            kind: _Model(
                write_gguf(
                    checkpoint, Path(settings["cache"]) / f"{checkpoint.name}.{kind}.gguf", kind
                ),
                settings["max_model_len"],
            )
            for kind in settings.get("kinds", KINDS)
        }
        seconds = _trial_seconds(models)
        self._kind = min(seconds, key=seconds.__getitem__)
        for kind, model in models.items():
            if kind != self._kind:
                model.close()
        self._model = models[self._kind]
        rates = ", ".join(f"{kind} {TRIAL_NEW / value:.1f}" for kind, value in seconds.items())
        self.notes = [
            f"{self._kind} taken: {rates} output tok/s (best of {NUM_TRIALS} turns)",
            llama_cpp.llama_print_system_info().decode(),
        ]

    def complete(
        self, wave: Wave, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any]
    ) -> None:
        """See `worker.Engine`; greedy only, one prompt at a time."""
        if sampling or len(prompts) > 1:
            raise ValueError("this side decodes one prompt at a time, and greedily only")
        self._model.complete(wave, prompts[0], max_tokens)


def _trial_seconds(models: dict[str, _Model]) -> dict[str, float]:
    """The best time of each, in turns."""
    best = dict.fromkeys(models, float("inf"))
    shuffler = random.Random(0)
    for _ in range(NUM_TRIALS):
        prompt = [shuffler.randrange(1, 1000) for _ in range(TRIAL_PROMPT)]
        for kind, model in models.items():
            started = time.perf_counter()
            model.complete(Wave(1), prompt, TRIAL_NEW)
            best[kind] = min(best[kind], time.perf_counter() - started)
    return best


if __name__ == "__main__":
    serve_engine(LlamaCpp)
