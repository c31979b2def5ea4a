"""The layout of an engine's ranks: parts, stages and process groups.

Owns the arithmetic only. Must not know processes or tensors.
"""

from dataclasses import dataclass

from charonia.config import EngineArgs
from charonia.data.comm import Place


@dataclass(frozen=True)
class Topology:
    """Ranks in rows of parts, one row per stage; see `data.comm`.

    A draft model is split among the first ranks of the first stage, which have all its layers.
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
        """The number of ranks."""
        return self.num_parts * self.num_stages

    def place(self, rank: int) -> Place:
        """A rank's place in the target model."""
        stage, part = divmod(rank, self.num_parts)
        return Place(part, self.num_parts, stage, self.num_stages)

    def draft_place(self, rank: int) -> Place | None:
        """A rank's place in the draft model; None if it has no part of it."""
        return Place(rank, self.num_draft_parts) if rank < self.num_draft_parts else None

    def groups(self) -> dict[str, list[int]]:
        """The ranks of each group of at least two, by name, in the same order on every rank.

        Groups are independent: a late operation in one does not delay the others.
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
    """Name of the group of a stage's parts."""
    return f"parts {stage}"


def entry_group(rank: int) -> str:
    """Name of the group of a rank and the one that sends it hidden states."""
    return f"entry {rank}"
