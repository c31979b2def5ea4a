"""Writes what files repeat of the interface: `make interface`.

Tensors come from `serving/conventions/interface.py`, metrics from `metrics/metric_table.py`,
arguments with their meanings from the docstrings of `config/`. The gateway's OpenAPI document is
written as a whole.

Owns the places between two marks, in a config.pbtxt, and as comments of Markdown in a README.md::

    # inputs of llm: written by `make interface`
    ...
    # end

Must not know what the tables say. `--check` writes nothing and fails where a file would change.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from charonia import vllm_args
from charonia.config import EngineArgs, KVEventsConfig, SchedulerArgs, SpeculativeConfig
from charonia.core.gate.tenants import TenantArgs
from charonia.errors import LaunchError
from charonia.gateway import openapi
from charonia.launch.server.discovery import default_repository
from charonia.metrics.metric_table import METRICS, VLLM_METRICS, Metric
from charonia.serving.conventions.interface import (
    INPUTS,
    MODELS,
    OUTPUTS,
    EnsembleStep,
    Tensor,
    ensemble_steps,
)
from charonia.serving.conventions.trtllm import tables as trtllm

_PLACE = re.compile(
    r"(?P<begin>^ *(?:#|<!--) (?P<key>[^\n:]+): written by `make interface`(?: -->)?\n)"
    r"(?P<text>.*?)"
    r"(?P<end>^ *(?:#|<!--) end(?: -->)?$)",
    re.MULTILINE | re.DOTALL,
)


def write_places(text: str, lines_of: Mapping[str, Callable[[], Iterable[str]]]) -> str:
    """The text with every marked place written anew.

    Args:
        lines_of: what stands at a place, by its key.

    Raises:
        LaunchError: a place has a key that is not known.
    """

    def written(place: re.Match[str]) -> str:
        key = place["key"]
        if key not in lines_of:
            accepted = ", ".join(lines_of)
            raise LaunchError(f"there is nothing to write for {key!r}; known are {accepted}")
        lines = "".join(f"{line}\n" for line in lines_of[key]())
        return place["begin"] + lines + place["end"]

    return _PLACE.sub(written, text)


def places() -> dict[str, Callable[[], Iterable[str]]]:
    """Return the functions that make generated parts, by key."""
    found: dict[str, Callable[[], Iterable[str]]] = {}
    for model, tensors in MODELS.items():
        found[f"inputs of {model}"] = partial(_config_inputs, tensors.inputs)
        found[f"outputs of {model}"] = partial(_config_outputs, tensors.outputs)
    for model in ("ensemble", "tensorrt_llm"):
        facade = trtllm.MODELS[model]
        found[f"what {model} takes"] = partial(_table, "input", facade.accepted)
        found[f"what {model} refuses"] = partial(_refused, facade.refused)
        found[f"what {model} gives"] = partial(_table, "output", facade.outputs)
    found["steps of llm"] = partial(_config_steps, tuple(ensemble_steps()))
    found["inputs"] = partial(_table, "input", INPUTS)
    found["outputs"] = partial(_table, "output", OUTPUTS)
    found["engine arguments"] = partial(_arguments, EngineArgs)
    found["speculative_config"] = partial(_arguments, SpeculativeConfig)
    found["kv_events_config"] = partial(_arguments, KVEventsConfig)
    found["scheduler parameters"] = partial(_arguments, SchedulerArgs)
    found["arguments of a tenant"] = partial(_arguments, TenantArgs)
    found["arguments without effect"] = _without_effect
    found["metrics"] = partial(_metrics, METRICS)
    found["metrics by vLLM's names"] = _vllm_metrics
    return found


def _config_inputs(tensors: Iterable[Tensor]) -> Iterable[str]:
    return (f"input {{ {_fields(one)} optional: true }}" for one in tensors)


def _config_outputs(tensors: Iterable[Tensor]) -> Iterable[str]:
    return (f"output {{ {_fields(one)} }}" for one in tensors)


def _fields(tensor: Tensor) -> str:
    dims = ", ".join(map(str, tensor.dims))
    return f'name: "{tensor.name}" data_type: TYPE_{tensor.datatype} dims: [ {dims} ]'


def _config_steps(steps: Iterable[EnsembleStep]) -> Iterable[str]:
    for step in steps:
        yield "  step {"
        yield f'    model_name: "{step.model}"'
        yield "    model_version: -1"
        for kind, names in (("input_map", step.inputs), ("output_map", step.outputs)):
            for own, called in names.items():
                yield f'    {kind} {{ key: "{own}" value: "{called}" }}'
        yield "  }"


def _table(what: str, tensors: Iterable[Tensor]) -> Iterable[str]:
    yield f"| {what} | type, dims | meaning |"
    yield "| --- | --- | --- |"
    for one in tensors:
        yield f"| `{one.name}` | {one.datatype} {list(one.dims)} | {one.meaning} |"


def _refused(tensors: Iterable[trtllm.Refused]) -> Iterable[str]:
    yield "| input | accepted |"
    yield "| --- | --- |"
    for one in tensors:
        texts = (value.decode() if isinstance(value, bytes) else value for value in one.neutral)
        shown = " or ".join(f"`{json.dumps(text)}`" for text in texts)
        yield f"| `{one.name}` | {shown or ('no elements' if -1 in one.dims else 'none')} |"


def _arguments(struct: type[msgspec.Struct]) -> Iterable[str]:
    """A table of a Struct's fields: name as clients write it, default, meaning by its docstring.

    Raises:
        LaunchError: the docstring says nothing of a field.
    """
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    meanings = meanings_of(inspect.getdoc(struct) or "")
    if missing := fields.keys() - {name for names in meanings for name in names}:
        raise LaunchError(f"the docstring of {struct.__name__} has no {', '.join(missing)}")
    yield "| argument | default | meaning |"
    yield "| --- | --- | --- |"
    for names, meaning in meanings.items():
        shown = ", ".join(f"`{fields[name].encode_name}`" for name in names)
        defaults = {_default(fields[name]) for name in names}
        yield f"| {shown} | {', '.join(sorted(defaults))} | {meaning} |"


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "" if field.required else f"`{json.dumps(field.default)}`"


def meanings_of(docstring: str) -> dict[tuple[str, ...], str]:
    """Parse the `Attributes:` of a docstring into texts by the names that an entry begins with."""
    _, _, attributes = docstring.partition("Attributes:\n")
    entries = re.findall(
        r"^    ([a-z_]+(?:, [a-z_]+)*): (.*(?:\n     +.*)*)", attributes, re.MULTILINE
    )
    words = {"None": "null", "True": "true", "False": "false"}  # as JSON has them
    return {
        tuple(names.split(", ")): re.sub(
            r"\b(None|True|False)\b", lambda word: words[word[0]], " ".join(text.split())
        )
        for names, text in entries
    }


def _without_effect() -> Iterable[str]:
    yield "| because | arguments, and what is taken beside null where not all values are |"
    yield "| --- | --- |"
    for why, names in vllm_args.BY_REASON.items():
        shown = [
            f"`{name}`"
            + ("" if values is None else f" ({', '.join(map(json.dumps, values)) or 'null'})")
            for name, values in names.items()
        ]
        yield f"| {why} | {', '.join(shown)} |"


def _metrics(metrics: Mapping[str, Metric]) -> Iterable[str]:
    yield "| metric | kind | label | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, one in metrics.items():
        yield f"| `{name}` | {_kind(one)} | {_label(one)} | {one.help} |"


def _vllm_metrics() -> Iterable[str]:
    yield "| metric | ours | kind | label | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for name, one in VLLM_METRICS.items():
        yield f"| `{name}` | {_ours(one)} | {_kind(one)} | {_label(one)} | {one.help} |"


def _kind(metric: Metric) -> str:
    return metric.kind + ("" if metric.place == "triton" else ", merged page")


def _label(metric: Metric) -> str:
    if not metric.label:
        return ", ".join(f"`{name}`" for name in metric.info)
    return f"`{metric.label}`" + (f": {', '.join(metric.values)}" if metric.values else "")


def _ours(metric: Metric) -> str:
    """The metric of ours that answers one by another's name."""
    if metric.ours or metric.shows not in METRICS:
        return metric.ours or "none"
    label = METRICS[metric.shows].label
    if not label or metric.label:
        return f"`{metric.shows}`" + (f", by `{label}`" if label else "")
    return f"`{metric.shows}`, all of `{label}`"


def main(arguments: list[str] | None = None) -> int:
    """Write, or check, all files."""
    parser = argparse.ArgumentParser(
        prog="python -m charonia.launch.commands.interface_files",
        description="write what config.pbtxt and README.md files repeat of the interface's tables",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would")
    is_check = parser.parse_args(arguments).check
    repository = default_repository()
    known = places()
    wanted: dict[Path, str] = {}
    for path in (*sorted(repository.glob("*/config.pbtxt")), repository / "README.md"):
        wanted[path] = write_places(path.read_text(encoding="utf-8"), known)
    wanted[Path(openapi.__file__).with_name("openapi.json")] = openapi.encoded()
    num_changed = 0
    for path, after in wanted.items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if after != before:
            num_changed += 1
            print(f"{path}: {'differs from the interface' if is_check else 'written'}")
            if not is_check:
                path.write_text(after, encoding="utf-8")
    if is_check and num_changed:
        print("run `make interface`", file=sys.stderr)
    return int(is_check and num_changed > 0)


if __name__ == "__main__":
    sys.exit(main())
