"""Who of an engine's ranks is where, and which of them exchange what.

Owns the arithmetic alone. Must not know processes or tensors.
"""

from dataclasses import dataclass

from charonia.config import EngineArgs
from charonia.data.comm import Place


@dataclass(frozen=True)
class Topology:
    """Ranks in rows of parts, one row per stage; see `data.comm`.

    The draft model, where there is one, is split among the first ranks of the first stage, and all
    of its layers are there.
    """

    num_parts: int
    num_stages: int
    num_draft_parts: int

    @classmethod
    def of(cls, args: EngineArgs) -> "Topology":
        """Read it from an engine's arguments."""
        has_draft = args.speculative_config is not None and args.speculative_config.has_draft_model
        return cls(
            num_parts=args.tensor_parallel_size,
            num_stages=args.pipeline_parallel_size,
            num_draft_parts=args.draft_ranks if has_draft else 0,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.num_parts * self.num_stages

    def place(self, rank: int) -> Place:
        """Where a rank is in the target."""
        stage, part = divmod(rank, self.num_parts)
        return Place(part, self.num_parts, stage, self.num_stages)

    def draft_place(self, rank: int) -> Place | None:
        """Where it is in the draft model, None where it has none of it."""
        return Place(rank, self.num_draft_parts) if rank < self.num_draft_parts else None

    def groups(self) -> dict[str, list[int]]:
        """Name the groups of two ranks and more, in an order that is the same on every rank.

        Each has a stream of operations of its own, so one that is late delays no other.
        """
        parts = self.num_parts
        rows = [list(range(stage * parts, (stage + 1) * parts)) for stage in range(self.num_stages)]
        groups = {parts_group(stage): row for stage, row in enumerate(rows)}
        for stage in range(1, self.num_stages):
            for rank in rows[stage]:
                groups[entry_group(rank)] = [rank - parts, rank]
        groups[LOGITS_GROUP] = sorted({0, rows[-1][0]})
        groups[DRAFT_GROUP] = list(range(self.num_draft_parts))
        return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


LOGITS_GROUP = "logits"
DRAFT_GROUP = "draft"


def parts_group(stage: int) -> str:
    """The parts of a stage."""
    return f"parts {stage}"


def entry_group(rank: int) -> str:
    """A rank behind the first stage, and the one that it gets hidden states from."""
    return f"entry {rank}"
