"""What is made of a fault campaign: verdicts, summary, tables, the record and the picture."""

import dataclasses
import json
import random

import pytest

from faults.calls import WAYS_IN, Answer, make_requests
from faults.campaign import schedule
from faults.campaign_plot import write_plot
from faults.campaign_report import Report, as_markdown, reduced
from faults.footprint import Footprint, ProcessFootprint
from faults.kinds import KINDS
from faults.outcome import FaultRecord, Outcome, Rest, Spread
from faults.strikes import STRIKES
from faults.verdicts import MAX_SHM_BYTES_PER_DEATH, verdicts
from paths import LOADTESTS
from record import RESULTS
from support.live_stream import WRONG_ANSWER

ROLES = ("tritonserver", "scheduler", "engine")
MODELS = ("tokenizer", "postprocessor", "generate")
RECORDS = sorted((LOADTESTS / RESULTS).glob("*-faults*.json"))
IDLE = {"charonia_requests_running": 0.0}
ABOUT = {
    "date": "2026-11-22T00:00:00",
    "machine": {"CPU(s)": "2"},
    "clients": 16,
    "tensor_parallel_size": 2,
}


def rest(num_faults, *, shm_bytes=2**20, busy=None, roles=ROLES):
    processes = [
        ProcessFootprint(role, pid, 0.0, 2**26, 9, 16) for pid, role in enumerate(roles, 1)
    ]
    return Rest(num_faults, busy or IDLE, Footprint(processes, shm_bytes))


def fault(number, name, recovery=(1.0, 2.0), **changes):
    kind = KINDS[name]
    record = FaultRecord(
        number=number,
        kind=name,
        victim="a request" if name == "poison" else "rank 0",
        at=100.0 * number,
        until=100.0 * number + 10,
        num_engines=kind.max_engines,
        num_servers=kind.max_servers,
        outage=0.9,
        is_answered_right=True,
        recovery=recovery,
        pause=None if len(kind.delays) == 3 or kind.max_servers else 0.1,
        hanging=(),
    )
    return dataclasses.replace(record, **changes)


def answer(**changes):
    good = Answer("lane 3", "scheduler", 50.0, 300, 2, None, equals=True)
    return dataclasses.replace(good, **changes)


def outcome(**changes):
    """A campaign of two faults of each kind, in which all went well."""
    faults = [
        fault(number, name, (0.1 * number, 0.5 * number))
        for number, name in enumerate([*KINDS] * 2, 1)
    ]
    good = Outcome(
        len(faults), faults, [answer() for _ in range(40)], rests=[rest(0), rest(len(faults))]
    )
    return dataclasses.replace(good, **changes)


def failed(seen):
    return [verdict.what for verdict in verdicts(seen) if not verdict.holds]


def number_of(name):
    return list(KINDS).index(name) + 1


def with_fault(name, **changes):
    """The good campaign, but for its first fault of a kind."""
    faults = outcome().faults
    place = number_of(name) - 1
    faults[place] = dataclasses.replace(faults[place], **changes)
    return {"faults": faults}


def with_answer(**changes):
    return {"answers": [answer(), answer(**changes)]}


def test_all_holds_when_all_went_well():
    assert failed(outcome()) == []


def test_how_long_a_client_may_pause_is_asked_for():
    waited = with_fault("kill-tokenizer", pause=4.0)
    assert failed(outcome(**waited)) == ["nobody waited who had not to"]
    assert failed(outcome(**waited, max_pause=5.0)) == []


def test_every_kind_can_be_brought_about():
    assert set(STRIKES) == set(KINDS)


