"""Suffix decoding: drafts are copied from behind an earlier occurrence of a request's suffix.

Owns a suffix index per live request (its prompt and output) and one per cache scope (responses of
requests that ended). Knows nothing about how drafts are verified, or when drafting pays off.

It follows SuffixDecoding (Oliaro, Jia, Campos, Qiao 2024, arXiv 2411.04975): there are two indices,
the longer match wins, and a draft is at most as long as its match (their maximal speculation
factor, 1 here). Replayed over source code and prose, the last token of such a draft is right one
time in 4 to 10, at any length. Unlike there, an index is a suffix automaton, and a draft is the
most recent continuation, not the most frequent one.

    responses of the scope    [ r r r r ][ r r r r r r ]        a draft ends with its response
                                    └─ match ─┘└ draft
    tokens of the request     [ p p p p p p g g g g ]            or copies the request itself
                                  └─ match ─┘└ draft
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from charonia.control.drafts.ngram import MAX_CATCH_UP, MIN_CATCH_UP, continuation
from charonia.control.state.request import Request

# A cursor that is further behind restarts this many tokens before the end; longer matches gain
# nothing.
MAX_CURSOR_LAG = 64

# Shorter responses are hardly ever useful as a template.
MIN_RESPONSE_TOKENS = 8

# An index takes about 250 bytes per token, a scope of two generations about 16 MiB, and all scopes
# 0.5 GiB. When a generation is full, the older one is dropped as a whole, in about 3 ms.
MAX_GENERATION_TOKENS = 32_768
MAX_SCOPES = 32

# Responses are indexed during the next steps, as many in each as MAX_CATCH_UP allows. If there are
# no steps for long, the oldest are dropped.
MAX_UNINDEXED = 256

# Links that are followed for a token to update where its suffixes occurred last. Source code and
# prose have 3 to 6 of them. So "most recent" is exact except in very repetitive texts, where an
# older occurrence mostly continues in the same way.
MAX_RENEWED = 8

_ROOT = 0
_NO_STATE = -1
_NO_TOKEN = -1  # no edge yet; between responses: not a token id
_NEVER = -1


class SuffixAutomaton:
    """All substrings of some texts, each with the latest position at which a token followed it.

    The online suffix automaton (Blumer et al. 1985; over several texts as in Mohri, Moreno,
    Weinstein 2009): amortized O(1) per token, at most 2 states per token, about 1.4 in practice.
    A state is an index into parallel lists. Its first edge is kept in such lists, too, because most
    states have no other: this takes half the memory of a dict per state, at the same speed.

    A state represents the suffixes of its longest string that are longer than its link's longest
    string. The link represents the longest shorter suffix that ended in more places.
    """

    __slots__ = (
        "_continued_at",
        "_first_state",
        "_first_token",
        "_last",
        "_lengths",
        "_links",
        "_more_edges",
        "num_tokens",
    )

    def __init__(self) -> None:
        self.num_tokens = 0
        self._last = _ROOT
        self._lengths = [0]
        self._links = [_NO_STATE]
        self._continued_at = [_NEVER]
        self._first_token = [_NO_TOKEN]
        self._first_state = [_NO_STATE]
        self._more_edges: dict[int, dict[int, int]] = {}

    def start_text(self) -> None:
        """Begin another text; takes one position."""
        self._last = _ROOT
        self.num_tokens += 1

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens to the current text."""
        lengths, links, continued_at = self._lengths, self._links, self._continued_at
        first_token, first_state, more = self._first_token, self._first_state, self._more_edges
        last = self._last
        for position, token in enumerate(token_ids, self.num_tokens):
            # Go from the whole text to ever shorter suffixes. Those that this token never followed
            # get an edge to the new state; stop at the first one that it did follow.
            new = len(lengths)
            state = last
            while state != _NO_STATE:
                if first_token[state] == token:
                    target = first_state[state]
                    break
                if first_token[state] == _NO_TOKEN:
                    first_token[state] = token
                    first_state[state] = new
                elif state not in more:
                    more[state] = {token: new}
                elif token in more[state]:
                    target = more[state][token]
                    break
                else:
                    more[state][token] = new
                continued_at[state] = position
                state = links[state]
            else:
                target = _ROOT
            if state != last:
                self._append(lengths[last] + 1)
            if state != _NO_STATE and lengths[target] != lengths[state] + 1:
                target = self._split(state, token, target)
            if state == last:  # another text began like this one
                last = target
            else:
                links[new] = target
                last = new
            for _ in range(MAX_RENEWED):
                if state == _NO_STATE:
                    break
                continued_at[state] = position
                state = links[state]
        self._last = last
        self.num_tokens += len(token_ids)

    def repeated(self) -> tuple[int, int]:
        """The longest suffix of a single non-empty text that occurred in it before.

        Returns:
            The suffix's length, 0 for none, and the position after its latest earlier occurrence.
        """
        state = self._links[self._last]
        return self._lengths[state], self._continued_at[state]

    def settle(self, state: int, length: int) -> int:
        """The state that now represents a string of `length` that `state` represented before."""
        while state != _ROOT and length <= self._lengths[self._links[state]]:
            state = self._links[state]
        return state

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extend a match by `token`: find its longest suffix that, with the token, is a substring.

        Args:
            state: state of the matched string, from `settle`. length: length of the string.

        Returns:
            State and length of the suffix with the token; the root and 0 for none.
        """
        while True:
            if self._first_token[state] == token:
                return self._first_state[state], length + 1
            target = self._more_edges.get(state, {}).get(token)
            if target is not None:
                return target, length + 1
            if state == _ROOT:
                return _ROOT, 0
            state = self._links[state]
            length = self._lengths[state]

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """Length of the longest suffix of a match that a token followed, and that position."""
        while state != _ROOT and self._continued_at[state] == _NEVER:
            state = self._links[state]
            length = self._lengths[state]
        return length, self._continued_at[state]

    def _append(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(_NO_STATE)
        self._continued_at.append(_NEVER)
        self._first_token.append(_NO_TOKEN)
        self._first_state.append(_NO_STATE)
        return len(self._lengths) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the strings of `state` plus `token`, so far part of `target`, their own state."""
        clone = self._append(self._lengths[state] + 1)
        self._continued_at[clone] = self._continued_at[target]
        self._first_token[clone] = self._first_token[target]
        self._first_state[clone] = self._first_state[target]
        if target in self._more_edges:
            self._more_edges[clone] = self._more_edges[target].copy()
        self._links[clone] = self._links[target]
        self._links[target] = clone
        while state != _NO_STATE:
            if self._first_token[state] == token:
                if self._first_state[state] != target:
                    break
                self._first_state[state] = clone
            else:
                if self._more_edges[state][token] != target:
                    break
                self._more_edges[state][token] = clone
            state = self._links[state]
        return clone


