"""Every dashboard fits Grafana's schema, as grafana-foundation-sdk has it in its types.

The package is made from the schema: a class for each object, with the type of each field, also for
what each kind of panel has and for Prometheus' queries. A dashboard fits if it is the same when it
is decoded and written again, because a field that no class knows is lost, and if each value has its
field's type. What the types do not say is not checked, such as ranges and patterns.
"""

import enum
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARDS = sorted(
    (Path(__file__).parents[2] / "docker" / "grafana" / "dashboards").glob("*.json")
)
SCALARS = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}
register_default_plugins()


def misfits(value: Any, wanted: Any, at: str) -> Iterator[str]:
    """Where a value, and all within it, is not of the type that the schema wants."""
    if hasattr(wanted, "from_json") and isinstance(value, dict):
        decoded = wanted.from_json(value)
        if json.loads(JSONEncoder().encode(decoded)) != value:
            yield f"{at}: {value} is not the same when it is written again"
        value = decoded
    if isinstance(value, UnknownDataquery):
        yield f"{at}: a query of no known kind"
    elif hasattr(value, "from_json"):
        if isinstance(wanted, type) and not isinstance(value, wanted):
            yield f"{at}: {type(value).__name__} instead of {wanted.__name__}"
        for name, hint in typing.get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), hint, f"{at}.{name}")
    elif not isinstance(wanted, type) or typing.get_origin(wanted) is not None:
        yield from generic_misfits(value, wanted, at)
    elif issubclass(wanted, enum.Enum):
        if value not in [member.value for member in wanted]:
            yield f"{at}: {value!r} is not in {wanted.__name__}"
    elif wanted is not object and (
        not isinstance(value, SCALARS.get(wanted, (wanted,)))
        or (isinstance(value, bool) and wanted is not bool)
    ):
        yield f"{at}: {value!r} is no {wanted.__name__}"


def generic_misfits(value: Any, wanted: Any, at: str) -> Iterator[str]:
    """The same for a type with arguments, and for Any."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        found = [list(misfits(value, one, at)) for one in args]
        if all(found):
            yield from max(found, key=len)
    elif origin is typing.Literal:
        if value not in args:
            yield f"{at}: {value!r} is none of {args}"
    elif origin is list and isinstance(value, list):
        for number, one in enumerate(value):
            yield from misfits(one, args[0], f"{at}[{number}]")
    elif origin is dict and isinstance(value, dict):
        for key, one in value.items():
            yield from misfits(one, args[1], f"{at}[{key!r}]")
    elif wanted is not Any:
        yield f"{at}: {value!r} is no {wanted}"


def dashboard(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_a_dashboard_fits_the_schema(path: Path) -> None:
    assert list(misfits(dashboard(path), Dashboard, path.stem)) == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_a_unit_is_one_of_grafanas(path: Path) -> None:
    panels = [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]
    found = {panel["fieldConfig"]["defaults"]["unit"] for panel in panels}
    assert found <= {name for name in vars(units).values() if isinstance(name, str)}


def panel_of(found: Any, kind: str) -> Any:
    return next(panel for panel in found["panels"] if panel["type"] == kind)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.update(unheard_of=1),
        lambda found: found.update(title=1),
        lambda found: found.update(graphTooltip=7),
        lambda found: found["templating"]["list"][0].update(hide="never"),
        lambda found: found["links"][0].update(asDropdown="yes"),
        lambda found: panel_of(found, "stat").update(gridPos={"h": "4", "w": 4, "x": 0, "y": 0}),
        lambda found: panel_of(found, "stat")["options"].update(textMode="loud"),
        lambda found: panel_of(found, "stat")["targets"][0].update(expression="up"),
        lambda found: panel_of(found, "stat")["targets"][0].update(instant="yes"),
        lambda found: panel_of(found, "stat").update(datasource={"type": "unheard_of"}),
        lambda found: panel_of(found, "timeseries")["options"]["legend"].update(placement="top"),
        lambda found: panel_of(found, "timeseries")["fieldConfig"]["defaults"].update(min="0"),
        lambda found: panel_of(found, "timeseries")["fieldConfig"]["defaults"]["custom"].update(
            showPoints="sometimes"
        ),
    ],
)
def test_what_does_not_fit_is_found(spoil: Callable[[Any], None]) -> None:
    found = dashboard(next(path for path in DASHBOARDS if path.stem == "overview"))
    spoil(found)
    assert len(list(misfits(found, Dashboard, "overview"))) >= 1
