"""The launch variants of vLLM on CPUs, to be timed before one is taken.

Its engine runs in the process that asks or in one of its own, and its documentation has an
allocator and an OpenMP preloaded (docs.vllm.ai, "CPU", LD_PRELOAD); which is fastest depends on the
machine. Owns where these libraries are. Must not know how a variant is timed.
"""

from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

PROCESSES = {"engine in the asking process": "0", "engine in a process of its own": "1"}
OPENMP = {
    "libgomp": "lib/python3*/site-packages/torch/lib/libgomp*.so*",
    "libiomp": "lib/libiomp5.so",
}
TCMALLOC = "usr/lib/*/libtcmalloc_minimal.so.4"


BUDGET = "BENCH_MAX_NUM_BATCHED_TOKENS"
"""Variable with vLLM's `max_num_batched_tokens`, for its worker; without it vLLM decides."""
BUDGETS = (2048, 16384)
"""Tokens of a step to try beside vLLM's own with long prompts; vLLM 0.32 on CPUs has 4,096."""


@dataclass(frozen=True)
class Variant:
    """A way to launch a side: a name for people, and the variables of its environment."""

    name: str
    variables: Mapping[str, str]


def vllm_variants(environment: Path) -> list[Variant]:
    """All that the libraries which are there allow: two numbers of processes, each as it is and
    with each of the OpenMPs, and all of these again with tcmalloc.

    Args:
        environment: vLLM's virtual environment, as setup_peers.py makes it.
    """
    preloads: list[dict[str, str]] = [{}]
    preloads += [
        {name: str(path)} for name, place in OPENMP.items() for path in environment.glob(place)
    ]
    system = find_library("tcmalloc_minimal")
    if tcmalloc := [*map(str, environment.glob(TCMALLOC)), *([system] if system else [])]:
        preloads += [{"tcmalloc": tcmalloc[0], **preload} for preload in preloads]
    variants = []
    for processes, flag in PROCESSES.items():
        for preload in preloads:
            variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": flag}
            if preload:
                variables["LD_PRELOAD"] = ":".join(preload.values())
            variants.append(Variant(" + ".join([processes, *preload]), variables))
    return variants


def with_budgets(variant: Variant) -> list[Variant]:
    """The same variant with other numbers of tokens in a step."""
    return [
        Variant(
            f"{variant.name} + {budget:,} tokens a step", {**variant.variables, BUDGET: f"{budget}"}
        )
        for budget in BUDGETS
    ]


def variants_named(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Find variants by name, among `variants` and these with other numbers of tokens in a step.

    Raises:
        ValueError: there is none of a name; the text has all that there are.
    """
    known = {each.name: each for own in variants for each in (own, *with_budgets(own))}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no {unknown[0]!r}; there are\n  " + "\n  ".join(known))
    return [known[name] for name in names]
