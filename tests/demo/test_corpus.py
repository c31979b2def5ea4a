"""The training text is the same for everyone who has the same standard library."""

from pathlib import Path

import pytest

from charonia.demo.corpus import HELD_OUT_ONE_IN, load_corpus, standard_library


def write_library(root: Path, *, reverse: bool = False) -> None:
    names = [f"module_{index}.py" for index in range(3 * HELD_OUT_ONE_IN)]
    for name in reversed(names) if reverse else names:
        (root / name).write_text(f"name = {name!r}\n", encoding="utf-8")


def test_the_order_and_the_split_do_not_depend_on_the_file_system(tmp_path: Path) -> None:
    forwards, backwards = tmp_path / "a", tmp_path / "b"
    for root, reverse in ((forwards, False), (backwards, True)):
        root.mkdir()
        write_library(root, reverse=reverse)
    assert load_corpus(forwards) == load_corpus(backwards)


def test_a_held_out_file_is_not_trained_on(tmp_path: Path) -> None:
    write_library(tmp_path)
    corpus = load_corpus(tmp_path)
    assert corpus.held_out
    assert not set(corpus.train) & set(corpus.held_out)
    assert corpus.num_files == 3 * HELD_OUT_ONE_IN


@pytest.mark.parametrize(
    "name",
    [
        "site-packages/numpy/core.py",
        "test/test_ast.py",
        "ctypes/test/test_arrays.py",
        "encodings/cp037.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
    ],
)
def test_a_file_that_is_no_library_code_is_skipped(tmp_path: Path, name: str) -> None:
    write_library(tmp_path)
    before = load_corpus(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("secret = 1\n", encoding="utf-8")
    assert load_corpus(tmp_path) == before


def test_what_is_empty_not_utf_8_or_there_already_is_skipped(tmp_path: Path) -> None:
    write_library(tmp_path)
    before = load_corpus(tmp_path)
    (tmp_path / "zz_latin.py").write_bytes(b"name = '\xe4'\n")
    (tmp_path / "zz_copy.py").write_bytes((tmp_path / "module_0.py").read_bytes())
    (tmp_path / "zz_empty.py").touch()
    assert load_corpus(tmp_path) == before


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python sources"):
        load_corpus(tmp_path)


def test_the_standard_library_is_large_enough_to_learn_from() -> None:
    corpus = load_corpus(standard_library())
    assert corpus.num_bytes > 5_000_000
    assert 0 < len(corpus.held_out) < corpus.num_files / 10
