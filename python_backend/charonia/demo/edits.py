"""The task that the target can do: rewrite a piece of Python with one identifier renamed.

Owns the text of such a request, in the one form that the model knows, and makes requests from
a library's sources. Must not know models, nor import anything heavy.

    ### file
    <the piece, whole lines>
    ### rename <old> -> <new>
    ### file
    <the piece again, renamed>            <- written by the model, ended by <|endoftext|>

Both copies follow the same line, so copying begins like repetition (induction; Olsson et al.
2022, arXiv 2209.11895). `###` is rare in Python, so it marks the end of the piece.
"""

import keyword
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

HEADER = "### file\n"
# A new name is used by at least this many files, because common names are easier to spell.
COMMON_IN = 5
IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_]{2,}\b")


class Edit(NamedTuple):
    """A piece of source and the identifier to rename in it."""

    source: str
    old: str
    new: str


def edit_prompt(edit: Edit) -> str:
    """The prompt that asks the model for `edited(edit)`."""
    return f"{HEADER}{_whole_lines(edit.source)}### rename {edit.old} -> {edit.new}\n{HEADER}"


def edited(edit: Edit) -> str:
    """The right answer: the source with every whole word `old` replaced, in comments as well."""
    return _rename(_whole_lines(edit.source), edit.old, edit.new)


def make_edits(
    texts: list[str], *, min_chars: int, max_chars: int, max_disguises: int, seed: int
) -> Iterator[Edit]:
    """Yield endless edits of pieces that are cut from the texts at lines, of all lengths evenly.

    New names are those that COMMON_IN texts use; without any that a piece lacks, none is found.

    Args:
        texts: whole files; longer files give more pieces.
        min_chars, max_chars: length of a piece; it may be shorter at the end of a file.
        max_disguises: further renames in a piece beforehand, so that it cannot be written
            from memory.
    """
    rng = random.Random(seed)
    used = Counter(name for text in texts for name in _identifiers(text))
    names = sorted(name for name, files in used.items() if files >= COMMON_IN)
    lines = [text.splitlines(keepends=True) for text in texts]
    weights = [len(text) for text in texts]
    while True:
        file = rng.choices(lines, weights)[0]
        piece = _cut(file, rng.randrange(len(file)), rng.randint(min_chars, max_chars))
        for _ in range(rng.randint(0, max_disguises)):
            if found := _identifiers(piece):
                piece = _rename(piece, rng.choice(found), rng.choice(names))
        found = _identifiers(piece)
        new = rng.choice(names)
        if found and new not in found:
            yield Edit(piece, rng.choice(found), new)


def _whole_lines(source: str) -> str:
    """Return the source without empty lines around it and with one line end."""
    return source.strip("\n") + "\n"


def _identifiers(text: str) -> list[str]:
    """Return the words that may be renamed, in the order of their first use."""
    return list(dict.fromkeys(filter(_is_name, IDENTIFIER.findall(text))))


def _is_name(word: str) -> bool:
    return not keyword.iskeyword(word) and word not in ("self", "cls")


def _rename(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def _cut(lines: list[str], start: int, max_chars: int) -> str:
    """Return the lines from `start` that fit into `max_chars`."""
    end, total = start, 0
    while end < len(lines) and total + len(lines[end]) <= max_chars:
        total += len(lines[end])
        end += 1
    return "".join(lines[start:end])