STRUCK = "every fault struck, and what it broke came back"
LOST = "no request lost that need not be"


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        (STRUCK, with_fault("kill", outage=None)),
        (STRUCK, {"num_asked": 2 * len(KINDS) + 1}),
        (STRUCK, {"stopped_by": "the server is not brought back"}),
        ("no fault cost more than it must", with_fault("poison", num_engines=4)),
        ("no fault cost more than it must", with_fault("kill", num_servers=1)),
        (LOST, with_answer(error="unavailable")),
        ("no request answered twice", with_answer(error=f"{WRONG_ANSWER}x")),
        ("no request hung", with_fault("stop", hanging=(4,))),
        ("no request hung", {"hanging": [4]}),
        ("every answer equal to its undisturbed run", with_answer(equals=False)),
        ("poisoned requests failed, and alone", with_fault("poison", is_answered_right=False)),
        ("nobody waited who had not to", with_fault("kill-tokenizer", pause=3.0)),
        ("no leaked block, nothing running", {"rests": [rest(0), rest(9, busy={"used": 1.0})]}),
        ("nothing left after the server's end", {"left": ["/dev/shm/x"]}),
        ("no leaked process", {"rests": [rest(0), rest(9, roles=[*ROLES, "engine"])]}),
        ("the server came to rest", {"rests": [rest(0)]}),
    ],
)
def test_each_thing_that_goes_wrong_is_seen_by_its_own_verdict(what, changes):
    assert failed(outcome(**changes)) == [what]


def error_during(name, **changes):
    """A call that ended with an error while the first fault of a kind was being mended."""
    at = 100.0 * number_of(name) + 5
    return with_answer(error="unavailable", ended_at=at, **changes)


def test_a_call_may_fail_with_the_server_alone_and_only_then():
    assert failed(outcome(**error_during("kill-scheduler"))) == []
    assert failed(outcome(**error_during("kill"))) == [LOST]
    late = with_answer(error="unavailable", ended_at=100.0 * number_of("kill-scheduler") + 11)
    assert failed(outcome(**late)) == [LOST]


def test_a_call_may_fail_with_the_model_that_it_passes_through():
    assert failed(outcome(**error_during("kill-postprocessor", entry="llm"))) == []
    assert failed(outcome(**error_during("kill-postprocessor", entry="generate"))) == [LOST]
    assert failed(outcome(**error_during("kill-tokenizer", entry="llm", num_tokens=0))) == []
    assert failed(outcome(**error_during("kill-tokenizer", entry="llm"))) == [LOST]


def test_any_call_may_fail_with_a_server_that_had_to_be_restarted():
    calls = error_during("kill-generate", entry="llm")
    assert failed(outcome(**calls)) == []
    changes = with_fault("kill-generate", num_servers=0)
    assert failed(outcome(**(calls | changes))) == [LOST]
    unasked = error_during("kill", entry="llm") | with_fault("kill", num_servers=1)
    assert failed(outcome(**unasked)) == ["no fault cost more than it must", LOST]


def test_tokens_before_an_error_that_was_to_be_expected_must_be_right():
    changes = error_during("kill-scheduler", num_tokens=3, equals=False)
    assert failed(outcome(**changes)) == ["every answer equal to its undisturbed run"]


def test_without_an_answer_nothing_is_shown():
    assert failed(outcome(answers=[])) == [LOST, "every answer equal to its undisturbed run"]


def test_triton_may_leave_some_shared_memory_for_each_death():
    seen = outcome()
    models = [fault for fault in seen.faults if KINDS[fault.kind].loses in MODELS]
    num_deaths = sum(fault.num_engines for fault in seen.faults) + len(models)
    most = 2**20 + MAX_SHM_BYTES_PER_DEATH * num_deaths
    assert failed(outcome(rests=[rest(0), rest(9, shm_bytes=most)])) == []
    above = outcome(rests=[rest(0), rest(9, shm_bytes=most + 1)])
    assert failed(above) == ["no leaked shared memory but what Triton leaves"]


def test_recovery_is_summed_up_by_kind():
    seen = outcome()
    assert list(seen.summary()) == list(KINDS)
    kill = seen.summary()["kill"]
    second = 1 + len(KINDS)
    assert kill.count == 2
    assert kill.first.median == pytest.approx(0.1 * (1 + second) / 2)
    assert kill.last.max == pytest.approx(0.5 * second)
    assert kill.pause is None
    assert seen.summary()["kill-tokenizer"].pause == Spread(0.1, 0.1, 0.1)


def test_a_fault_from_which_no_client_recovered_has_no_recovery_time():
    seen = outcome(faults=[fault(1, "kill", recovery=(), hanging=(0,))])
    assert seen.summary() == {}
    assert "no request hung" in failed(seen)


