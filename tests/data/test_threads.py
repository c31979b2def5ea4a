"""How threads are laid out over cores, and in which words a layout is refused."""

import os

import pytest

from charonia.data.ops.native.threads import ThreadLayout
from charonia.errors import ConfigError


@pytest.fixture(autouse=True)
def five_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 3, 2, 1, 0})


@pytest.mark.parametrize(
    ("num_threads", "binding", "expected"),
    [
        (None, "auto", ThreadLayout(5, (0, 1, 2, 3, 8))),
        (5, "auto", ThreadLayout(5, (0, 1, 2, 3, 8))),
        (2, "auto", ThreadLayout(2, ())),
        (6, "auto", ThreadLayout(6, ())),
        (None, "none", ThreadLayout(5, ())),
        (5, "none", ThreadLayout(5, ())),
        (None, "0-2,8", ThreadLayout(4, (0, 1, 2, 8))),
        (None, "3", ThreadLayout(1, (3,))),
        (None, "8, 1-2", ThreadLayout(3, (8, 1, 2))),
        (2, "8,3,1", ThreadLayout(2, (8, 3))),
    ],
)
def test_threads_are_laid_out_over_the_cores_that_the_process_may_use(
    num_threads: int | None, binding: str, expected: ThreadLayout
) -> None:
    assert ThreadLayout.of(num_threads, binding) == expected


@pytest.mark.parametrize(
    ("num_threads", "binding", "words"),
    [
        (3, "0-1", ["cpu_threads = 3", "'0-1' names 2 cores"]),
        (None, "0-4", ["'0-4' names core 4", "it may use 0, 1, 2, 3, 8"]),
        (None, "7", ["'7' names core 7"]),
        (None, "all", ["'all'", "accepted are 'auto', 'none' and cores such as '0-3,8'"]),
        (None, "", ["cpu_binding = ''", "accepted are"]),
        (None, "1-", ["'1-'", "accepted are"]),
        (None, "-1", ["'-1'", "accepted are"]),
        (None, "1-2-3", ["'1-2-3'", "accepted are"]),
        (None, "1,,2", ["'1,,2'", "accepted are"]),
        (None, "3-1", ["'3-1' must name some cores"]),
        (None, "1,0-1", ["'1,0-1' must name some cores, each of them once"]),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused_by_its_value(
    num_threads: int | None, binding: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ThreadLayout.of(num_threads, binding)
    for part in words:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (ThreadLayout(1, ()), "1 thread, not bound"),
        (ThreadLayout(4, ()), "4 threads, not bound"),
        (ThreadLayout(1, (3,)), "1 thread on core 3"),
        (ThreadLayout(2, (0, 8)), "2 threads on cores 0, 8"),
    ],
)
def test_a_layout_reads_as_words(layout: ThreadLayout, text: str) -> None:
    assert str(layout) == text
