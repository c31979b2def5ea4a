"""`charonia replay`: what it prints, and what it refuses."""

import json

import msgspec
import pytest

from charonia.core.recording.journal import FRAME, HEADER, Planned
from charonia.launch.commands.cli import main
from charonia.simulate.replay import read_journal
from core.bench import Bench
from support.journals import open_journal


@pytest.fixture
def journal(tmp_path):
    """The path of a run's journal: two requests, 21 plans."""
    journal = open_journal(tmp_path)
    bench = Bench(journal=journal)
    bench.add("a")
    bench.run(1)
    bench.add("b")
    bench.run()
    journal.close()
    (path,) = tmp_path.iterdir()
    return path


def test_a_run_that_is_equal_says_so(journal, capsys):
    assert main(["replay", str(journal)]) == 0
    text = capsys.readouterr().out
    assert "plans for 2 requests by 1 schedulers" in text
    assert text.endswith("all plans are equal, byte for byte\n")


def test_the_first_difference_is_printed_and_is_a_failure(journal, capsys):
    entries = list(read_journal(journal))
    place = max(i for i, one in enumerate(entries) if isinstance(one, Planned) and one.plan)
    plan = msgspec.structs.replace(entries[place].plan, leaves=[7, 0])
    entries[place] = msgspec.structs.replace(entries[place], plan=plan)
    frames = map(msgspec.msgpack.encode, entries)
    journal.write_bytes(HEADER + b"".join(FRAME.pack(len(one)) + one for one in frames))
    assert main(["replay", str(journal)]) == 1
    captured = capsys.readouterr()
    assert "are equal" not in captured.out
    assert "charonia: the first difference:\nplan " in captured.err
    assert "\n  plan.leaves: [7, 0] when recorded, [0] now\n" in captured.err


def test_plans_are_shown_by_their_numbers(journal, capsys):
    assert main(["replay", str(journal), "--show", "2:4"]) == 0
    *lines, _, _ = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["number"] for line in lines] == [2, 3, 4]
    assert json.loads(lines[0])["plan"]["step_id"] == 1


@pytest.mark.parametrize(
    ("name", "reason"), [("none", "cannot be read"), ("text", "is no journal")]
)
def test_what_cannot_be_replayed_is_one_line(tmp_path, capsys, name, reason):
    (tmp_path / "text").write_text("a text\n")
    assert main(["replay", str(tmp_path / name)]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "charonia: " in line)
    assert reason in line
