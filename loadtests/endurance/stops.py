"""Stops `charonia serve` in whatever state it is, and looks at how it ends.

Owns the states and what is looked at. Must not know how many there are to be.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from charonia.launch.server.processes import find_by_argument
from endurance.trials import Trial, bad_lines
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.many_streams import start_streams
from support.serving import CHARONIA, Serving

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_SECONDS = 10.0
LONG = 3000
END_TIMEOUT_S = 20.0
START_S = 5.0  # about as long as a server takes until it serves
RECOVERY_S = 2.0  # and an engine until it is back

Prepare = Callable[[Serving, random.Random], list[LiveStream]]
"""A way to bring a new server into a state; returns the streams that are live in it."""


def _idle(serving: Serving, draw: random.Random) -> list[LiveStream]:
    serving.wait_announced()
    return []


def _starting(serving: Serving, draw: random.Random) -> list[LiveStream]:
    serving.server()
    time.sleep(draw.uniform(0.0, START_S))
    return []


def _streaming(serving: Serving, draw: random.Random) -> list[LiveStream]:
    return start_streams(_urls(serving.wait_announced()), max_tokens=LONG)


def _recovering(serving: Serving, draw: random.Random) -> list[LiveStream]:
    streams = _streaming(serving, draw)
    (engine,) = find_by_argument(serving.server().children(), "/engine/")
    os.kill(engine.pid, signal.SIGKILL)
    time.sleep(draw.uniform(0.0, RECOVERY_S))
    return streams


def _reloading(serving: Serving, draw: random.Random) -> list[LiveStream]:
    urls = _urls(serving.wait_announced())
    streams = start_streams(urls, max_tokens=LONG)
    subprocess.Popen(
        [*CHARONIA, "reload", "--url", urls["grpc"], "--set", "max_num_seqs=16"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(draw.uniform(0.5, 0.5 + RECOVERY_S))
    return streams


STATES: dict[str, Prepare] = {
    "idle": _idle,
    "starting": _starting,
    "with streams": _streaming,
    "engine lost": _recovering,
    "reloading": _reloading,
}

ENGINE_LOST = "stop, engine lost"  # before the signal, that is
WHILE_LOADING = (ENGINE_LOST, "stop, reloading", "stop, starting")
NOT_IN_TIME = "Exit timeout expired"
"""Triton unloads nothing while a model is being loaded, however long that takes."""


def stops(num: int, model: Path, seed: int) -> Iterator[Trial]:
    """Stop a server `num` times, with all states and signals in turns."""
    draw = random.Random(seed)
    for index in range(num):
        state = list(STATES)[index % len(STATES)]
        signum = SIGNALS[index // len(STATES) % len(SIGNALS)]
        yield _stop(f"stop, {state}", STATES[state], signum, model, draw)


def _stop(
    kind: str, prepare: Prepare, signum: signal.Signals, model: Path, draw: random.Random
) -> Trial:
    settings = ("num_gpu_blocks_override=2049", "max_num_seqs=32", "cpu_threads=1")
    serving = Serving("--model", model, *(f"--set={each}" for each in settings))
    try:
        streams = prepare(serving, draw)
        runtime_dir = serving.runtime_dir
        seconds, log = serving.end(signum)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return Trial(kind, END_TIMEOUT_S, (f"it could not be stopped: {error}",))
    finally:
        serving.process.kill()
        serving.process.wait()
    findings = bad_lines(log.splitlines(), is_ending=kind != ENGINE_LOST)
    if kind in WHILE_LOADING:
        findings = [line for line in findings if NOT_IN_TIME not in line]
    if serving.process.returncode:
        findings.append(f"exit code {serving.process.returncode}")
    if seconds > MAX_SECONDS:
        findings.append(f"it took {seconds:.1f} s")
    findings += [f"left: {each}" for each in leftovers(runtime_dir)]
    findings += _hanging(streams)
    return Trial(kind, seconds, tuple(findings))


def _hanging(streams: list[LiveStream]) -> list[str]:
    """Clients that got no end."""
    for stream in streams:
        with contextlib.suppress(AssertionError):
            stream.wait_over(MAX_SECONDS)
    return [f"a stream of {len(s.token_ids)} tokens hangs" for s in streams if not s.is_over]


def _urls(announcement: str) -> dict[str, str]:
    return {
        protocol.lower(): url
        for protocol, url in re.findall(r"(gRPC|HTTP) +(?:http://)?(\S+)", announcement)
    }
