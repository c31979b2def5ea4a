"""What is recorded of requests and steps, and that it harms nobody."""

import errno
import json
import os
import time
from io import FileIO
from pathlib import Path

import pytest

from charonia.control import KVPool, Limits, Scheduler
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.core.recording.recorder import REQUESTS, STEPS, Recorder, RecordingExecutor
from charonia.errors import ConfigError, QueueFullError, RequestCancelledError
from charonia.protocol import SamplingParams
from charonia.traces import StepRecord, read_requests, read_steps
from support.echo import EchoExecutor
from support.stepping import make_request


def request(prompt_ids=None, **params) -> GenerationRequest:
    prompt_ids = list(range(200)) if prompt_ids is None else prompt_ids
    return GenerationRequest(key="a", prompt_ids=prompt_ids, params=SamplingParams(**params))


TIMING = {"queue_seconds": 0.25, "first_token_seconds": 0.5, "total_seconds": 1.5}
STEP = StepRecord(1.0, 2.0, 0.5, 1, 0, 1, 1, 1, 1)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make_recorder(tmp_path, lines):
    def make(max_bytes: int = 10**6) -> Recorder:
        return Recorder(tmp_path / "record", max_bytes, log=lines.append)

    return make


def test_a_request_is_one_line(make_recorder, tmp_path):
    recorder = make_recorder()
    wanted = request(max_tokens=9, tenant="t", priority=2, deadline_ms=700)
    followed = recorder.follow(wanted, time.monotonic() - 2.0)
    followed.note_taken_in()
    chunks = [
        Chunk("a", "x", (1, 2)),
        Chunk("a", "y", (3,), finish_reason="stop", timing=dict(TIMING)),
    ]
    for chunk in chunks:
        followed.note(chunk)
    recorder.close()
    (line,) = read_requests(tmp_path / "record" / REQUESTS)
    assert (line.input_length, line.output_length, line.max_tokens) == (200, 3, 9)
    assert (line.tenant, line.priority, line.deadline_ms) == ("t", 2, 700)
    assert (line.outcome, line.queue_ms, line.ttft_ms, line.total_ms) == ("stop", 250, 500, 1500)
    assert line.intake_ms == pytest.approx(2000, abs=500)
    assert (len(line.hash_ids), line.hash_block_length) == (3, 64)


def test_no_token_is_written(make_recorder, tmp_path):
    recorder = make_recorder()
    secret = 987654321
    recorder.follow(request([secret] * 200), time.monotonic()).note(
        Chunk("a", "secret text", (secret,), finish_reason="stop")
    )
    recorder.close()
    written = (tmp_path / "record" / REQUESTS).read_text()
    assert str(secret) not in written
    assert "secret" not in written


def test_ids_are_equal_where_prefixes_are(make_recorder, tmp_path):
    recorder = make_recorder()
    prompts = [list(range(200)), [*range(64), *range(500, 636)], list(range(1, 201))]
    wanted = [request(prompt) for prompt in prompts] + [request(prompts[0], tenant="other")]
    wanted.append(request(prompts[0], cache_salt="salt"))
    for one in wanted:
        recorder.follow(one, time.monotonic()).note(Chunk("a", finish_reason="stop"))
    recorder.close()
    ids = [line.hash_ids for line in read_requests(tmp_path / "record" / REQUESTS)]
    assert ids[0][0] == ids[1][0]
    assert ids[0][1] != ids[1][1]
    assert len({one[0] for one in ids[1:]}) == 4


def test_refusals_and_errors(make_recorder, tmp_path):
    recorder = make_recorder()
    refused = recorder.follow(request(), time.monotonic())
    refused.note_refused(QueueFullError.of("3"))
    recorder.follow(request(), time.monotonic()).note(
        Chunk("a", error=RequestCancelledError("gone"))
    )
    recorder.close()
    outcomes = [line.outcome for line in read_requests(tmp_path / "record" / REQUESTS)]
    assert outcomes == ["queue_full", "cancelled"]


@pytest.mark.parametrize(("other", "outcome"), [("length", "length"), ("cancelled", "cancelled")])
def test_a_request_with_a_cancelled_sample_ended_as_the_others_did(
    make_recorder, tmp_path, other, outcome
):
    recorder = make_recorder()
    followed = recorder.follow(request(n=2), time.monotonic())
    followed.note(Chunk("a", "x", (1,), finish_reason=other, index=1, num_open=1))
    followed.note(Chunk("a", "y", (2, 3), finish_reason="cancelled"))
    recorder.close()
    (line,) = read_requests(tmp_path / "record" / REQUESTS)
    assert (line.outcome, line.output_length) == (outcome, 3)


