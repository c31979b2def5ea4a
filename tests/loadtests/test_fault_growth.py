"""How much more a process holds at rest than before the faults, and when that is too much."""

from dataclasses import replace

from faults.footprint import Footprint, ProcessFootprint
from faults.growth import (
    KEPT_BYTES,
    KEPT_FDS,
    KEPT_THREADS,
    MAX_BYTES,
    MAX_BYTES_PER_FAULT,
    MAX_FDS,
    MAX_THREADS,
    growths,
)
from faults.outcome import FaultRecord, Outcome, Rest
from faults.verdicts import verdicts

MEMORY, FILES, THREADS = "no process grew", "no leaked open file", "no leaked thread"


def process(role="scheduler", pid=1, created=0.0, rss_bytes=2**26, num_fds=9, num_threads=16):
    return ProcessFootprint(role, pid, created, rss_bytes, num_fds, num_threads)


def rest(num_faults, *processes):
    return Rest(num_faults, {"charonia_requests_running": 0.0}, Footprint(processes, 2**20))


def struck(number, kind):
    return FaultRecord(number, kind, "", 0.0, 1.0, 0, 0, 1.0, True, (), None, ())


def failed(*rests, faults=()):
    """Which of the verdicts on growth fail."""
    seen = verdicts(Outcome(0, rests=[*rests], faults=[*faults]))
    return [each.what for each in seen if each.what in (MEMORY, FILES, THREADS) and not each.holds]


def test_a_process_that_lived_through_faults_may_grow_a_little_with_each():
    before = rest(0, process())
    most = 2**26 + MAX_BYTES + 100 * MAX_BYTES_PER_FAULT
    assert failed(before, rest(100, process(rss_bytes=most))) == []
    assert failed(before, rest(100, process(rss_bytes=most + 1))) == [MEMORY]


def test_each_part_of_a_campaign_is_judged_by_its_own_faults():
    most = 2**26 + MAX_BYTES + 60 * MAX_BYTES_PER_FAULT
    rests = [rest(0, process()), rest(40, process()), rest(100, process(rss_bytes=most))]
    assert failed(*rests) == []
    assert failed(rests[0], rests[1], rest(99, process(rss_bytes=most))) == [MEMORY]


def test_a_process_that_took_anothers_place_is_held_against_the_first():
    before = rest(0, process(), process("tokenizer", 2), process("tokenizer", 3, rss_bytes=2**27))
    most = 2**27 + MAX_BYTES
    new = process("tokenizer", 4, rss_bytes=most)
    assert failed(before, rest(100, process(), new)) == []
    new = process("tokenizer", 4, rss_bytes=most + 1)
    assert failed(before, rest(100, process(), new)) == [MEMORY]
    same_pid_as_another = process("scheduler", 1, created=5.0)
    assert [each.num_faults for each in growths([before, rest(9, same_pid_as_another)])] == [0]


def test_files_and_threads_of_a_process_that_lived_through_are_counted():
    before = rest(0, process())
    assert failed(before, rest(9, process(num_fds=9 + MAX_FDS))) == []
    assert failed(before, rest(9, process(num_fds=10 + MAX_FDS))) == [FILES]
    assert failed(before, rest(9, process(num_threads=16 + MAX_THREADS))) == []
    assert failed(before, rest(9, process(num_threads=17 + MAX_THREADS))) == [THREADS]


def test_a_new_process_may_have_what_tritonserver_had_open():
    assert failed(rest(0, process()), rest(9, process(pid=2, num_fds=100))) == []
    assert failed(rest(0, process()), rest(9, process(pid=2, num_threads=100))) == [THREADS]


def test_tritonserver_may_keep_what_it_has_of_processes_that_were_lost_with_requests_in_hand():
    kinds = ("kill-tokenizer", "stop-postprocessor", "kill", "kill-tokenizer")
    faults = [struck(number, kind) for number, kind in enumerate(kinds, start=1)]
    for role, num_kept in (("tritonserver", 3), ("scheduler", 0)):
        most = process(
            role,
            rss_bytes=2**26 + MAX_BYTES + 3 * MAX_BYTES_PER_FAULT + num_kept * KEPT_BYTES,
            num_fds=9 + MAX_FDS + num_kept * KEPT_FDS,
            num_threads=16 + MAX_THREADS + num_kept * KEPT_THREADS,
        )
        assert failed(rest(0, process(role)), rest(3, most), faults=faults) == []
        more = replace(most, num_fds=most.num_fds + 1, num_threads=most.num_threads + 1)
        expected = [FILES, THREADS]
        assert failed(rest(0, process(role)), rest(3, more), faults=faults) == expected


def test_what_grew_most_of_what_it_may_is_named():
    before = rest(0, process(), process("tritonserver", 2), process("engine", 3))
    after = rest(
        9,
        process(rss_bytes=2**26 + 3 * 2**20),
        process("tritonserver", 2, rss_bytes=2**26 + 5 * 2**20),
        process("engine", 4, rss_bytes=2**26),
    )
    found = next(
        each.found for each in verdicts(Outcome(0, rests=[before, after])) if each.what == MEMORY
    )
    assert found.startswith("tritonserver +5.0 MiB over 9 faults of 17; scheduler +3.0 MiB")
    assert found.endswith("engine +0.0 MiB, a new one of 16")