@dataclass(slots=True)
class _Cursor:
    """A match of the last `length` of a request's first `num_read` tokens."""

    num_read: int
    state: int = _ROOT
    length: int = 0


class _Generation:
    """Responses of one scope, and how far the end of each live request matches them.

    A match is as long as possible, up to MAX_CURSOR_LAG tokens. Only if a later response would have
    made it longer, it grows from the shorter match on.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._automaton = SuffixAutomaton()
        self._cursors: dict[Request, _Cursor] = {}

    def has_room(self, num_tokens: int) -> bool:
        """Return whether a response of `num_tokens` tokens fits."""
        return len(self._token_ids) + num_tokens < MAX_GENERATION_TOKENS

    def add(self, response: list[int]) -> None:
        """Index a response."""
        self._automaton.extend(response)
        self._automaton.start_text()
        self._token_ids += response
        self._token_ids.append(_NO_TOKEN)

    def match(self, request: Request) -> tuple[int, int]:
        """Length of the longest suffix of the request that continues here, and the position."""
        automaton, token_ids = self._automaton, request.token_ids
        cursor = self._cursors.get(request)
        if cursor is None or len(token_ids) - cursor.num_read > MAX_CURSOR_LAG:
            cursor = _Cursor(max(0, len(token_ids) - MAX_CURSOR_LAG))
            self._cursors[request] = cursor
        state, length = automaton.settle(cursor.state, cursor.length), cursor.length
        for token in token_ids[cursor.num_read :]:
            state, length = automaton.advance(state, length, token)
        cursor.num_read, cursor.state, cursor.length = len(token_ids), state, length
        return automaton.continued(state, length)

    def draft(self, start: int, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens from `start` on, up to the end of its response."""
        draft_ids = self._token_ids[start : start + num_tokens]
        if _NO_TOKEN in draft_ids:
            del draft_ids[draft_ids.index(_NO_TOKEN) :]
        return draft_ids

    def forget(self, request: Request) -> None:
        """Drop the request's cursor."""
        self._cursors.pop(request, None)


