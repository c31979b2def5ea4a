"""A real server records what `charonia simulate` reads, and no text."""

from pathlib import Path

from charonia.engine.recorder import REQUESTS, STEPS
from charonia.launch.cli import main
from charonia.launch.run import running_server
from charonia.traces import read_requests, read_steps
from charonia_client import Client
from support.e2e import ONE_THREAD, one_torch_thread, wait_for
from support.long import long

PROMPT = "a sentence that nobody may find again " * 10
NUM_REQUESTS = 8


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


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
