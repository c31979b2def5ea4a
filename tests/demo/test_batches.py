"""What the models are shown: every token, in another order each time, with its successor."""

import itertools

import torch

from charonia.demo.batches import held_out_windows, packed_batches, training_batches

# Token t is followed by t + 1 within a document, so a window shows where it was cut.
DOCUMENTS = [list(range(start, start + 100)) for start in (0, 1000, 2000, 3000)]


def take(count: int, *, seed: int) -> list[torch.Tensor]:
    batches = training_batches(DOCUMENTS, batch_size=2, length=7, seed=seed)
    return list(itertools.islice(batches, count))


def test_the_same_seed_gives_the_same_batches_and_another_one_others() -> None:
    first, again, other = (torch.stack(take(50, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_window_is_a_stretch_of_the_documents_and_one_longer_than_its_inputs() -> None:
    for batch in take(20, seed=0):
        assert batch.shape == (2, 8)
        steps = (batch[:, 1:] - batch[:, :-1]).flatten().tolist()
        assert all(step == 1 or step % 100 == 1 for step in steps)


def test_an_epoch_shows_nearly_every_token_and_the_next_one_cuts_elsewhere() -> None:
    batches_per_epoch = (400 - 7) // 7 // 2
    batches = take(2 * batches_per_epoch, seed=0)
    first, second = torch.cat(batches[:batches_per_epoch]), torch.cat(batches[batches_per_epoch:])
    assert len(first.unique()) > 380
    assert set(first[:, 0].tolist()) != set(second[:, 0].tolist())


def test_held_out_windows_predict_each_token_once() -> None:
    windows = held_out_windows(DOCUMENTS, 7)
    predicted = windows[:, 1:].flatten()
    assert len(predicted.unique()) == len(predicted) == 399 // 7 * 7


def test_packed_rows_begin_with_a_document_and_hold_the_next_ones_as_far_as_they_fit() -> None:
    documents = [[1, 1, 1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]
    batches = packed_batches(iter(documents), batch_size=2, length=4)
    assert next(batches).tolist() == [[1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    assert next(batches, None) is None


def test_a_document_that_would_fill_a_row_alone_is_left_out() -> None:
    documents = [[1] * 5, [2, 2], [3, 3, 3]]
    batches = packed_batches(iter(documents), batch_size=1, length=4)
    assert [batch.tolist() for batch in batches] == [[[2, 2, 3, 3, 3]]]
