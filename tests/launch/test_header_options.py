"""Which headers tritonserver makes parameters of requests."""

import pytest

from charonia.launch.server.header_options import header_options
from charonia.server_options import ServerOptions


@pytest.mark.parametrize(
    ("given", "forwarded"),
    [
        ([], []),
        (["PATTERN=x-tenant"], ["x-tenant"]),
        (["PATTERN", "(?i)X-Tenant|x-team"], ["x-tenant", "x-team"]),
        (["PATTERN=other", "PATTERN=x-tenant"], ["x-tenant"]),
    ],
)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_contexts_are_forwarded_beside_other_headers(
    protocol: str, given: list[str], forwarded: list[str]
) -> None:
    others = [part.replace("PATTERN", f"--{protocol}-header-f") for part in given]
    options = ServerOptions([*others, *header_options(others)])
    options.check_forwarded("traceparent")  # over either
    for name in forwarded:
        assert options.forwards(name)
    for name in ("other", "x-traceparent", "traceparent2"):
        assert not options.forwards(name)


def test_over_http_a_header_may_have_any_case() -> None:
    others = ["--http-header-forward-pattern=X-Tenant"]
    options = ServerOptions([*others, *header_options(others)])
    assert options.forwards("Traceparent")
    assert not options.forwards("x-tenant")
