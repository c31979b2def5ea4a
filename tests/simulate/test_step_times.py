"""The model of steps' times: constants, files, and a fit that finds what made the data."""

import random

import msgspec
import pytest

from charonia.errors import ConfigError
from charonia.simulate.step_times import StepClock, StepTimes
from charonia.traces import StepRecord, StepWork, TraceRequest, write_requests


def records_of(times: StepTimes, count: int = 2000, noise: float = 0.0) -> list[StepRecord]:
    """Steps of many sizes, of which every other one was sent while the one before it computed."""
    drawn = random.Random(1)
    records, now = [], 0.0
    for number in range(count):
        rows = drawn.randrange(1, 33)
        tokens = rows + drawn.choice([0, 0, 0, 100, 1000])
        context = rows * drawn.randrange(10, 4000)
        work = StepWork(rows, tokens, context, context * tokens // rows)
        seconds = times.of(work) * drawn.uniform(1 - noise, 1 + noise)
        if number % 2:
            submitted, ended = now - 1e-4, now + times.gap + times.gap_row * rows + seconds
        else:
            submitted = now + times.host + times.host_row * rows
            ended = submitted + times.transit + seconds
        records.append(StepRecord(submitted, ended, seconds, 0, 0, *work))
        now = ended
    return records


TIMES = StepTimes(
    curve=[(1, 0.004), (64, 0.005), (2048, 0.05)],
    context=2e-8,
    pair=1e-10,
    gap=1e-4,
    transit=3e-4,
    host=5e-4,
    host_row=1e-5,
)
SIZES = [(1, 1, 500), (8, 8, 8000), (32, 32, 64_000), (16, 116, 9000), (4, 1004, 5000)]


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_fit_finds_what_made_the_record(noise):
    found = StepTimes.fit(records_of(TIMES, noise=noise))
    for rows, tokens, context in SIZES:
        work = StepWork(rows, tokens, context, context * tokens // rows)
        assert found.of(work) == pytest.approx(TIMES.of(work), rel=0.1)
    assert found.gap == pytest.approx(TIMES.gap, rel=0.01)
    assert found.transit == pytest.approx(TIMES.transit, rel=0.01)
    assert found.host == pytest.approx(TIMES.host, rel=0.01)
    assert found.host_row == pytest.approx(TIMES.host_row, rel=0.01)
    for _, quantiles in found.noise:
        assert max(quantiles) == pytest.approx(1 + noise, abs=0.15)


def test_the_whole_record_takes_as_long_as_it_took():
    records = records_of(TIMES, noise=0.5)
    found = StepTimes.fit(records)
    measured = sum(record.seconds for record in records)
    clock = StepClock(found, seed=0)
    drawn = sum(clock.seconds(record.work) for record in records)
    assert drawn == pytest.approx(measured, rel=0.03)


def test_interruptions_do_not_bend_the_fit():
    records = records_of(TIMES)
    late = [msgspec.structs.replace(one, seconds=one.seconds * 50) for one in records[::100]]
    found = StepTimes.fit(records + late)
    clock = StepClock(msgspec.structs.replace(found, noise=[]), seed=0)
    work = StepWork(8, 8, 8000, 8000)
    assert clock.seconds(work) == pytest.approx(TIMES.of(work), rel=0.7)
    assert max(max(quantiles) for _, quantiles in found.noise) > 10


def test_steps_with_drafts_are_left_out():
    records = records_of(TIMES)
    drafted = [msgspec.structs.replace(one, num_drafts=3, seconds=9.0) for one in records]
    assert StepTimes.fit(records + drafted).of(StepWork(1, 1, 500, 500)) < 0.01
    with pytest.raises(ConfigError, match="0 steps without drafts are too few"):
        StepTimes.fit(drafted)


def test_steps_of_one_size_are_enough():
    records = [StepRecord(n, n + 0.5, 0.01, 0, 0, 4, 4, 100, 100) for n in range(60)]
    found = StepTimes.fit(records)
    assert found.of(StepWork(4, 4, 100, 100)) == pytest.approx(0.01)
    assert found.of(StepWork(8, 8, 100, 200)) == pytest.approx(0.01, rel=0.5)


def test_constants_have_units():
    times = StepTimes.load("step=8ms, token=25us,context=20ns,host=1ms,row=0.5ms")
    assert times.of(StepWork(2, 10, 1000, 0)) == pytest.approx(0.008 + 250e-6 + 20e-6 + 1e-3)
    assert StepClock(times, 0).host_s(7) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "step=8",
        "walk=8ms",
        "step=8ms,",
        "step=ms",
        "step=1e9e9ms",
        "step=1.2.3ms",
        "step=.ms",
        "step=1e400s",
        "step=3601s",
    ],
)
def test_a_wrong_constant_is_named(text):
    with pytest.raises(ConfigError, match="is no constant; accepted are step, token, row"):
        StepTimes.load(text)


def test_a_step_takes_some_time():
    with pytest.raises(ConfigError, match="must take longer than 0 s"):
        StepTimes.load("step=0ms")


def test_a_model_is_read_from_its_file(tmp_path):
    path = tmp_path / "times.json"
    path.write_bytes(msgspec.json.encode(TIMES))
    assert StepTimes.load(str(path)) == TIMES
    path.write_text('{"curve": [[8, 0.1], [4, 0.2]]}')
    with pytest.raises(ConfigError, match=r"times\.json: .*ascending"):
        StepTimes.load(str(path))
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        StepTimes.load(str(tmp_path / "none.json"))


def test_a_record_is_fitted(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records_of(TIMES)))
    assert StepTimes.load(str(path)).gap == pytest.approx(TIMES.gap, rel=0.01)


def test_noise_comes_from_the_seed():
    times = msgspec.structs.replace(TIMES, noise=[(1, [0.5, 1.0, 1.5]), (100, [2.0])])
    work = StepWork(1, 1, 1, 1)

    def draw(seed):
        clock = StepClock(times, seed)
        return [clock.seconds(work) for _ in range(20)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert StepClock(times, 1).seconds(StepWork(1, 200, 1, 1)) == pytest.approx(
        2 * times.of(StepWork(1, 200, 1, 1))
    )


def test_requests_beside_the_steps_say_how_fast_they_were_taken_in(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records_of(TIMES)))
    intake = [0.5] * 5 + [200.0] * 15
    lines = [
        TraceRequest(timestamp=n, input_length=5, output_length=5, intake_ms=intake_ms)
        for n, intake_ms in enumerate(intake)
    ]
    lines.append(TraceRequest(timestamp=30, input_length=5, output_length=0))
    write_requests(tmp_path / "requests.jsonl", lines)
    assert StepTimes.load(str(path)).intake == pytest.approx(0.0005)


def test_a_record_of_steps_is_not_read_as_requests(tmp_path):
    path = tmp_path / "monday.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records_of(TIMES)))
    found = StepTimes.load(str(path))
    assert found.gap == pytest.approx(TIMES.gap, rel=0.01)
    assert found.intake == 0


def test_gaps_grow_with_the_rows():
    times = msgspec.structs.replace(TIMES, gap_row=2e-5)
    found = StepTimes.fit(records_of(times))
    assert found.gap_row == pytest.approx(2e-5, rel=0.1)
    clock = StepClock(found, 0)
    assert clock.gap_s(10) - clock.gap_s(0) == pytest.approx(2e-4, rel=0.1)
