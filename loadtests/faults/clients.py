"""Clients of the server: lanes, a call that kills, one with a long prompt; their right answers.

Owns the requests and their undisturbed answers. Must not know faults.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from faults.calls import WAYS_IN, Call, Request, make_requests
from faults.lanes import Lane
from faults.target import Target
from support.e2e import wait_for

MIN_DISTINCT = 0.2
LONG_NEW_TOKENS = 32


class ClientsError(Exception):
    """A request is not answered as it should be when nothing happens; the text says how."""


class Clients:
    """All that call one server, once each request has been run undisturbed.

    Args:
        poison: a token id that kills the engine; those below it, but 0, make the prompts.
        long_prompt: tokens of the long one.
        timeout: seconds, for the undisturbed run.

    Raises:
        ClientsError: a request is not answered as it should, or its text is a loop.
    """

    def __init__(
        self,
        target: Target,
        *,
        num_lanes: int,
        poison: int,
        long_prompt: int,
        seed: int,
        timeout: float,
    ) -> None:
        self._target = target
        self._poison = poison
        self._draw = random.Random(seed)
        self._requests = make_requests(num_lanes, 1, poison - 1, seed)
        prompt = [self._draw.randrange(1, poison) for _ in range(long_prompt)]
        sampling = {"max_tokens": LONG_NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}
        self._long = Request(prompt, *WAYS_IN[0], sampling)
        self._salts = count()
        *self._undisturbed, self._long_undisturbed = self._run_undisturbed(
            [*self._requests, self._long], timeout
        )

    def start_lanes(self) -> list[Lane]:
        """Each of them repeats its request from now on."""
        return [
            self._start_lane(index, request, tokens)
            for index, (request, tokens) in enumerate(
                zip(self._requests, self._undisturbed, strict=True)
            )
        ]

    def poison(self) -> Call:
        """Send a request, by a random way in, that kills the engine."""
        request = self._draw.choice(self._requests)
        poisoned = replace(request, prompt_ids=[*request.prompt_ids, self._poison])
        return Call("poison", poisoned, self._target.urls, [])

    def long(self) -> Call:
        """Send a request with a long prompt, by a random way in; no block of it is cached."""
        protocol, model = self._draw.choice(WAYS_IN)
        sampling = self._long.sampling | {"cache_salt": str(next(self._salts))}
        request = replace(self._long, protocol=protocol, model=model, sampling=sampling)
        return Call("long prompt", request, self._target.urls, self._long_undisturbed)

    def _start_lane(self, index: int, request: Request, tokens: Sequence[int]) -> Lane:
        who = f"lane {index}"
        return Lane(index, request.model, lambda: Call(who, request, self._target.urls, tokens))

    def _run_undisturbed(self, requests: Sequence[Request], timeout: float) -> list[list[int]]:
        calls = [Call("undisturbed", request, self._target.urls, []) for request in requests]
        wait_for(lambda: all(call.is_over for call in calls), bool, timeout)
        for call, request in zip(calls, requests, strict=True):
            num_tokens = len(call.token_ids)
            error = call.answer().error if call.is_over else "it hangs"
            if error is not None or num_tokens != request.sampling["max_tokens"]:
                raise ClientsError(
                    f"an undisturbed request to {request.model} got {num_tokens} tokens,"
                    f" error {error}"
                )
            if len(set(call.token_ids)) < MIN_DISTINCT * num_tokens:
                raise ClientsError("an undisturbed text is a loop, which would hide wrong tokens")
        return [call.token_ids for call in calls]
