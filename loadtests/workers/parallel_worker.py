"""charonia on one rank or several, and where its first rank's time went."""

import time
from typing import Any

from charonia_worker import Charonia
from worker import Answer, Request, Wave, serve


def _prepare(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    engine = Charonia(settings)
    kernels = engine.runner.ops.kernels

    def phases() -> dict[str, float]:
        return dict(kernels.phase_seconds()) if kernels else {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        before, started = phases(), time.perf_counter()
        requests = [Request(**each) for each in request["requests"]]
        wave = Wave(len(requests))
        engine.complete(wave, requests, {})
        spent = {name: seconds - before[name] for name, seconds in phases().items()}
        spent["all"] = time.perf_counter() - started
        return {"wave": wave.as_answer(), "spent": spent}

    return {"versions": engine.versions, "notes": engine.notes}, answer


if __name__ == "__main__":
    serve(_prepare)