def test_the_90th_percentile_is_the_nearest_value_that_occurs():
    assert Spread.of([float(value) for value in range(1, 11)]) == Spread(5.5, 9.0, 10.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_the_tables_say_what_holds_and_what_does_not():
    seen = outcome(
        answers=[answer(), answer(error="unavailable")],
        faults=[fault(1, "kill", (0.1, 0.5)), fault(2, "kill", (0.6, 3.0))],
        num_asked=2,
    )
    text = as_markdown(Report(ABOUT, seen))
    said = "1 of 2 requests: lane 3 through scheduler: unavailable"
    assert f"| {LOST} | NO | {said}; 0 ended with an error that the fault made them |" in text
    assert f"| {STRUCK} | yes | 2 of 2 |" in text
    assert "| kill -9 | 2 | 2 | 0 | 0.35, 0.60, 0.60 | 1.75, 3.00, 3.00 |" in text
    assert "| scheduler: resident, MiB | 64.0 | 64.0 |" in text


def test_all_of_a_campaign_can_be_written(tmp_path):
    report = Report(ABOUT, outcome(answers=[answer(), answer(equals=False, who="lane 7")]))
    record = json.loads(json.dumps(report.as_json()))
    assert len(record["faults"]) == 2 * len(KINDS)
    assert record["faults"][0]["recovery"] == [0.1, 0.5]
    assert [(wrong["who"], wrong["is_excused"]) for wrong in record["requests"]["failed"]] == [
        ("lane 7", False)
    ]
    assert not report.holds
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_of_excused_requests_only_their_number_is_recorded_and_of_recoveries_the_ends():
    during = 100.0 * number_of("kill-scheduler") + 5
    answers = [answer(error=error, ended_at=during) for error in ("gone", "late", "gone")]
    answers.append(answer(error="gone", equals=False, ended_at=during))
    faults = with_fault("kill-scheduler", recovery=(0.1, 0.2, 0.3))
    seen = outcome(**faults, answers=answers)
    record = json.loads(json.dumps(Report(ABOUT, seen).as_json()))
    kills = [one for one in record["faults"] if one["kind"] == "kill-scheduler"]
    assert (kills[0]["recovery"], kills[0]["num_waited"]) == ([0.1, 0.3], 3)
    assert record["requests"]["answered"] == 4
    assert [one["equals"] for one in record["requests"]["failed"]] == [False]
    assert record["requests"]["excused"] == [
        {"entry": "scheduler", "error": "gone", "count": 2},
        {"entry": "scheduler", "error": "late", "count": 1},
    ]
    assert reduced(record) == record


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_of_a_campaign_is_reduced(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert reduced(record) == record


def test_a_campaign_that_saw_no_fault_can_be_written_too(tmp_path):
    report = Report(ABOUT, Outcome(5, stopped_by="the server has ended"))
    assert "stopped: the server has ended" in as_markdown(report)
    json.dumps(report.as_json())
    write_plot(report, tmp_path / "plot.png")


def test_all_kinds_come_as_often_as_they_should_and_those_that_may_cost_the_server_last():
    kinds = list(KINDS.values())
    faults = schedule(kinds, 300, random.Random(0))
    num_rounds = faults.count(KINDS["kill"])
    assert len(faults) == 300
    for kind in kinds:
        assert abs(faults.count(kind) - num_rounds / kind.every) <= 1
    assert [kind.max_servers for kind in faults] == sorted(kind.max_servers for kind in faults)
    assert set(schedule(kinds, len(kinds), random.Random(0))) == set(kinds)
    rare = [KINDS["kill-generate"]]
    assert schedule(rare, 5, random.Random(0)) == rare * 5


def test_requests_go_all_ways_in_greedy_and_sampled():
    requests = make_requests(16, 1, 100, seed=0)
    ways = {(each.protocol, each.model, each.sampling["temperature"]) for each in requests}
    assert ways == {(*way, temperature) for way in WAYS_IN for temperature in (0.0, 0.8)}
    assert all(1 <= token <= 100 for each in requests for token in each.prompt_ids)
    assert requests == make_requests(16, 1, 100, seed=0)