@pytest.mark.parametrize("torn", [b"[1.0, 2.", b"[1.0," + b" " * 200_000])
def test_a_line_that_was_not_finished_is_left_out_when_a_record_goes_on(
    make_recorder, tmp_path, torn
):
    path = tmp_path / "record" / STEPS
    for _ in range(2):
        recorder = make_recorder()
        recorder.note_step(STEP)
        recorder.close()
        with path.open("ab") as file:
            file.write(torn)
    assert len(read_steps(path)) == 2
    path.write_bytes(torn)
    make_recorder().close()
    assert path.read_bytes() == b""


def test_a_record_goes_on_and_ends_at_its_limit(make_recorder, tmp_path, lines):
    first = make_recorder()
    first.note_step(STEP)
    first.close()
    size = (tmp_path / "record" / STEPS).stat().st_size
    second = make_recorder(max_bytes=3 * size + 1)
    for _ in range(10):
        second.note_step(STEP)
    second.flush()
    assert len(read_steps(tmp_path / "record" / STEPS)) == 4
    assert lines == ['recording_stopped level=warning reason="record_max_bytes are written"']
    second.close()


def test_lines_are_written_every_second(make_recorder, tmp_path):
    recorder = make_recorder()
    path = tmp_path / "record" / STEPS
    recorder.note_step(STEP)
    recorder.flush(now=0.0)
    assert path.read_bytes() == b""
    recorder.flush(now=1e12)
    assert json.loads(path.read_bytes()) == [1.0, 2.0, 0.5, 1, 0, 1, 1, 1, 1]
    recorder.close()


def test_what_an_older_scheduler_writes_meanwhile_is_kept(make_recorder, tmp_path, monkeypatch):
    class Shared(FileIO):
        def read(self, size=-1):
            data = super().read(size)
            older.note_step(STEP)
            older.flush()
            return data

    older = make_recorder()
    older.note_step(STEP)
    older.flush()
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Shared(path, "a+"))
    make_recorder().close()
    monkeypatch.undo()
    older.close()
    assert len(read_steps(tmp_path / "record" / STEPS)) == 2


def test_a_full_disk_ends_the_record_alone(make_recorder, lines):
    recorder = make_recorder()
    os.dup2(os.open("/dev/full", os.O_WRONLY), recorder._files[STEPS].fileno())
    recorder.note_step(STEP)
    recorder.flush()
    assert lines == ['recording_stopped level=warning reason="No space left on device"']
    recorder.note_step(STEP)
    recorder.close()


def test_a_file_that_cannot_even_be_closed_ends_the_record_alone(make_recorder, lines):
    """As on a file system over the network, which writes when a file is closed."""

    class Full:
        def write(self, data):
            return len(data)

        def close(self):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    recorder = make_recorder(max_bytes=1)
    for file in recorder._files.values():
        file.close()
    recorder._files = {name: Full() for name in recorder._files}
    recorder.note_step(STEP)
    assert lines == ['recording_stopped level=warning reason="record_max_bytes are written"']
    recorder.note_step(STEP)
    recorder.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told_of(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"record_dir: .* cannot be written: Permission denied"):
        Recorder(tmp_path / "record", 1000, log=print)


def test_a_file_in_place_of_the_folder_is_told_of(tmp_path):
    (tmp_path / "record").write_text("")
    with pytest.raises(ConfigError, match=r"record_dir: .* cannot be written: "):
        Recorder(tmp_path / "record", 1000, log=print)


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_are_recorded_with_their_work(make_recorder, tmp_path, overlaps):
    """A prompt of 8 tokens in steps of 6, and then token by token."""
    recorder = make_recorder()
    now = iter(range(1000))
    engine = EchoExecutor(num_blocks=17, block_size=4, max_num_seqs=2, max_num_batched_tokens=6)
    executor = RecordingExecutor(engine, recorder, lambda: float(next(now)))
    assert executor.open(replace=False, on_done=lambda: None).is_done
    limits = Limits(17, 4, 64, 2, 6, async_scheduling=overlaps)
    scheduler = Scheduler(limits, KVPool(b"test"))
    scheduler.add(make_request("a", max_tokens=4))
    pending = []
    while scheduler.num_live:
        while len(pending) < limits.max_steps_in_flight and (plan := scheduler.plan(0.0)):
            pending.append(executor.submit(plan))
        scheduler.apply(pending.pop(0).result(None), 0.0)
    executor.check()
    executor.close()
    recorder.close()
    steps = read_steps(tmp_path / "record" / STEPS)
    works = [tuple(step.work) for step in steps]
    assert works == [(1, 6, 6, 21), (1, 2, 8, 15), (1, 1, 9, 9), (1, 1, 10, 10), (1, 1, 11, 11)]
    assert [step.num_joins for step in steps] == [1, 0, 0, 0, 0]
    assert all(step.submitted_at < step.ended_at for step in steps)
