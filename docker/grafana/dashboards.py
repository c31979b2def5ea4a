"""Writes Grafana's dashboards: `python docker/grafana/dashboards.py`, or `--check`.

Owns how `panels.py` becomes Grafana's JSON. Needs the package grafana-foundation-sdk.
"""

import argparse
import itertools
import re
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    MatcherConfig,
    VariableRefresh,
    VariableSort,
)
from panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
HEIGHT, VALUE_HEIGHT, VALUE_WIDTH = 8, 4, 4
ALWAYS_ZERO = MatcherConfig("byValue", {"reducer": "allIsZero", "op": "gte", "value": 0})
"""Series that stay at 0, such as those of errors that do not happen."""
UNNAMED = DynamicConfigValue("custom.hideFrom", {"legend": True, "tooltip": True, "viz": False})
_SELECTOR = re.compile(r"@(?:\{([^}]*)\})?")


def selected(query: str, job: str) -> str:
    """Write a query with the selectors of the dashboard's variables."""
    chosen = 'instance=~"$instance"'
    if job == "charonia":
        chosen += ', model=~"$model"'

    def selector(found: re.Match[str]) -> str:
        return f"{{{chosen}{', ' + found[1] if found[1] else ''}}}"

    return _SELECTOR.sub(selector, query)


def of_panel(panel: Panel, job: str, width: int) -> "stat.Panel | timeseries.Panel":
    """Make a panel.

    Args:
        width: of a panel that shows more than a value, in columns of Grafana's 24.
    """
    is_stat = panel.kind in ("value", "names")
    if is_stat:
        number = stat.Panel().height(VALUE_HEIGHT).span(VALUE_WIDTH)
        last = common.ReduceDataOptions().calcs(["lastNotNull"])
        mode = BigValueTextMode.NAME if panel.kind == "names" else BigValueTextMode.VALUE
        number = number.reduce_options(last).text_mode(mode)
        number = number.color_mode(BigValueColorMode.NONE).graph_mode(BigValueGraphMode.NONE)
        made: stat.Panel | timeseries.Panel = number
    else:
        legend = (
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        lines = timeseries.Panel().height(HEIGHT).span(width).legend(legend).min(0)
        lines = lines.show_points(VisibilityMode.NEVER).fill_opacity(8)
        lines = lines.with_override(ALWAYS_ZERO, [UNNAMED])
        if panel.kind == "areas":
            lines = lines.fill_opacity(40).gradient_mode(GraphGradientMode.NONE)
            lines = lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
        made = lines
    made = made.title(panel.title).unit(panel.unit).datasource(SOURCE)
    if panel.help:
        made = made.description(panel.help)
    for number, (query, legend_text) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(selected(query, job)).ref_id(chr(ord("A") + number))
        target = target.legend_format(legend_text)
        made = made.with_target(target.instant() if is_stat else target.range())
    return made


def of_dashboard(wanted: Dashboard) -> str:
    """Make a dashboard's JSON."""
    up = f'up{{job="{wanted.job}"}}'
    made = (
        dashboard.Dashboard(wanted.title)
        .uid(f"charonia-{wanted.name}")
        .tags(["charonia"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("charonia")
            .type("dashboards")
            .tags(["charonia"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(_variable("instance", f"label_values({up}, instance)"))
    )
    if wanted.job == "charonia":
        query = 'label_values(charonia_engine_up{instance=~"$instance"}, model)'
        made = made.with_variable(_variable("model", query))
    numbers = itertools.count(1)
    for row in wanted.rows:
        made = made.with_row(dashboard.Row(row.title).id(next(numbers)))
        width = 6 if len(row.panels) == 4 else 8
        for panel in row.panels:
            made = made.with_panel(of_panel(panel, wanted.job, width).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def main() -> int:
    """Write, or check, all dashboards."""
    parser = argparse.ArgumentParser(description="write Grafana's dashboards")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would")
    is_check = parser.parse_args().check
    num_changed = 0
    for wanted in DASHBOARDS:
        path, text = FOLDER / f"{wanted.name}.json", of_dashboard(wanted)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        num_changed += 1
        print(f"{path.name} {'is not up to date' if is_check else 'written'}")
        if not is_check:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if is_check and num_changed else 0


if __name__ == "__main__":
    sys.exit(main())
