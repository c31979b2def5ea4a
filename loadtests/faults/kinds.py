"""The kinds of faults: what each breaks, under which arguments of the engine, what it may cost.

Owns the table. Must not know how a fault is brought about, nor how its cost is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

ENTRIES = frozenset({"scheduler", "llm", "generate"})
"""The models that clients call."""

Arguments = Literal["plain", "draft", "suffix", "narrow"]
"""Engine settings: `draft` and `suffix` guess tokens, `narrow` has too few blocks for all."""

Part = Literal["engine", "tokenizer", "postprocessor", "generate", "server"]
"""Part that is lost: the processes of one model, or the whole server."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: on the command line and in the record. title: in tables.
        loses: what does not outlive it.
        delays: entries whose calls wait until it has been mended; others go on as if nothing was.
        max_engines, max_servers: engines, and restarts of the whole server, that it may cost.
        num_kept: processes of which tritonserver keeps what it has for each, see `growth`.
        arguments: of the engine when it comes; one of them is drawn.
        every: it comes in each round of that many; those that take long come less often.
    """

    name: str
    title: str
    loses: Part = "engine"
    delays: frozenset[str] = ENTRIES
    max_engines: int = 1
    max_servers: int = 0
    num_kept: int = 0
    arguments: tuple[Arguments, ...] = ("plain",)
    every: int = 1

    def may_fail(self, entry: str, num_tokens: int) -> bool:
        """Return whether a call that ended before this was mended may have ended with an error.

        Args:
            num_tokens: tokens that had come by then. A call that has one is past the tokenizer.
        """
        if self.loses == "engine" or entry not in self.delays:
            return False
        return num_tokens == 0 or self.loses != "tokenizer"


DEATHS_BY_POISON = 3  # two with all others, and one alone

_ENGINE = (
    Kind("kill", "kill -9"),
    Kind("stop", "SIGSTOP"),
    Kind("exception", "exception in a step"),
    Kind("memory", "out of memory in a step"),
    Kind("poison", "poisoned request", max_engines=DEATHS_BY_POISON),
    # tritonserver 2.51.0 may wait for ever for a process that is killed as it starts.
    Kind("kill-in-recovery", "kill -9, and again while it is loaded", max_engines=2, max_servers=1),
    Kind("kill-in-reload", "kill -9 during a reload", max_engines=2, max_servers=1),
    Kind("kill-in-prefill", "kill -9 during a long prefill"),
    Kind("kill-with-drafts", "kill -9 with speculation", arguments=("draft", "suffix")),
    Kind("kill-when-full", "kill -9 with the KV pool exhausted", arguments=("narrow",)),
)


def _of_process(process: str, **values: Any) -> Iterator[Kind]:
    """A process that is killed, and one that is stopped; `values` are those of both kinds."""
    for name, title in (("kill", "kill -9"), ("stop", "SIGSTOP")):
        yield Kind(f"{name}-{process}", f"{title} of {process}", max_engines=0, **values)


_BESIDE = (
    *_of_process("tokenizer", loses="tokenizer", delays=frozenset({"llm"}), num_kept=2),
    *_of_process("postprocessor", loses="postprocessor", delays=frozenset({"llm"}), num_kept=1),
    # Calls that are open there end with the whole server alone, half a minute later.
    *_of_process(
        "generate", loses="generate", delays=frozenset({"generate"}), max_servers=1, every=4
    ),
)
_SERVER = (
    *_of_process("scheduler", loses="server", max_servers=1, every=2),
    *_of_process("tritonserver", loses="server", max_servers=1, every=2),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_ENGINE, *_BESIDE, *_SERVER)}
"""Kinds by name, in the order of the report."""
