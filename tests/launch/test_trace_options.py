"""How tritonserver is told to trace."""

import pytest

from charonia.errors import ConfigError
from charonia.launch.server.trace_options import trace_options

ENDPOINT = "http://collector:4318"


def test_settings_of_traces_can_be_changed() -> None:
    options = trace_options(ENDPOINT, 3, ["--trace-config=rate=7"])
    assert options.index("--trace-config=rate=3") < options.index("--trace-config=rate=7")


def test_an_endpoint_that_tritonserver_cannot_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="'https://collector' must begin with http://"):
        trace_options("https://collector", 1)
