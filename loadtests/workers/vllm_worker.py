"""vLLM offline: its `LLM`, stepped as its own `generate` does, so that every token is seen."""

import os
from typing import Any

from worker import Request, Wave, serve_engine

# Both of two cores compute; without these vLLM keeps one for itself.
_THREADS = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_NO_USAGE_STATS": "1",
}


class Vllm:
    """One engine, without prefix caching."""

    def __init__(self, settings: dict[str, Any]) -> None:
        for name, value in _THREADS.items():
            os.environ.setdefault(name, value)
        import torch
        import vllm

        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.notes = [f"{name}={os.environ[name]}" for name in _THREADS]
        budget = os.environ.get("BENCH_MAX_NUM_BATCHED_TOKENS")  # see vllm_variants.py
        self._sampling_params = vllm.SamplingParams
        self._output_kind = vllm.sampling_params.RequestOutputKind.DELTA
        self._engine = vllm.LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            enable_prefix_caching=False,
            max_num_batched_tokens=int(budget) if budget else None,
        ).llm_engine
        self._num_requests = 0

    def complete(self, wave: Wave, requests: list[Request], sampling: dict[str, Any]) -> None:
        """See `worker.Engine`; greedy only."""
        if sampling:
            raise ValueError("this side decodes greedily only")
        index_of = {}
        for index, (prompt, max_tokens) in enumerate(requests):
            params = self._sampling_params(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                output_kind=self._output_kind,
            )
            self._num_requests += 1
            index_of[str(self._num_requests)] = index
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                wave.add(index_of[output.request_id], list(output.outputs[0].token_ids))


if __name__ == "__main__":
    serve_engine(Vllm)