class SuffixDrafter:
    """Drafts what followed the longest suffix of a request, in itself or in its scope's responses.

    On one core of a server it was measured to take, per token, 1.2 us to index a prompt or a
    response, and 0.4 us to match against responses. A proposal for one new token takes 3 to 5 us.
    """

    def __init__(self) -> None:
        self._own: dict[Request, SuffixAutomaton] = {}
        self._scopes: OrderedDict[bytes, list[_Generation]] = OrderedDict()  # newest first
        self._ended: deque[tuple[bytes, list[int]]] = deque(maxlen=MAX_UNINDEXED)
        self._allowance = MAX_CATCH_UP

    def begin_step(self) -> None:
        """Index whole responses of requests that ended, until the step's allowance is used."""
        self._allowance = MAX_CATCH_UP
        while self._ended and self._allowance > 0:
            scope, response = self._ended.popleft()
            self._generation_for(scope, len(response)).add(response)
            self._allowance -= len(response)

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` (>= 1) token ids that may follow; none if nothing matches."""
        length, start = self._repeated(request)
        source = None
        for generation in self._used_scope(request.cache_scope):
            found_length, found_start = generation.match(request)
            if found_length > length:
                length, start, source = found_length, found_start, generation
        num_tokens = min(max_tokens, length)
        if not num_tokens:
            return []
        if source is None:
            return continuation(request.token_ids, start, num_tokens)
        return source.draft(start, num_tokens)

    def forget(self, request: Request) -> None:
        """Drop the request's index, and keep its response as a template for its scope."""
        self._own.pop(request, None)
        for generation in self._used_scope(request.cache_scope):
            generation.forget(request)
        if request.num_generated >= MIN_RESPONSE_TOKENS:
            end = request.num_prompt + MAX_GENERATION_TOKENS - 1
            response = request.token_ids[request.num_prompt : end]
            self._ended.append((request.cache_scope, response))

    def forget_ended(self) -> None:
        """Drop all responses."""
        self._scopes.clear()
        self._ended.clear()

    def _repeated(self, request: Request) -> tuple[int, int]:
        """Longest suffix that occurred in the request before; none until its index is complete."""
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = SuffixAutomaton()
        end = own.num_tokens + max(self._allowance, MIN_CATCH_UP)
        new = request.token_ids[own.num_tokens : end]
        own.extend(new)
        self._allowance -= len(new)
        return own.repeated() if own.num_tokens == len(request.token_ids) else (0, 0)

    def _used_scope(self, name: bytes) -> list[_Generation]:
        generations = self._scopes.get(name)
        if generations is None:
            return []
        self._scopes.move_to_end(name)
        return generations

    def _generation_for(self, scope: bytes, num_tokens: int) -> _Generation:
        """The generation for a response: the scope's newest, or a new one if that is full."""
        generations = self._scopes.setdefault(scope, [])
        if not generations or not generations[0].has_room(num_tokens):
            generations.insert(0, _Generation())
            del generations[2:]
        if len(self._scopes) > MAX_SCOPES:
            self._scopes.popitem(last=False)
        return generations[0]
