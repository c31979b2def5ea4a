"""Ranks on another machine: they join by themselves, and stay for the next engine.

The other machine is this one here; nothing that the engine knows of it is used.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from charonia import LLM, SamplingParams
from charonia.parallel.handshake import SECRET_VARIABLE
from parity.reference import greedy, random_prompt
from support.checkpoints import assert_varied
from support.long import long
from support.ranked_engine import free_address, is_alive
from support.waiting import WAIT_S, eventually

NUM_NEW = 24


@long
def test_a_rank_under_torchrun_joins_one_engine_after_the_other_and_leaves_nothing(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "open sesame")
    address = free_address()
    prompts = [random_prompt(length) for length in (5, 40)]
    expected = [greedy(checkpoint(), prompt, NUM_NEW).token_ids for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    torchrun = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "1", "-m", "charonia.parallel.worker", "--join", address),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        for cpu_kernels in ("auto", "torch"):
            with LLM(
                str(checkpoint()),
                dtype="float32",
                device="cpu",
                cpu_kernels=cpu_kernels,
                cpu_threads=1,
                num_gpu_blocks_override=32,
                tensor_parallel_size=2,
                num_local_ranks=1,
                rendezvous=address,
                rendezvous_timeout_s=WAIT_S,
                rank_timeout_s=WAIT_S,
            ) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, token_ids in zip(outputs, expected, strict=True):
                assert output.outputs[0].token_ids == token_ids
                assert_varied(token_ids)
        others = [one.pid for one in psutil.Process(torchrun.pid).children(recursive=True)]
        assert others
    finally:
        torchrun.terminate()
        torchrun.wait(WAIT_S)
    for pid in others:
        eventually(lambda pid=pid: not is_alive(pid), "nothing is left")  # type: ignore[misc]
