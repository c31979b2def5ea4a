"""What a server keeps of prompts in a file: for its next start, and while its engine dies."""

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ONE_THREAD,
    at_once,
    infer_grpc,
    one_torch_thread,
    request_inputs,
    scrape,
    wait_for,
    wait_idle,
)
from support.long import long

PREFIXES = [[number * 9 + place % 7 for place in range(96)] for number in range(1, 5)]
SAMPLING = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0}
WISHES = {"return_token_ids": True, "return_timing": True, "exclude_input_in_output": True}
NUM_KILLS = 3
NUM_AT_ONCE = 4


def settings(path: Path, **values: object) -> tuple[str, ...]:
    """A pool that has room for few of the prefixes."""
    values |= {"kv_cache_path": json.dumps(str(path)), "kv_cache_file_space": 0.01}
    return (ONE_THREAD, "num_gpu_blocks_override=24", *(f"{k}={v}" for k, v in values.items()))


def prompts() -> list[list[int]]:
    """Those of a prefix follow each other, so that it is hit before it is evicted."""
    return [[*prefix, own] for prefix in PREFIXES for own in range(3)]


def ask(server: TritonServer, prompt: list[int], seed: int = 0) -> tuple[list[int], int]:
    """The tokens that answer a prompt, and how many of its own were cached."""
    inputs = request_inputs(prompt, SAMPLING | {"seed": seed}, **WISHES)
    response = infer_grpc(server, inputs)
    timing = json.loads(response.one("timing"))
    return response.outputs["output_ids"], timing["cached_tokens"]


def test_the_next_server_begins_with_what_the_last_one_has_saved(
    small_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    start = partial(running_server, model=small_checkpoint, settings=settings(tmp_path / "kv"))
    with one_torch_thread(), start() as server:
        first = [ask(server, prompt) for prompt in prompts()]
        assert [num_cached for _, num_cached in first] == [0, 96, 96] * len(PREFIXES)
        again = [ask(server, prompt) for prompt in prompts()]
        assert [ids for ids, _ in again] == [ids for ids, _ in first]
        name = 'charonia_kv_tier_blocks{tier="file"}'
        num_saved = 6 * len(PREFIXES)
        samples = wait_for(lambda: scrape(server), lambda samples: samples[name] >= num_saved)
        assert samples[name] == num_saved
    with one_torch_thread(), start() as server:
        for prompt, (expected, _) in zip(prompts(), first, strict=True):
            assert ask(server, prompt) == (expected, 96)
        samples = wait_idle(server)
        assert samples["charonia_kv_blocks_loaded_total"] >= 6 * len(PREFIXES)
        assert samples["charonia_kv_loads_failed_total"] == 0


@long
def test_an_engine_that_is_killed_while_it_moves_blocks_changes_no_stream(
    small_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Requests of more prefixes than the pool has room for go on all the time."""
    asked = [(prompt, seed) for seed in range(4) for prompt in prompts()]
    start = partial(running_server, model=small_checkpoint)
    with one_torch_thread(), start(settings=(ONE_THREAD,)) as server:
        expected = at_once([partial(ask, server, *one) for one in asked], num_threads=NUM_AT_ONCE)
    with one_torch_thread(), start(settings=settings(tmp_path / "kv")) as server:
        is_over = threading.Event()
        killer = threading.Thread(target=kill_while_it_moves, args=(server, is_over))
        killer.start()
        found: list[list[tuple[list[int], int]]] = []
        while killer.is_alive() or not found:
            found.append(
                at_once([partial(ask, server, *one) for one in asked], num_threads=NUM_AT_ONCE)
            )
        is_over.set()
        killer.join()
        samples = wait_idle(server)
        assert samples["charonia_kv_blocks_loaded_total"] > 0
        assert samples["charonia_engine_restarts_total"] == NUM_KILLS
    for answers in found:
        assert [ids for ids, _ in answers] == [ids for ids, _ in expected]


def kill_while_it_moves(server: TritonServer, is_over: threading.Event) -> None:
    """Kill the engine some times, each time after many requests, and while blocks are loaded."""
    for _ in range(NUM_KILLS):
        before = scrape(server)

        def is_time(samples: Mapping[str, float], before=before) -> bool:
            num_ended, num_loaded = (
                samples[name] - before[name]
                for name in (
                    'charonia_finished_total{reason="length"}',
                    "charonia_kv_blocks_loaded_total",
                )
            )
            return is_over.is_set() or (num_ended >= 3 * NUM_AT_ONCE and num_loaded > 0)

        wait_for(lambda: scrape(server), is_time)
        (engine,) = server.pids("engine")
        os.kill(engine, signal.SIGKILL)
        wait_for(
            lambda: scrape(server)["charonia_engine_restarts_total"],
            lambda num, before=before: num > before["charonia_engine_restarts_total"],
        )
