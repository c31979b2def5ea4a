"""A real server records what `charonia simulate` reads, and no text."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from charonia.core.recording.recorder import REQUESTS, STEPS
from charonia.launch.commands.cli import main
from charonia.launch.server.run import running_server
from charonia.traces import read_requests, read_steps
from charonia_client import Client
from support.e2e import ONE_THREAD, one_torch_thread, wait_for
from support.long import long

PROMPT = "a sentence that nobody may find again " * 10
NUM_REQUESTS = 8
RUN_S, NUM_CLIENTS, NUM_KILLS = 150, 16, 3


@long
def test_a_servers_record_can_be_simulated(small_checkpoint, tmp_path: Path, capsys):
    record = tmp_path / "record"
    settings = (ONE_THREAD, f"scheduler.record_dir={record}")
    with one_torch_thread(), running_server(model=small_checkpoint, settings=settings) as server:
        with Client(server.grpc_url) as client:
            for number in range(NUM_REQUESTS):
                client.generate(PROMPT, max_tokens=20, ignore_eos=True, tenant=f"t{number % 2}")
            client.generate(list(range(1, 130)), max_tokens=20, ignore_eos=True)
        wait_for(lambda: len(_lines(record / REQUESTS)), lambda num: num == NUM_REQUESTS + 1)
    requests, steps = read_requests(record / REQUESTS), read_steps(record / STEPS)
    assert [one.tenant for one in requests] == [*["t0", "t1"] * (NUM_REQUESTS // 2), ""]
    assert {one.output_length for one in requests} == {20}
    assert requests[0].hash_ids == requests[2].hash_ids != requests[1].hash_ids
    assert all(0 < one.queue_ms < one.ttft_ms < one.total_ms for one in requests)
    assert sum(step.num_joins for step in steps) >= NUM_REQUESTS
    assert not any("sentence" in path.read_text() for path in record.iterdir())
    assert requests[-1].input_length == 129
    assert len(requests[-1].hash_ids) == 2

    arguments = [str(record / REQUESTS), "--step-times", str(record / STEPS)]
    assert main(["simulate", *arguments, "--kv-tokens", "4096"]) == 0
    text = capsys.readouterr().out
    assert f"| as recorded | {NUM_REQUESTS + 1} | {NUM_REQUESTS + 1} |" in text
    assert f"| fcfs | {NUM_REQUESTS + 1} | {NUM_REQUESTS + 1} |" in text


@long
def test_a_servers_schedule_of_minutes_can_be_replayed(small_checkpoint, tmp_path: Path, capsys):
    """Requests of all kinds, a KV cache that is short, drafts, departures and dead engines."""
    settings = (
        ONE_THREAD,
        "num_gpu_blocks_override=60",
        "max_num_seqs=4",
        'speculative_config={"method": "ngram", "num_speculative_tokens": 3}',
        "scheduling_policy=priority",
        "scheduler.fair_share=true",
        f"scheduler.record_dir={tmp_path / 'record'}",
        "scheduler.record_schedule=true",
    )
    with (
        one_torch_thread(),
        running_server(model=small_checkpoint, settings=settings) as server,
        ThreadPoolExecutor(NUM_CLIENTS) as threads,
        Client(server.grpc_url) as client,
    ):
        numbers, ends_at = count(), time.monotonic() + RUN_S
        clients = [threads.submit(_use_until, client, numbers, ends_at) for _ in range(NUM_CLIENTS)]
        for _ in range(NUM_KILLS):
            time.sleep(RUN_S / (NUM_KILLS + 1))
            (engine,) = server.pids("engine")
            os.kill(engine, signal.SIGKILL)
        num_requests = sum(one.result() for one in clients)
    (journal,) = (tmp_path / "record").glob("*.journal")
    assert b"sentence" not in journal.read_bytes()
    assert main(["replay", str(journal)]) == 0
    replayed = capsys.readouterr().out
    print(num_requests, "requests,", journal.stat().st_size, "bytes:", replayed)
    assert "all plans are equal" in replayed
    assert num_requests > 10 * NUM_CLIENTS


def _use_until(client: Client, numbers: Iterator[int], ends_at: float) -> int:
    """Send requests until then; return how many there were."""
    num_requests = 0
    while time.monotonic() < ends_at:
        _use(client, next(numbers))
        num_requests += 1
    return num_requests


def _use(client: Client, number: int) -> None:
    """Send the request of a number: each is of another kind, and every fifth client leaves.

    Those who leave ask for more. Were the end of the answer near, it might come in the moment of
    the cancellation, of which tritonserver 2.51.0 sometimes dies.
    """
    leaves = not number % 5
    with client.stream(
        PROMPT[: 80 * (number % 4)] + "and one more",
        max_tokens=400 if leaves else 5 + number % 40,
        ignore_eos=True,
        tenant=f"t{number % 3}",
        priority=number % 5 - 2,
        n=1 + number % 2,
    ) as stream:
        for _ in stream:
            if leaves:
                return


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
