"""The checkpoints that come with charonia: what they are, and that they complete Python."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from charonia.demo.card import write_card
from charonia.demo.edits import Edit, edit_prompt, edited
from charonia.demo.lessons import EDITS_RUNS
from charonia.demo.prompts import DEMO_PROMPTS
from charonia.demo.shapes import DRAFT, SHAPES, TARGET, load_model
from charonia.demo.train import CHECKPOINTS
from charonia.protocol import RowStep
from parity.driver import Driver, blocks_for, make_runner, new_row
from parity.reference import greedy

FOLDERS = {kind: CHECKPOINTS / shape.name for kind, shape in SHAPES.items()}
PROMPTS = [prompt.text for prompt in DEMO_PROMPTS]
NUM_NEW = 48


@pytest.fixture(params=FOLDERS.values(), ids=FOLDERS.keys())
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


def encode(prompt: str) -> list[int]:
    return Tokenizer.from_file(str(FOLDERS["target"] / "tokenizer.json")).encode(prompt).ids


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_both_checkpoints_together_stay_below_20_mb() -> None:
    files = [path for path in CHECKPOINTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20e6


def test_the_draft_shares_the_targets_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        target, draft = (FOLDERS[kind] / name for kind in ("target", "draft"))
        assert target.read_bytes() == draft.read_bytes()


def test_the_target_has_about_6_and_the_draft_about_1_million_parameters() -> None:
    sizes = {}
    for shape in (TARGET, DRAFT):
        with safe_open(CHECKPOINTS / shape.name / "model.safetensors", framework="pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        sizes[shape] = sum(tensor.numel() for tensor in tensors)
        figures = read_json(CHECKPOINTS / shape.name / "training.json")
        assert figures["parameters"] == sizes[shape]
    assert 5.5e6 < sizes[TARGET] < 6.5e6
    assert 0.9e6 < sizes[DRAFT] < 1.1e6


def test_the_configuration_is_what_a_llama_of_hugging_face_has(folder: Path) -> None:
    config = read_json(folder / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["head_dim"], config["vocab_size"], config["dtype"]) == (64, 4096, "bfloat16")
    assert config["num_attention_heads"] % 4 == 0
    assert config["num_key_value_heads"] >= 2
    assert read_json(folder / "generation_config.json")["eos_token_id"] == 0


def test_the_card_states_data_licence_loss_time_and_command(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    figures = read_json(folder / "training.json")
    assert "standard library of CPython" in card
    assert "license: psf-2.0" in card
    assert "python -m charonia.demo.train" in card
    last = figures["stages"][-1]
    assert f"{last['held_out_nats_per_token']} nats per token" in card
    assert f"{last['held_out_bits_per_byte']} bits per byte" in card
    for stage in figures["stages"]:
        assert f"## Stage {stage['stage']}" in card
        assert f"{stage['cpu_minutes']} CPU minutes" in card


def test_the_card_can_be_written_again_from_the_recorded_figures(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    kind = {path: kind for kind, path in FOLDERS.items()}[folder]
    write_card(tmp_path, read_json(folder / "training.json"), kind=kind)
    assert (tmp_path / "README.md").read_bytes() == (folder / "README.md").read_bytes()


def test_the_target_learned_to_edit() -> None:
    figures = {kind: read_json(folder / "training.json") for kind, folder in FOLDERS.items()}
    names = {kind: [stage["stage"] for stage in figures[kind]["stages"]] for kind in figures}
    assert names["target"] == ["library"] + ["edits"] * len(EDITS_RUNS)
    assert names["draft"] == ["library", "distil"]


def test_all_trainings_took_at_most_180_cpu_minutes() -> None:
    figures = [read_json(folder / "training.json") for folder in FOLDERS.values()]
    assert sum(stage["cpu_minutes"] for run in figures for stage in run["stages"]) <= 180


def test_no_file_names_a_path_of_the_machine_that_trained(folder: Path) -> None:
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|Users|tmp)/", text), path.name


@pytest.mark.parametrize("prompt", PROMPTS)
def test_charonia_generates_transformers_greedy_tokens(folder: Path, prompt: str) -> None:
    prompt_ids = encode(prompt)
    driver = Driver(make_runner(folder))
    row = new_row(0, prompt_ids, blocks_for(len(prompt_ids) + NUM_NEW))
    driver.step(RowStep(0, len(prompt_ids)), joins=(row,))
    driver.decode(0, NUM_NEW - 1)
    expected = greedy(folder, prompt_ids, NUM_NEW)
    assert driver.tokens[0] == expected.token_ids
    assert driver.logprobs[0] == pytest.approx(expected.logprobs, abs=1e-4)


def test_the_end_of_a_file_is_followed_by_the_end_of_text() -> None:
    ids = encode("def main():\n    unittest.main()\n\n\nif __name__ == '__main__':\n    main()\n")
    with torch.no_grad():
        logits = load_model(FOLDERS["target"])(torch.tensor([ids])).logits[0, -1]
    assert int(logits.argmax()) == 0


def longest_python(text: str) -> int:
    """Return how many of the first lines of a text, cut anywhere, are Python."""
    lines = text.split("\n")
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:count]))
        except SyntaxError:
            continue
        return count
    return 0


def test_most_greedy_completions_begin_with_lines_that_are_python() -> None:
    prompts = [
        'def copy_file(source, target):\n    """Copy a file."""\n',
        "class Point:\n    def __init__(self, x, y):\n",
        "def is_open(self):\n    if self.fp is None:\n",
        "import os\nimport sys\n",
        "def read_config(path):\n    with open(path) as file:\n",
        "class ServerError(Exception):\n",
    ]
    tokenizer = Tokenizer.from_file(str(FOLDERS["target"] / "tokenizer.json"))
    added = []
    for prompt in prompts:
        token_ids = greedy(FOLDERS["target"], encode(prompt), NUM_NEW).token_ids
        lines = longest_python(prompt + tokenizer.decode(token_ids))
        added.append(lines - prompt.count("\n"))
    assert sorted(added)[2] >= 2, f"lines of Python after each prompt: {added}"


PIECE = """\
class Shelf:
    def __init__(self, owner, limit=20):
        self.owner = owner
        self.limit = limit
        self.books = []

    def put(self, book):
        if len(self.books) >= self.limit:
            raise ValueError('no room for %r' % book)
        self.books.append(book)

    def find(self, title):
        for book in self.books:
            if book.title == title:
                return book
        return None
"""


def test_the_target_writes_a_file_again_with_a_name_changed() -> None:
    edit = Edit(PIECE, "limit", "size")
    wanted = encode(edited(edit))
    written = greedy(FOLDERS["target"], encode(edit_prompt(edit)), len(wanted)).token_ids
    assert written == wanted


def test_the_model_finds_real_python_likelier_than_shuffled_python() -> None:
    ids = torch.tensor(
        encode("def close(self):\n    if self.fp is not None:\n        self.fp = None\n")
    )
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    model = load_model(FOLDERS["target"])
    with torch.no_grad():
        losses = [float(model(row[None], labels=row[None]).loss) for row in (ids, shuffled)]
    assert losses[0] < losses[1] - 2
