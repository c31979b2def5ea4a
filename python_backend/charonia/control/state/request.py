"""Requests as the control plane sees them: tokens, a cursor, blocks.

Owns a request's state; only the scheduler changes it. Knows nothing about text.

A client's request is a group of one or more requests here: n samples of one prompt are n requests,
each with its own tokens, row and blocks. The first of a group computes the prompt; then the others
begin with its blocks.

    token_ids   [ p p p p p p p p p p g g g ] ?    p prompt, g generated, ? in flight
                  └─ num_computed ─┘│           KV exists before the cursor
    block_ids   [  b0  ][  b1  ][  b2  ]           position i is in block i // block_size
    block_keys  [  k0  ][  k1  ]                   one per full block, made as tokens come
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import msgspec

from charonia.control.state.stats import DraftCounts
from charonia.protocol import CacheRange, FinishReason, RowSampling, TokenLogprobs


class StepObserver(Protocol):
    """Follows the requests of a group from step to step."""

    def on_step(
        self,
        request: "Request",
        num_tokens: int,
        num_drafts: int,
        began_at: float,
        ended_at: float,
    ) -> None:
        """A step has computed tokens of a request and verified drafts.

        The request's result is not committed yet; those of others in the step may be.

        Args:
            began_at, ended_at: in seconds, by the clock of `plan` and `apply`.
        """
        ...


@dataclass(slots=True, eq=False)
class Group:
    """The requests that sample from one prompt for one client.

    Attributes:
        key: its name, which is also the key of its first request.
        observer: is told of each step that computes for a member; None if nobody wants to know.
        owner: whatever its caller has of the client's request; nobody here looks at it.
        members: requests that have not ended.
        leader: the member that computes the prompt, until it is computed.
        parked: members that wait for the prompt, in order.
    """

    key: str = ""
    observer: StepObserver | None = None
    owner: object = None
    members: list["Request"] = field(default_factory=list)
    leader: "Request | None" = None
    parked: list["Request"] = field(default_factory=list)

    def forks(self, num_computed: int) -> Iterator["Request"]:
        """Members that have a row and at least `num_computed` computed tokens."""
        return (
            one for one in self.members if one.row is not None and one.num_computed >= num_computed
        )

    def disband(self) -> None:
        """Forget all members, so that they can be added again to another scheduler."""
        self.members, self.leader, self.parked = [], None, []


@dataclass(slots=True, eq=False)
class Request:
    """A live request.

    Attributes:
        key: unique name of this request. number: how many requests were added before it.
        group: the group of its samples. index: its index among them.
        token_ids: prompt and generated tokens; num_prompt of them are the prompt.
        stop_ids: tokens that end it. max_tokens, min_tokens: generated tokens.
        tenant: whose it is. priority: smaller is sooner. arrived_at: seconds.
        expires_at: its deadline in seconds; infinite without one. is_demoted: it cannot meet that.
        cache_scope: isolates its prefix cache (tenant and salt).
        takes_hits: whether it may start from cached blocks. is_probe: whether it is internal, not
            a client's; such a request is not counted.
        retention: how long its blocks are kept in the cache; sorted ranges that do not overlap.
            refused_from: the first block that is not kept longer, because there was no room.
        speculates: whether tokens may be drafted for it. expected_ids: what is left of the client's
            prediction of its tokens; empty once that was wrong.
        max_known: tokens, prompt included, at which it ends by its length.
        num_slots: tokens that its blocks hold.
        num_draft_computed: like num_computed, for the draft model's KV.
        awaits: the running request that computes the first `num_awaited` blocks of its prefix. It
            waits for them until `awaits_until` at most, in seconds. `end_awaited` is the end of all
            tokens that it waits for or has waited for.
        num_passed: requests behind it in the policy's order that were admitted before it.
        num_in_flight: steps that are planned but not applied and compute tokens of it.
        num_computing: these tokens. num_sampling: those of these steps that sample a token for it.
        engine_seconds, engine_flops: its share of the steps that computed for it, by their tokens.
        num_known_at_death: its tokens when an engine that computed for it last died; None if none
            did.
    """

    key: str
    token_ids: list[int]
    num_prompt: int
    sampling: RowSampling
    max_tokens: int
    stop_ids: frozenset[int]
    arrived_at: float
    group: Group = field(default_factory=Group)
    index: int = 0
    tenant: str = ""
    priority: int = 0
    expires_at: float = inf
    cache_scope: bytes = b""
    takes_hits: bool = True
    retention: tuple[CacheRange, ...] = ()
    speculates: bool = True
    expected_ids: deque[int] = field(default_factory=deque)
    is_probe: bool = False

    number: int = 0
    row: int | None = None
    max_known: int = 0
    num_slots: int = 0
    num_computed: int = 0
    num_draft_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    refused_from: float = inf
    num_in_flight: int = 0
    num_computing: int = 0
    num_sampling: int = 0
    is_ended: bool = False
    is_demoted: bool = False
    started_at: float | None = None
    num_cached: int = 0
    awaits: "Request | None" = None
    num_awaited: int = 0
    awaits_until: float = inf
    end_awaited: int = 0
    num_passed: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0
    engine_seconds: float = 0.0
    engine_flops: float = 0.0
    num_known_at_death: int | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Tokens that the next step may compute, including one that a step in flight samples."""
        num_tokens = len(self.token_ids) + self.num_sampling
        return num_tokens - self.num_computed - self.num_computing

    @property
    def min_tokens(self) -> int:
        """Tokens to generate before a stop token counts."""
        return self.sampling.min_tokens

    def append(self, run: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append a run of tokens, up to the first one that ends the request.

        Returns:
            What was appended, and why the request has ended, if it has.
        """
        known, expected = self.token_ids, self.expected_ids
        max_known, stop_ids = self.max_known, self.stop_ids
        num_before = len(known)
        for token_id in run:
            known.append(token_id)
            if expected and expected.popleft() != token_id:
                expected.clear()
            if token_id in stop_ids and self.num_generated >= self.min_tokens:
                return run[: len(known) - num_before], "stop"
            if len(known) >= max_known:
                return run[: len(known) - num_before], "length"
        return run, None


class Update(msgspec.Struct, frozen=True, gc=False):
    """Effect of a step on one request. Nothing that it holds may refer to it (`gc`).

    Attributes:
        prompt_offset: the first position that the step computed; `prompt_logprobs` belong to the
            tokens from prompt_offset + 1 on.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    prompt_offset: int
    finish_reason: FinishReason | None
