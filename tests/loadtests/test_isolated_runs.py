"""Which launch variants of a peer are tried, and which is taken."""

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from isolated_runs import NUM_FINALS, PROBES, Probe, probe, rates_alone
from paths import WORKERS
from systems_under_test import BASE, WorkerSide
from vllm_variants import BUDGET, BUDGETS, Variant, variants_named, vllm_variants, with_budgets
from workloads import make_rounds

STEADY = f"""
import os, sys
sys.path.append({str(WORKERS)!r})
import worker

class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now

clock = worker.time = Clock()

class Steady:
    versions, notes = {{}}, []

    def __init__(self, settings):
        self.pause = float(os.environ["PAUSE"])
        if self.pause < 0:
            raise ValueError("it cannot be run so")

    def complete(self, wave, requests, sampling):
        for token in range(requests[0].max_tokens):
            clock.now += self.pause
            for index in range(len(requests)):
                wave.add(index, [token])

worker.serve_engine(Steady)
"""
SLOW, FAST, BROKEN = (Variant(name, {"PAUSE": name}) for name in ("0.1", "0.02", "-1"))
ROUNDS = make_rounds(
    ["decode", "prefill"],
    [1, 2],
    [BASE],
    prompt_tokens=4,
    new_tokens=2,
    min_requests=1,
    seed=0,
)
NAMES = [round_.name for round_ in ROUNDS]


@pytest.fixture
def started(tmp_path: Path):
    """What starts a side as a variant, and the sides that it started."""
    path = tmp_path / "steady_worker.py"
    path.write_text(STEADY)
    sides: list[WorkerSide] = []

    def start(variant: Variant) -> WorkerSide:
        assert not any(side.processes() for side in sides)  # nothing else is loaded
        sides.append(WorkerSide("peer", Path(sys.executable), str(path), {}, variant.variables))
        return sides[-1]

    return start, sides


def test_the_fastest_way_comes_first_and_one_that_fails_last(started):
    start, sides = started
    said: list[str] = []
    found = probe(start, [SLOW, BROKEN, FAST], ROUNDS, 9, said.append)
    assert [each.variant for each in found] == [FAST, SLOW, BROKEN]
    num = PROBES * (1 + NUM_FINALS)
    assert {name: len(rates) for name, rates in found[0].rates.items()} == dict.fromkeys(NAMES, num)
    assert "it cannot be run so" in (found[2].failure or "")
    assert found[2].rates == {}
    order = [line.split(":")[0] for line in said]
    assert sorted(order[:3]) == ["-1", "0.02", "0.1"]
    assert sorted(order[3:]) == sorted(["0.02", "0.1"] * NUM_FINALS)
    assert not any(side.processes() for side in sides)


def test_only_the_fastest_are_tried_again_and_one_that_fails_then_is_not_taken(started):
    start, _ = started
    variants = [Variant(f"{delay}", {"PAUSE": f"{delay}"}) for delay in (0.01, 0.05, 0.1, 0.2)]
    num_started: Counter[str] = Counter()

    def start_once(variant):
        num_started[variant.name] += 1
        return start(
            BROKEN if variant is variants[0] and num_started[variant.name] > 1 else variant
        )

    found = probe(start_once, variants, ROUNDS[:1], 9, lambda line: None)
    assert num_started == {"0.01": 1 + NUM_FINALS, "0.05": 3, "0.1": 3, "0.2": 1}
    assert [each.variant.name for each in found] == ["0.05", "0.1", "0.01", "0.2"]
    assert found[2].failure is not None


def test_where_no_variant_works_all_say_why(started):
    start, _ = started
    found = probe(start, [BROKEN, BROKEN], ROUNDS, 9, lambda line: None)
    assert [each.speed for each in found] == [0.0, 0.0]
    assert all("it cannot be run so" in str(each) for each in found)


def test_a_control_has_all_repetitions_but_the_first(started):
    start, _ = started
    side = start(FAST)
    try:
        rates = rates_alone(side, ROUNDS[:1], 4, vocab_size=9, seed=0)
    finally:
        side.close()
    assert rates == {"decode at concurrency 1": pytest.approx([1 / 0.02] * 4)}


def test_a_round_of_prompts_is_timed_by_their_tokens(started):
    start, _ = started
    with closing(start(FAST)) as side:
        rates = rates_alone(side, ROUNDS[2:3], 2, vocab_size=9, seed=0)
    assert rates == {"prefill at concurrency 1": pytest.approx([4 / 0.02] * 2)}


def test_being_good_at_one_concurrency_only_is_not_the_fastest():
    even = Probe(FAST, {"one": [50.0], "eight": [200.0]})
    assert even.speed == pytest.approx(100.0)
    assert Probe(SLOW, {"one": [10.0], "eight": [400.0, 1.0, 900.0]}).speed < even.speed


def test_the_variants_of_vllm_are_those_of_the_libraries_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_variants.find_library", lambda name: None)
    plain = vllm_variants(tmp_path)
    assert [variant.variables for variant in plain] == [
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ]
    iomp = tmp_path / "lib" / "libiomp5.so"
    gomp = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "lib" / "libgomp.so.1"
    tcmalloc = tmp_path / "usr" / "lib" / "x86_64-linux-gnu" / "libtcmalloc_minimal.so.4"
    for path in (iomp, gomp, tcmalloc):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    variants = vllm_variants(tmp_path)
    assert len(variants) == len({variant.name for variant in variants}) == 12
    preloads = {variant.variables.get("LD_PRELOAD", "") for variant in variants}
    assert f"{tcmalloc}:{iomp}" in preloads
    assert not any("libiomp" in each and "libgomp" in each for each in preloads)


def test_other_sizes_of_steps_are_said_to_the_worker():
    variant = Variant("way", {"A": "1"})
    assert [(one.name, one.variables) for one in with_budgets(variant)] == [
        (f"way + {budget:,} tokens a step", {"A": "1", BUDGET: str(budget)}) for budget in BUDGETS
    ]
    assert f'"{BUDGET}"' in (WORKERS / "vllm_worker.py").read_text()


def test_tcmalloc_of_the_system_is_taken_too(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_variants.find_library", lambda name: f"lib{name}.so.4")
    assert vllm_variants(tmp_path)[1].variables["LD_PRELOAD"] == "libtcmalloc_minimal.so.4"


def test_variants_are_found_by_name_also_with_other_step_sizes_and_others_are_refused():
    names = ["0.02 + 2,048 tokens a step", "0.1"]
    assert [each.name for each in variants_named([SLOW, FAST], names)] == names
    assert variants_named([SLOW], ["0.1"]) == [SLOW]
    with pytest.raises(ValueError, match=r"no '0\.3'; there are\n  0\.1\n  0\.1 \+ 2,048 tokens"):
        variants_named([SLOW], ["0.1", "0.3"])
