"""A server whose machine needs the memory of its KV cache."""

from collections.abc import Callable
from pathlib import Path

from charonia.launch.server.run import running_server
from support.e2e import (
    ONE_THREAD,
    infer_grpc,
    one_torch_thread,
    request_inputs,
    scrape,
    wait_for,
    wait_idle,
)

PROMPT = list(range(30, 90))
SAMPLING = {"max_tokens": 40, "ignore_eos": True, "seed": 5}
WISHES = {"return_token_ids": True, "exclude_input_in_output": True}


def test_an_idle_server_gives_memory_back_and_serves_on_with_what_is_left(
    small_checkpoint: Callable[..., Path],
) -> None:
    def ask() -> list[int]:
        return infer_grpc(server, request_inputs(PROMPT, SAMPLING, **WISHES)).outputs["output_ids"]

    common = (ONE_THREAD, "max_model_len=320")
    with one_torch_thread():
        fixed = (*common, "memory_reserve=0")
        with running_server(model=small_checkpoint, settings=fixed) as server:
            expected = ask()
            assert scrape(server)['charonia_kv_blocks{state="aside"}'] == 0
        # More is to be left for others than any machine leaves.
        settings = (*common, "memory_reserve=0.999")
        with running_server(model=small_checkpoint, settings=settings) as server:

            def num_usable() -> float:
                samples = scrape(server)
                total, aside = (
                    samples[f'charonia_kv_blocks{{state="{state}"}}']
                    for state in ("total", "aside")
                )
                return total - aside

            assert wait_for(num_usable, lambda num: num == 320 // 16) == 320 // 16
            assert [ask() for _ in range(3)] == [expected] * 3
            wait_idle(server)
