"""What is made of a fault campaign: verdicts, summary, tables, the record and the picture."""

import dataclasses
import json

import pytest

from faults.footprint import Footprint
from faults.lanes import WAYS_IN, Answer, make_requests
from faults.outcome import MAX_SHM_BYTES_PER_DEATH, FaultRecord, Outcome, Spread
from faults.plot import write_plot
from faults.report import Report, as_markdown
from faults.strikes import KINDS
from support.live_stream import WRONG_ANSWER

AT_REST = Footprint({"engine": 1, "scheduler": 1, "tritonserver": 1}, 2**20, 2**26, 9, 16)
DEATHS = {"kill": 1, "stop": 1, "exception": 0, "memory": 0, "poison": 3}
ABOUT = {
    "date": "2026-11-22T00:00:00",
    "machine": {"CPU(s)": "2"},
    "streams": 16,
    "tensor_parallel_size": 2,
}


def fault(number, kind, recovery=(1.0, 2.0), **changes):
    record = FaultRecord(
        number=number,
        kind=kind,
        victim=None if kind == "poison" else number % 2,
        at=10.0 * number,
        pause=1.0,
        num_live=16,
        num_deaths=DEATHS[kind],
        has_struck=True,
        is_answered_right=True,
        recovery=recovery,
        hanging=(),
        shm_bytes=2**20,
        scheduler_rss_bytes=2**26,
    )
    return dataclasses.replace(record, **changes)


def answer(**changes):
    return dataclasses.replace(Answer(3, 100.0, 300, 2, None, equals=True), **changes)


def outcome(**changes):
    """A campaign of ten faults, two of each kind, in which all went well."""
    faults = [
        fault(number, kind, (0.1 * number, 0.5 * number))
        for number, kind in enumerate([*KINDS] * 2, 1)
    ]
    good = Outcome(
        len(faults),
        faults,
        [answer() for _ in range(40)],
        idle={"charonia_requests_running": 0.0},
        before=AT_REST,
        after=AT_REST,
    )
    return dataclasses.replace(good, **changes)


def failed(seen):
    return [verdict.what for verdict in seen.verdicts() if not verdict.holds]


def test_all_holds_when_all_went_well():
    assert failed(outcome()) == []


def with_fault(**changes):
    return {"faults": [*outcome().faults[:-1], fault(10, "poison", **changes)]}


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("every fault struck", with_fault(has_struck=False)),
        ("every fault struck", {"num_asked": 11, "stopped_by": "the server has ended"}),
        ("no fault cost more engines than it must", with_fault(num_deaths=4)),
        (
            "poisoned requests failed, and alone",
            {"faults": [fault(number, "kill") for number in range(1, 11)]},
        ),
        (
            "no leaked open file of the scheduler",
            {"after": dataclasses.replace(AT_REST, scheduler_fds=AT_REST.scheduler_fds + 9)},
        ),
        (
            "no leaked thread of the scheduler",
            {
                "after": dataclasses.replace(
                    AT_REST, scheduler_threads=AT_REST.scheduler_threads + 5
                )
            },
        ),
        ("no request lost", {"answers": [answer(), answer(error="unavailable")]}),
        ("no request answered twice", {"answers": [answer(), answer(error=f"{WRONG_ANSWER}x")]}),
        ("no stream hung", with_fault(hanging=(4,))),
        ("no stream hung", {"hanging": [4]}),
        (
            "every stream equal to its undisturbed run",
            {"answers": [answer(), answer(equals=False)]},
        ),
        ("poisoned requests failed, and alone", with_fault(is_answered_right=False)),
        ("no leaked block, nothing running", {"idle": {"charonia_requests_running": 1.0}}),
        ("no leaked block, nothing running", {"idle": {}}),
        ("nothing left after the server's end", {"left": ["/dev/shm/x"]}),
        (
            "no leaked process",
            {"after": dataclasses.replace(AT_REST, processes=AT_REST.processes | {"engine": 2})},
        ),
        ("no leaked process", {"after": None}),
    ],
)
def test_each_thing_that_goes_wrong_is_seen_by_its_own_verdict(what, changes):
    assert failed(outcome(**changes)) == [what]


def test_without_an_answer_nothing_is_shown():
    assert failed(outcome(answers=[])) == [
        "no request lost",
        "every stream equal to its undisturbed run",
    ]


def test_triton_may_leave_some_shared_memory_for_each_death():
    num_deaths = 2 * sum(DEATHS.values())
    most = AT_REST.shm_bytes + MAX_SHM_BYTES_PER_DEATH * num_deaths
    assert failed(outcome(after=dataclasses.replace(AT_REST, shm_bytes=most))) == []
    above = dataclasses.replace(AT_REST, shm_bytes=most + 1)
    assert failed(outcome(after=above)) == ["no leaked shared memory but what Triton leaves"]


def test_recovery_is_summed_up_by_kind():
    summary = outcome().summary()
    assert list(summary) == list(KINDS)
    kill = summary["kill"]  # faults 1 and 6
    assert kill.count == 2
    assert kill.first.median == pytest.approx(0.35)
    assert kill.last.max == pytest.approx(3.0)


def test_a_fault_from_which_no_stream_recovered_has_no_recovery_time():
    seen = outcome(faults=[fault(1, "kill", recovery=(), hanging=(0,))])
    assert seen.summary() == {}
    assert "no stream hung" in failed(seen)


def test_the_90th_percentile_is_the_nearest_value_that_occurs():
    assert Spread.of([float(value) for value in range(1, 11)]) == Spread(5.5, 9.0, 10.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_the_tables_say_what_holds_and_what_does_not():
    text = as_markdown(Report(ABOUT, outcome(answers=[answer(), answer(error="unavailable")])))
    assert "| no request lost | NO | 1 of 2 requests: unavailable |" in text
    assert "| every fault struck | yes | 10 of 10 |" in text
    assert "| kill -9 | 2 | 0.35, 0.60, 0.60 | 1.75, 3.00, 3.00 |" in text
    assert "| processes | 3 | 3 |" in text


def test_all_of_a_campaign_can_be_written(tmp_path):
    report = Report(ABOUT, outcome(answers=[answer(), answer(equals=False, lane=7)]))
    record = json.loads(json.dumps(report.as_json()))
    assert len(record["faults"]) == 10
    assert record["faults"][0]["recovery"] == [0.1, 0.5]
    assert [wrong["lane"] for wrong in record["requests"]["wrong"]] == [7]
    assert not report.holds
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_a_campaign_that_saw_no_fault_can_be_written_too(tmp_path):
    report = Report(ABOUT, Outcome(5, stopped_by="the server has ended"))
    assert "stopped: the server has ended" in as_markdown(report)
    json.dumps(report.as_json())
    write_plot(report, tmp_path / "plot.png")


def test_requests_go_all_ways_in_greedy_and_sampled():
    requests = make_requests(16, 1, 100, seed=0)
    ways = {(each.protocol, each.model, each.sampling["temperature"]) for each in requests}
    assert ways == {(*way, temperature) for way in WAYS_IN for temperature in (0.0, 0.8)}
    assert all(1 <= token <= 100 for each in requests for token in each.prompt_ids)
    assert requests == make_requests(16, 1, 100, seed=0)
