"""How tritonserver is told to trace."""

import pytest

from charonia.errors import ConfigError
from charonia.launch.server.trace_options import trace_options
from charonia.supervision.models.server_options import ServerOptions

ENDPOINT = "http://collector:4318"


@pytest.mark.parametrize(
    ("others", "forwarded"),
    [
        ([], []),
        (["--grpc-header-forward-pattern=x-tenant"], ["x-tenant"]),
        (["--grpc-header-forward-pattern", "(?i)X-Tenant|x-team"], ["x-tenant", "x-team"]),
        (["--grpc-header-f=other", "--grpc-header-f=x-tenant"], ["x-tenant"]),
    ],
)
def test_contexts_are_forwarded_beside_other_headers(
    others: list[str], forwarded: list[str]
) -> None:
    options = ServerOptions(trace_options(ENDPOINT, 1, others))
    for name in ("traceparent", *forwarded):
        assert options.forwards(name)
    for name in ("other", "x-traceparent", "traceparent2"):
        assert not options.forwards(name)


def test_settings_of_traces_can_be_changed() -> None:
    options = trace_options(ENDPOINT, 3, ["--trace-config=rate=7"])
    assert options.index("--trace-config=rate=3") < options.index("--trace-config=rate=7")


def test_an_endpoint_that_tritonserver_cannot_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="'https://collector' must begin with http://"):
        trace_options("https://collector", 1)
