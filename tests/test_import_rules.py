"""Who may import whom: the planes stay apart, and the scheduler's process stays without torch.

The table below is the one of the design. It is read against the imports in the sources, those
inside functions and under TYPE_CHECKING too: a type from another plane is knowledge of it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.syntax import parse

PACKAGE = Path(__file__).parents[1] / "python_backend" / "charonia"


@dataclass(frozen=True)
class Rule:
    """What one part of the package may import; itself and the standard library always.

    Attributes:
        ours: other parts of the package.
        others: packages of others.
        inside_functions: packages of others that must not be loaded with the module.
        never: exceptions from the standard library.
    """

    ours: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    inside_functions: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def rule(ours: str = "", others: str = "", inside_functions: str = "", never: str = "") -> Rule:
    """Write a rule as words."""
    words = (ours, others, inside_functions, never)
    return Rule(*(frozenset(value.split()) for value in words))


# The part "" is charonia/__init__.py.
RULES = {
    "": rule("protocol llm version"),
    "errors": rule(),
    "version": rule(),
    "protocol": rule("errors", "msgspec"),
    "config": rule("errors vllm_args", "msgspec"),
    "vllm_args": rule("checkpoint_files errors"),
    "sampling_defaults": rule("protocol config errors checkpoint_files"),
    "checkpoint_files": rule("errors"),
    "sockets": rule("events"),
    "events": rule(),
    "log_level": rule("events"),
    # No threads and no clock: time is an argument.
    "control": rule(
        "protocol errors", "msgspec", never="threading concurrent asyncio multiprocessing time"
    ),
    "text": rule("protocol errors checkpoint_files", "tokenizers jinja2"),
    # psutil tells how much memory there is for the KV cache.
    "data": rule(
        "protocol errors events config checkpoint_files sampling_defaults version",
        "torch numpy safetensors msgspec psutil xxhash",
    ),
    # psutil tells which network interface an address belongs to.
    "parallel": rule(
        "data protocol config sockets errors events version", "torch numpy msgspec psutil"
    ),
    "traces": rule("errors", "msgspec"),
    "tracing": rule("control events errors", "opentelemetry"),
    "metrics": rule(
        "protocol control sockets errors local_calls", "msgspec httpx h11 prometheus_client"
    ),
    "core": rule(
        "protocol control metrics text config errors events traces tracing",
        "msgspec zmq",
        inside_functions="torch",
    ),
    # No torch: it runs beside the scheduling thread.
    "embedding": rule(
        "errors checkpoint_files",
        "numpy safetensors tokenizers",
        inside_functions="usearch threadpoolctl",
    ),
    # It drives what the engine's side does, and asks for no engine.
    "simulate": rule(
        "core control protocol config errors traces",
        "msgspec numpy",
        inside_functions="matplotlib",
    ),
    # Triton's config.pbtxt files.
    "model_config": rule("errors", "google tritonclient"),
    # tritonserver's command line.
    "server_options": rule("errors"),
    "local_calls": rule("", "httpx tritonclient"),
    # It is given the server that it watches. psutil reads the process table.
    "supervision": rule(
        "protocol sockets errors events model_config server_options local_calls",
        "msgspec psutil httpx grpc tritonclient",
    ),
    # It makes the tokenizer that it hands to the engine's service.
    "serving": rule(
        "core metrics text embedding protocol config sampling_defaults sockets supervision errors"
        " server_options events log_level tracing"
        " checkpoint_files",
        "numpy msgspec grpc tritonclient",
    ),
    # It knows servers through the client alone.
    "gateway": rule(
        "config errors events text protocol checkpoint_files version tracing",
        "fastapi starlette uvicorn httptools pydantic pydantic_core msgspec prometheus_client"
        " opentelemetry charonia_client",
    ),
}
# These may import anything, and only each other may import them (and "" the Python API, lazily).
FREE = {"launch", "demo", "llm"}


def part_of(module: str) -> str:
    """Return the part that a module of ours belongs to: `charonia.control.cache` → `control`."""
    name = [*module.split("."), ""][1]
    return name if name in RULES or name in FREE else ""


def imports_of(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the full names that a source imports, and whether it does so inside a function."""
    todo: list[tuple[ast.AST, bool]] = [(parse(source), False)]
    while todo:
        node, is_inside = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import cannot be told apart by its name: there are none.
            prefix = "." * node.level + (node.module or "")
            yield from ((f"{prefix}.{alias.name}", is_inside) for alias in node.names)
        is_inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        todo += [(child, is_inside) for child in ast.iter_child_nodes(node)]


def violations(part: str, source: str) -> list[str]:
    """Return what a source of this part imports against its rule."""
    found = []
    for name, is_inside in imports_of(source):
        top = name.split(".")[0]
        allowed = RULES[part]
        if top == "charonia":
            is_allowed = part_of(name) in allowed.ours | {part}
        elif top in sys.stdlib_module_names:
            is_allowed = top not in allowed.never
        else:
            is_allowed = top in allowed.others or (is_inside and top in allowed.inside_functions)
        if not is_allowed:
            found.append(name)
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py").removeprefix("__init__")
    if part not in FREE:
        assert part in RULES, f"{part} is new: give it a rule"
        assert violations(part, path.read_text(encoding="utf-8")) == []


