"""`charonia top`: one screen of what a running server does, from its metrics page alone.

Owns what is shown and how. Must not know where the numbers come from.

Rates and quantiles are of the last ten seconds, and `--once` waits for one interval. Gauges are of
the last page. What a page does not have is a dash: Triton's own page lacks times between tokens.
"""

import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from charonia.errors import LaunchError
from charonia.local_calls import http_client
from charonia.metrics.snapshot import NoMetricsError, Snapshot, Span

WINDOW_S = 10.0
"""Rates and quantiles are of so long a time."""
TIMEOUT_S = 5.0
_NUM_SPARKS = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR = 24
_NONE = "-"
_COLOURS = {"serving": "green", "reloading": "yellow"}
"""Colours of the engine's states; the others are red."""
MAX_TENANTS = 12
_NUM_OLDEST = 5
Row = tuple[str, ...]


class NoPageError(LaunchError):
    """The page cannot be read."""


def top(url: str, *, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show a server until the user ends it, or once.

    Args:
        url: `host:port` of the metrics.
        interval_s: seconds between two pages.

    Raises:
        LaunchError: with `once`, the page cannot be read; without it, there is no terminal.
    """
    console = console or Console()
    page = f"http://{url}/metrics"
    with http_client(timeout_s=TIMEOUT_S) as client:
        if once:
            before = _read(client, page)
            time.sleep(interval_s)
            console.print(screen(url, Span(before, _read(client, page)), []))
            return
        # `is_terminal` alone may be what FORCE_COLOR or TTY_COMPATIBLE say.
        is_terminal = console.is_terminal and console.file.isatty()
        if not is_terminal or console.is_dumb_terminal:
            raise LaunchError(
                "a server cannot be watched here, where no screen can be drawn: --once"
            )
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        try:
            _watch(client, page, url, interval_s, console)
        finally:
            signal.signal(signal.SIGTERM, handler)


def _watch(client: httpx.Client, page: str, url: str, interval_s: float, console: Console) -> None:
    seen: deque[Snapshot] = deque()
    rates: deque[float] = deque(maxlen=_NUM_SPARKS)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                seen.append(_read(client, page))
            except NoPageError as error:
                live.update(Text(f"{url}: {error}\n\ntrying again …", "red"), refresh=True)
                seen.clear()
                rates.clear()
            if len(seen) > 1:
                rates.append(Span(seen[-2], seen[-1]).rate("charonia_generation_tokens_total") or 0)
                live.update(screen(url, Span(seen[0], seen[-1]), list(rates)), refresh=True)
                while seen[-1].at - seen[0].at >= WINDOW_S:
                    seen.popleft()
            time.sleep(interval_s)


def _read(client: httpx.Client, page: str) -> Snapshot:
    try:
        reply = client.get(page)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoPageError(f"{page} cannot be read: {error or type(error).__name__}") from None
    if not reply.is_success:
        raise NoPageError(f"{page} is not there: HTTP {reply.status_code} {reply.text[:200]}")
    try:
        found = Snapshot.of(reply.text, time.monotonic())
    except NoMetricsError as error:
        raise NoPageError(f"{page}: {error}") from None
    if found.total("charonia_requests_running") is None:
        raise NoPageError(f"{page} has no metrics of charonia")
    return found


def screen(url: str, span: Span, rates: Sequence[float]) -> Group:
    """Make the screen.

    Args:
        rates: tokens per second so far, for the line.
    """
    parts: list[Table | Text] = [_head(url, span, rates)]
    grid = Table.grid(padding=(0, 3))
    tables = [
        _table("requests", _requests(span)),
        _table("latency", _latency(span), ("", "p50", "p99")),
        _table("KV cache", _cache(span)),
        _table("engine", _engine(span)),
    ]
    grid.add_row(*tables[:2])
    grid.add_row(*tables[2:])
    parts.append(grid)
    if len(tenants := list(_tenants(span))) > 1:
        columns = ("tenant", "run", "wait", "tok/s", "done/s", "refused/s", "in time")
        parts.append(_table("tenants", tenants, columns))
    return Group(*parts)


def _head(url: str, span: Span, rates: Sequence[float]) -> Text:
    states = span.after.by("charonia_engine_state", "state")
    present = [state for state, number in states.items() if number]
    state = ", ".join(present) or "no engine"
    style = f"bold {_COLOURS.get(state, 'red')}"
    if span.after.least("charonia_scheduler_up") == 0:
        state, style = "the scheduler does not answer", "bold red"
    head = Text.assemble(("charonia top", "bold"), f"  {url}  ", (state, style), "\n")
    head.append(f"{_number(span.rate('charonia_generation_tokens_total'))} tokens/s ", "bold cyan")
    head.append(_line(rates), "cyan")
    return head.append("\n")


def _requests(span: Span) -> Iterator[Row]:
    after = span.after
    rows = after.total("charonia_max_rows")
    running = after.total("charonia_requests_running")
    yield "running", _number(running) + (f" of {_number(rows)}" if rows else "")
    yield "waiting", _number(after.total("charonia_requests_waiting"))
    oldest = after.greatest("charonia_oldest_request_seconds", _NUM_OLDEST)
    yield "slowest requests", _NONE if oldest is None else _ages(oldest)
    yield "finished", _per_s(span.rate("charonia_finished_total"))
    yield "refused", _per_s(span.rate("charonia_rejections_total"))
    yield "cancelled", _per_s(span.rate("charonia_cancellations_total"))
    computed = span.rate("charonia_prompt_tokens_total", source="computed")
    cached = span.rate("charonia_prompt_tokens_total", source="cached")
    yield "prompts", f"{_number(computed)} tok/s, {_number(cached)} cached"


def _latency(span: Span) -> Iterator[Row]:
    for what, name in (
        ("queue", "charonia_queue_seconds"),
        ("first token", "charonia_time_to_first_token_seconds"),
        ("between tokens", "charonia_inter_token_seconds"),
        ("request", "charonia_request_seconds"),
        ("step", "charonia_step_seconds"),
        ("plan", "charonia_plan_seconds"),
    ):
        yield what, _time(span.quantile(name, 0.5)), _time(span.quantile(name, 0.99))


def _cache(span: Span) -> Iterator[Row]:
    blocks = span.after.by("charonia_kv_blocks", "state")
    total, used, cached = (blocks.get(one, 0.0) for one in ("total", "used", "cached"))
    yield "blocks", f"{_number(used)} used, {_number(cached)} cached of {_number(total)}"
    yield "", _bar(used, cached, total)
    hits, asked = (f"charonia_prefix_cache_{one}_tokens_total" for one in ("hit", "queried"))
    yield "prefix hits", _share(span.share(hits, asked))
    yield "evicted", _per_s(span.rate("charonia_kv_blocks_evicted_total"))
    yield "preempted", _per_s(span.rate("charonia_preemptions_total"))
    for tier, value in span.after.by("charonia_kv_tier_blocks", "tier").items():
        if value:
            yield f"{tier} tier", f"{_number(value)} blocks"


def _engine(span: Span) -> Iterator[Row]:
    after = span.after
    yield "restarts", _number(after.total("charonia_engine_restarts_total"))
    failures = after.by("charonia_engine_failures_total", "kind")
    shown = ", ".join(f"{kind} {value:g}" for kind, value in failures.items() if value)
    yield "failures", shown or "none"
    drafted, accepted = "charonia_draft_tokens_total", "charonia_accepted_tokens_total"
    yield "drafts accepted", _share(span.share(accepted, drafted))
    yield "draft depth", _number(after.most("charonia_draft_depth"))
    memory = after.by("charonia_engine_memory_bytes", "part")
    weights, kv_cache = (_bytes(memory.get(part)) for part in ("weights", "kv_cache"))
    yield "memory", f"{weights} with weights, {kv_cache} of KV cache"
    yield "degradation", _number(after.most("charonia_degradation_level"))


def _tenants(span: Span) -> Iterator[Row]:
    """The busiest tenants."""
    running = span.after.by("charonia_tenant_requests_running", "tenant")
    waiting = span.after.by("charonia_tenant_requests_waiting", "tenant")
    tokens = span.rates_by("charonia_tenant_generation_tokens_total", "tenant")
    done = span.rates_by("charonia_tenant_requests_total", "tenant")
    refused = span.rates_by("charonia_tenant_rejections_total", "tenant")
    names = sorted(running, key=lambda name: (-tokens.get(name, 0.0), name))
    for name in names[:MAX_TENANTS]:
        met, missed = (
            span.rise(f"charonia_deadline_{one}_total", tenant=name) or 0.0
            for one in ("met", "missed")
        )
        yield (
            name,
            _number(running[name]),
            _number(waiting.get(name)),
            _number(tokens.get(name)),
            _number(done.get(name)),
            _number(refused.get(name)),
            _share(met / (met + missed) if met + missed else None),
        )


def _table(title: str, rows: Iterable[Row], columns: Row = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = bool(columns)
    for number, name in enumerate(columns or ("", "")):
        table.add_column(name, justify="right" if columns and number else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # a name may have what rich takes for markup
    return table


def _line(rates: Sequence[float]) -> str:
    most = max(rates, default=0.0)
    if not most:
        return ""
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(last * rate / most)] for rate in rates)


def _bar(used: float, cached: float, total: float) -> str:
    if not total:
        return ""
    full = round(_BAR * used / total)
    half = min(round(_BAR * cached / total), _BAR - full)
    return "█" * full + "▒" * half + "░" * (_BAR - full - half)


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _ages(oldest: Sequence[float]) -> str:
    shown = ", ".join(_number(round(age, 1)) for age in oldest if age)
    return f"{shown} s so far" if shown else "none"


def _per_s(value: float | None) -> str:
    return _NONE if value is None else f"{_number(value)}/s"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _bytes(value: float | None) -> str:
    if not value:
        return _NONE
    return f"{value / 2**20:.0f} MiB" if value < 2**30 else f"{value / 2**30:.1f} GiB"
