"""Probes of the scheduler and its engine, answered at once under any load.

Owns the answer to a probe, and the token that it brings about. Must not know who probes.

How to ask, over HTTP `generate` of the scheduler::

    POST /v2/models/scheduler/generate   {"probe": true}

`text_output` of the answer is a JSON object::

    engine_up      bool            whether steps can run now
    reason         string | null   why requests are refused at once; null while they are taken
    step_age_s     number | null   seconds since a step with tokens was last applied; null: never
    turn_age_s     number | null   seconds since the scheduling thread last looked for work; more
                                   than a step or a load takes means that it hangs
    max_model_len  int | null      of prompt and answer together; null while no engine says it
    load           object          the scheduler's load, see `Prober.load`

Every step with tokens that is applied shows that the scheduling thread and the engine work
together. While clients' requests run, theirs show it. While nothing is live, a probe that finds the
last one more than `TOKEN_INTERVAL_S` ago has the engine generate one token and does not wait for
it: ask again until the step's age shows that it came. So a probe takes no place in the queue,
appears in no metric of requests, waits for nothing, and is answered while the engine is down or
hangs. For any number of probes, one token per interval is computed at most.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable

from charonia.core.generation_request import GenerationRequest
from charonia.core.service import EngineService
from charonia.errors import CharoniaError, UnavailableError
from charonia.protocol import SamplingParams
from charonia.text.tokenizer import Tokenizer

TOKEN_INTERVAL_S = 1.0
_GAUGES = {
    "num_running": ("charonia_requests_running", ""),
    "num_waiting": ("charonia_requests_waiting", ""),
    "kv_blocks_used": ("charonia_kv_blocks", "used"),
    "kv_blocks_total": ("charonia_kv_blocks", "total"),
}
"""Names in an answer, and the series of the metrics that have the values."""
_COUNTS = {
    "prompt_tokens": ("charonia_prompt_tokens_total", "computed", "cached"),
    "generation_tokens": ("charonia_generation_tokens_total", ""),
    "cache_queried_tokens": ("charonia_prefix_cache_queried_tokens_total", ""),
    "cache_hit_tokens": ("charonia_prefix_cache_hit_tokens_total", ""),
    "draft_tokens": ("charonia_draft_tokens_total", ""),
    "accepted_tokens": ("charonia_accepted_tokens_total", ""),
    "engine_restarts": ("charonia_engine_restarts_total", ""),
}
"""Names in an answer, and the counter with the labels whose values are added."""
_PROMPT = "a"
# With a seed: none is drawn from the engine's own.
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, speculation=False, seed=0)


class Prober:
    """Answers probes.

    Args:
        clock: seconds, that of the service.
    """

    def __init__(
        self,
        service: EngineService,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._prompt_ids = tokenizer.encode(_PROMPT) or [0]
        self._clock = clock

    def answer(self) -> str:
        """Describe the service as JSON. Have it generate a token if none has come lately."""
        state = self._service.state
        step_age_s = self._age_s(state.last_step_at)
        is_stale = step_age_s is None or step_age_s > TOKEN_INTERVAL_S
        if is_stale and state.is_up and not state.num_live:  # its own is live until it has ended
            self._generate()
        return json.dumps(
            {
                "engine_up": state.is_up,
                "reason": state.down_reason,
                "step_age_s": step_age_s,
                "turn_age_s": self._age_s(state.last_turn_at),
                "max_model_len": self._max_model_len(),
                "load": self.load(),
            }
        )

    def load(self) -> dict[str, float | None]:
        """Return the scheduler's load now, and its work since its start.

        Gauges of now: `num_running`, `num_waiting`, `kv_blocks_used`, `kv_blocks_total`, and
        `engine_age_s`, seconds since the engine was found, None while there is none. The others are
        counts with the values of the metrics that `_COUNTS` names.
        """
        metrics, since = self._service.metrics, self._service.state.serving_since
        gauges = {name: metrics.gauges.get(series, 0.0) for name, series in _GAUGES.items()}
        counts = {
            name: sum(metrics.counters.get((metric, label), 0.0) for label in labels)
            for name, (metric, *labels) in _COUNTS.items()
        }
        numbers = {name: int(value) for name, value in (gauges | counts).items()}
        return {**numbers, "engine_age_s": self._age_s(since)}

    def _age_s(self, at: float | None) -> float | None:
        return None if at is None else self._clock() - at

    def _max_model_len(self) -> int | None:
        try:
            return self._service.limits.max_model_len
        except UnavailableError:
            return None

    def _generate(self) -> None:
        request = GenerationRequest(
            key=secrets.token_hex(16), prompt_ids=self._prompt_ids, params=_PARAMS, is_probe=True
        )
        with contextlib.suppress(CharoniaError):  # then it went down this moment
            self._service.submit(request, lambda chunk: None)
