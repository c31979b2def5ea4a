"""Simulations for tests: small settings, requests, and runs."""

from pathlib import Path

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.simulate.simulator import Outcome, Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import Arrival
from charonia.traces import TraceRequest

TRACES = Path(__file__).parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of traces")
TIMES = StepTimes(curve=[(0, 0.01), (100, 0.02)])


def make_setting(**changes) -> Setting:
    """Of 4 rows; arguments of engine and scheduler by their names, and the setting's own."""
    own = {
        name: changes.pop(name, default)
        for name, default in {
            "num_blocks": 1000,
            "max_model_len": 1000,
            "step_times": TIMES,
            "seed": 0,
        }.items()
    }
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "async_scheduling": False}
    names = set(EngineArgs.__struct_fields__)
    engine |= {name: changes.pop(name) for name in list(changes) if name in names}
    scheduler = {"priority_aging_s": 0.0} | changes
    return Setting(
        engine_args=EngineArgs(model="simulated", **engine),
        scheduler_args=SchedulerArgs(**scheduler),
        **own,
    )


def request(input_length=10, output_length=5, **values) -> TraceRequest:
    values = {"timestamp": 0.0, "max_tokens": output_length} | values
    return TraceRequest(input_length=input_length, output_length=output_length, **values)


def run(setting: Setting, *requests: TraceRequest, block_length: int = 0) -> Outcome:
    arrivals = iter([Arrival(one.timestamp / 1000, one, 0) for one in requests])
    return Simulation(setting, arrivals, block_length).run()
