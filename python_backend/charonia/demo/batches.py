"""Training batches and held-out windows, cut from tokenized documents.

Owns the order of the tokens. Must not know text or models.
"""

from collections.abc import Iterator

import torch


def join(documents: list[list[int]]) -> torch.Tensor:
    """Concatenate all documents, int64 [tokens]; each ends with its own end token."""
    return torch.tensor([token for document in documents for token in document])


def training_batches(
    documents: list[list[int]], *, batch_size: int, length: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield endless batches, int64 [batch_size, length + 1]: inputs and, one later, targets.

    Every epoch shuffles the documents and cuts them at other places, so the
    same windows never come twice.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[torch.Tensor] = []
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        tokens = join([documents[index] for index in order])
        offset = int(torch.randint(length, (1,), generator=generator))
        windows = tokens[offset:].unfold(0, length + 1, length)  # [windows, length + 1]
        for index in torch.randperm(len(windows), generator=generator).tolist():
            rows.append(windows[index])
            if len(rows) == batch_size:
                yield torch.stack(rows)
                rows = []


def held_out_windows(documents: list[list[int]], length: int) -> torch.Tensor:
    """Windows int64 [windows, length + 1] that predict each token but the first once."""
    return join(documents).unfold(0, length + 1, length)


def packed_batches(
    documents: Iterator[list[int]], *, batch_size: int, length: int
) -> Iterator[torch.Tensor]:
    """Yield batches int64 [batch_size, length + 1] whose rows each begin with a document.

    What does not fit into a row is cut off, so the last document of a row is seldom complete. A
    document that would fill a row alone is left out.
    """
    rows: list[torch.Tensor] = []
    row: list[int] = []
    for document in documents:
        if len(document) > length:
            continue
        row += document
        if len(row) > length:
            rows.append(torch.tensor(row[: length + 1]))
            row = []
        if len(rows) == batch_size:
            yield torch.stack(rows)
            rows = []