def imports_among(part: str) -> dict[str, set[str]]:
    """The modules of a part, each with those of its own part that it imports."""
    modules: dict[str, Path] = {}
    for path in SOURCES:
        name = ".".join(("charonia", *path.relative_to(PACKAGE).with_suffix("").parts))
        if part_of(name) == part:
            modules[name.removesuffix(".__init__")] = path
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = {imported for imported, _ in imports_of(path.read_text(encoding="utf-8"))}
        modules_found = {one if one in modules else one.rpartition(".")[0] for one in found}
        imports[name] = modules_found & modules.keys()
    return imports


@pytest.mark.parametrize(
    ("part", "composer"),
    [
        ("control", "charonia.control.scheduling.scheduler"),
        ("parallel", "charonia.parallel.worker"),
    ],
)
def test_the_modules_of_a_part_import_each_other_in_no_circle(part: str, composer: str) -> None:
    """A module that composes others is unknown to them."""
    imports = imports_among(part)
    assert imports[composer]
    TopologicalSorter(imports).prepare()  # which raises CycleError


LAYERED = {"control", "launch", "serving", "supervision"}
"""Parts whose folders have an order: who is started or watched knows nothing of who does so."""
# A convention makes requests, and the scheduler's own requests are read by its convention.
MUTUAL = ("charonia.serving.conventions", "charonia.serving.requests")


def folder_of(module: str) -> str | None:
    """A folder of a layered part, or a module beside its folders: `charonia.launch.server`."""
    names = module.split(".")
    is_layered = names[0] == "charonia" and len(names) > 2 and names[1] in LAYERED
    return ".".join(names[:3]) if is_layered else None


def folder_imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which folder imports which others, of modules by name."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        if (own := folder_of(module)) is not None:
            others = {folder_of(name) for name, _ in imports_of(source)} - {own, None}
            found.setdefault(own, set()).update(other for other in others if other is not None)
    return found


def test_the_folders_of_layered_parts_import_each_other_in_no_circle() -> None:
    sources = {}
    for path in SOURCES:
        name = ".".join(("charonia", *path.relative_to(PACKAGE).with_suffix("").parts))
        sources[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    imports = folder_imports(sources)
    assert "charonia.supervision.server" in imports["charonia.launch.server"]
    assert imports["charonia.control.state"] == set()
    one, other = MUTUAL
    imports[one] -= {other}
    TopologicalSorter(imports).prepare()  # which raises CycleError


def test_a_circle_of_folders_would_be_noticed() -> None:
    sources = {
        "charonia.launch.server.run": "from charonia.supervision.server.probes import Probe",
        "charonia.supervision.server.watch": "def f():\n    from charonia.launch.server import run",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(folder_imports(sources)).prepare()


def test_every_rule_is_about_a_part_that_exists() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert RULES.keys() - {""} <= parts
    for name, allowed in RULES.items():
        assert allowed.ours <= RULES.keys() | ({"llm"} if name == "" else set())


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("control", "import torch"),
        ("control", "import numpy as np"),
        ("control", "from time import sleep"),
        ("control", "def run():\n    import threading"),
        ("control", "from charonia import data"),
        ("control", "import charonia.data.runner"),
        ("control", "import charonia"),
        ("control", "from ..data import runner"),
        ("control", "if TYPE_CHECKING:\n    from charonia.core.engine_core import Core"),
        ("text", "from charonia.control.state.request import Request"),
        ("text", "import torch.nn"),
        ("data", "from tokenizers import Tokenizer"),
        ("data", "async def run():\n    from charonia.text.stops import StopMatcher"),
        ("core", "import torch"),
        ("core", "class A:\n    import torch"),
        ("core", "from charonia.serving.messages import executor"),
        ("serving", "def load():\n    import torch"),
        ("serving", "from charonia.control import BlockPool"),
        ("serving", "from charonia.launch import serve"),
        ("supervision", "from charonia.launch.server.tritonserver import TritonServer"),
        ("supervision", "from charonia.serving.messages import executor"),
        ("config", "from charonia.protocol import SamplingParams"),
        ("errors", "import msgspec"),
        ("gateway", "from charonia.core.service import EngineService"),
        ("gateway", "def run():\n    import torch"),
    ],
)
def test_an_import_against_the_rules_is_noticed(part: str, source: str) -> None:
    assert len(violations(part, source)) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("control", "import heapq\nfrom charonia.protocol import StepPlan"),
        ("control", "from charonia.control import blocks"),
        ("core", "def run():\n    import torch.cuda"),
        ("serving", "import time, threading, numpy\nfrom charonia import config, errors"),
        ("", "def __getattr__(name):\n    from charonia.llm import LLM"),
    ],
)
def test_an_import_that_the_rules_allow_passes(part: str, source: str) -> None:
    assert violations(part, source) == []


# Imports all modules of the package argv[1], prints those of argv[2:] that are loaded then.
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("charonia.control", ["torch", "numpy", "tokenizers"]),
        ("charonia.text", ["torch"]),
        ("charonia.core", ["torch", "numpy", "httpx", "h11", "prometheus_client", "opentelemetry"]),
        ("charonia.embedding", ["torch", "usearch"]),
        ("charonia.supervision", ["torch"]),
        ("charonia.serving", ["torch", "usearch", "httpx", "prometheus_client", "opentelemetry"]),
        ("charonia.gateway", ["torch"]),
    ],
)
def test_importing_a_part_of_the_schedulers_process_does_not_load(
    package: str, absent: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, *absent],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_a_loaded_module_would_be_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, "charonia.text", "torch", "tokenizers"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["tokenizers"]
