"""Requests to edit a piece of source: their text, their answers, and how they are made up."""

import itertools
import subprocess
import sys

from charonia.demo.edits import Edit, edit_prompt, edited, make_edits

FUNCTIONS = "".join(
    f"def first_{word}(value):\n    return value + other_{word}\n" for word in "abcdefgh"
)
TEXTS = [f"{FUNCTIONS}module_{word} = 1\n" for word in "abcde"]


def take(count: int, *, seed: int = 0, max_disguises: int = 0) -> list[Edit]:
    edits = make_edits(TEXTS, min_chars=20, max_chars=150, max_disguises=max_disguises, seed=seed)
    return list(itertools.islice(edits, count))


def test_the_prompt_holds_the_piece_then_the_instruction_and_ends_as_it_began() -> None:
    assert edit_prompt(Edit("\nold = 1\nprint(old)\n\n", "old", "new")) == (
        "### file\nold = 1\nprint(old)\n### rename old -> new\n### file\n"
    )


def test_the_answer_renames_whole_words_and_nothing_else() -> None:
    edit = Edit("old = older + self.old  # old\n", "old", "new")
    assert edited(edit) == "new = older + self.new  # new\n"


def test_an_answer_is_the_prompts_piece_where_the_new_name_is_the_old_one() -> None:
    edit = Edit("def old():\n    pass", "old", "old")
    assert edit_prompt(edit).count(edited(edit)) == 1


def test_the_same_seed_makes_the_same_edits_and_another_one_others() -> None:
    assert take(20, seed=1) == take(20, seed=1)
    assert take(20, seed=1) != take(20, seed=2)


def test_a_piece_is_whole_lines_of_a_text_and_not_too_long() -> None:
    for edit in take(50):
        assert any(edit.source in text for text in TEXTS)
        assert edit.source.endswith("\n")
        assert len(edit.source) <= 150


def test_a_disguised_piece_has_names_that_its_text_has_not() -> None:
    edits = take(50, max_disguises=4)
    assert any(edit.source not in text for edit in edits for text in TEXTS)


def test_a_new_name_is_one_that_many_files_use() -> None:
    assert not any(edit.new.startswith("module_") for edit in take(200))


def test_an_edit_changes_its_piece_to_a_name_that_was_not_there() -> None:
    for edit in take(50, max_disguises=4):
        assert edit.new not in edit.source.split()
        assert edited(edit) != edit.source
        assert not {"def", "return"} & {edit.old, edit.new}


def test_asking_for_an_edit_loads_no_torch() -> None:
    code = "import sys, charonia.demo.edits; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
