"""`charonia metrics`: the page of metrics beside a tritonserver that was started by hand.

Owns where it listens, and when it ends. Must not know what is on the page.
"""

import contextlib
from pathlib import Path

import httpx

from charonia.errors import LaunchError
from charonia.launch.commands.serve import say, stop_on_signals
from charonia.launch.server import processes
from charonia.metrics.merged_page import MergedPage
from charonia.metrics.page_server import PageServer


def serve_metrics(repository: Path, triton_url: str, address: str, port: int) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        repository: what tritonserver was started with. triton_url: of its own page, with http://.

    Raises:
        LaunchError: there is no such directory, the URL is wrong, or the port is taken.
    """
    if not repository.is_dir():
        raise LaunchError(f"no model repository {repository}")
    if not triton_url.startswith("http://"):
        raise LaunchError(f"--triton {triton_url}: a URL that begins with http:// is needed")
    try:
        has_host = bool(httpx.URL(triton_url).host)
    except httpx.InvalidURL as error:
        raise LaunchError(f"--triton {triton_url}: {error}") from None
    if not has_host:
        raise LaunchError(f"--triton {triton_url}: a URL with a host is needed")
    with (
        stop_on_signals() as stop,
        contextlib.closing(MergedPage(repository, lambda: triton_url)) as page,
        processes.listen(address, port, "metrics") as listener,
        contextlib.closing(PageServer(listener, page.read, say)),
    ):
        port = listener.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        say(f"serving http://{host}:{port}/metrics")
        stop.wait()
        say("stopped")
