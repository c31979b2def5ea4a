"""Checks that a draft model has the tokenizer of its target model.

Owns that comparison. Knows nothing about models: the size of their vocabulary is `data`'s.
"""

from pathlib import Path

from charonia.errors import CheckpointError, ConfigError, shown
from charonia.text.tokenizer import Tokenizer


def check_draft_tokenizer(tokenizer: Tokenizer, draft_dir: Path) -> None:
    """Check that each token id is the same token for a model and its draft model.

    Drafts of another tokenizer would not change the text, but hardly any would be right. Ids that
    only one of the two has do not count as a difference. Neither do special tokens, because models
    of one family name reserved tokens differently.

    Args:
        tokenizer: the model's.
        draft_dir: the draft model's checkpoint.

    Raises:
        CheckpointError: the draft model's tokenizer cannot be read.
        ConfigError: an id stands for another token there; the text names the first such id.
    """
    try:
        draft = Tokenizer.from_dir(draft_dir)
    except CheckpointError as error:
        raise CheckpointError(f"the draft model: {error}") from None
    own, other = tokenizer.tokens(), draft.tokens()
    ordinary = (own.keys() & other.keys()) - (tokenizer.special_ids & draft.special_ids)
    different = min((id_ for id_ in ordinary if own[id_] != other[id_]), default=-1)
    if different >= 0:
        raise ConfigError(
            f"the draft model has another tokenizer: token {different} is {shown(other[different])}"
            f" there, but {shown(own[different])} for the model; both must have the same"
        )
