"""Reads charonia's metrics from the page of a running server.

Owns how they are parsed. Must not know what they mean.
"""

import httpx

_TIMEOUT_S = 5.0


def read_metrics(url: str) -> dict[str, float] | None:
    """Return values by name, without labels; None if the page cannot be reached.

    Args:
        url: of the page.
    """
    try:
        page = httpx.get(url, timeout=_TIMEOUT_S).text
    except httpx.HTTPError:
        return None
    found = {}
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        if name.startswith("charonia_"):
            found[name] = float(value)
    return found
