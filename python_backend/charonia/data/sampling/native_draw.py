"""Drawing in C++: all rows of a step in one call, including edits.

Owns passing the parameters of requests to `ops/native/sampling.cpp`, which draws exactly the same
tokens as `constraints` and `draw`. Must not know log-probabilities.
"""

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from charonia.data.sampling.constraints import SampledRow
from charonia.protocol import RowSampling


class NativeDraw:
    """Draws tokens on a CPU.

    Args:
        kernels: of `ops.native.build.load_kernels`.
    """

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        # A request has the same parameters at every step, so they are converted once, and cached by
        # the id of the struct that its row keeps. An entry is removed with its struct, before the
        # id can be reused.
        self._known: dict[int, tuple[weakref.ref[RowSampling], Any]] = {}

    def draw(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """Draw a token for each row.

        Args:
            logits: [n, vocab] float32, the model's output; not modified.
            rows: n rows.
        """
        token_ids: list[int] = self._kernels.draw(
            logits.contiguous(),
            [self.parameters(row.sampling) for row in rows],
            [row.token_ids.long() for row in rows],
            [row.num_prompt for row in rows],
        )
        return token_ids

    def parameters(self, sampling: RowSampling) -> Any:
        """A request's parameters in the kernels' form."""
        key, forget = id(sampling), self._known.pop
        known = self._known.get(key)
        if known is None:
            lifetime = weakref.ref(sampling, lambda _: forget(key, None))
            known = self._known[key] = (lifetime, self._take_over(sampling))
        return known[1]

    def _take_over(self, sampling: RowSampling) -> Any:
        return self._kernels.Sampling(
            sampling.seed % 2**64,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.logit_bias,
            sampling.bad_words_ids,
            sampling.allowed_ids,
            sampling.min_tokens,
            sampling.stop_ids,
        )
