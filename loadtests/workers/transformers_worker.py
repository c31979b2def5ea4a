"""transformers' `generate`, the requests of a wave as one batch; they must be equally long."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from worker import Request, Wave, serve_engine


class _Watch(StoppingCriteria):
    """A criterion that stops nothing, but sees every step's tokens."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave

    def __call__(
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.BoolTensor:
        for index, token_id in enumerate(input_ids[:, -1].tolist()):
            self._wave.add(index, [token_id])
        return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]


class Transformers:
    """A model in eager mode with a dynamic cache, which is what `generate` does by default."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.notes = [f"{torch.get_num_threads()} threads"]
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        ).eval()
        self._model.generation_config.eos_token_id = None

    def complete(self, wave: Wave, requests: list[Request], sampling: dict[str, Any]) -> None:
        """See `worker.Engine`; greedy only."""
        if sampling:
            raise ValueError("this side decodes greedily only")
        lengths = {(len(request.prompt), request.max_tokens) for request in requests}
        if len(lengths) > 1:
            raise ValueError(f"this side's requests must be equally long, not {sorted(lengths)}")
        input_ids = torch.tensor([request.prompt for request in requests])  # [requests, tokens]
        with torch.inference_mode():
            self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=requests[0].max_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([_Watch(wave)]),
            )


if __name__ == "__main__":
    serve_engine(Transformers)
