"""What a tritonserver's command line says of model control."""

import os
import subprocess

import pytest

from charonia.errors import ConfigError
from charonia.serving.server_options import (
    ENCRYPTED,
    KEY_VARIABLE,
    NO_GRPC,
    NOT_EXPLICIT,
    SHARED,
    ServerOptions,
)
from support.e2e import wait_for

EXPLICIT = "--model-control-mode=explicit"


@pytest.mark.parametrize(
    ("command_line", "refusal"),
    [
        ([], NOT_EXPLICIT),
        (["tritonserver", "--model-repository=/m"], NOT_EXPLICIT),
        (["tritonserver", EXPLICIT, ""], None),
        (["tritonserver", "--model-control-mode", "explicit", "--load-model=*"], None),
        (["tritonserver", "--model-co=explicit"], None),
        (["tritonserver", "--model-control-mode=poll"], NOT_EXPLICIT),
        (["tritonserver", "--model-control-mode=none", EXPLICIT], None),
        (["tritonserver", EXPLICIT, "--model-control-mode=none"], NOT_EXPLICIT),
        (["tritonserver", "--model-control-mode"], NOT_EXPLICIT),
        (["tritonserver", EXPLICIT, "--allow-grpc=false"], NO_GRPC),
        (["tritonserver", EXPLICIT, "--allow-grpc", "0"], NO_GRPC),
        (["tritonserver", EXPLICIT, "--allow-grpc=True"], None),
        (["tritonserver", EXPLICIT, "--grpc-use-ssl=1"], ENCRYPTED),
        (["tritonserver", EXPLICIT, "--grpc-use-ssl=false"], None),
        (["tritonserver", EXPLICIT, "--grpc-use-ssl-mutual=true"], ENCRYPTED),
        (["tritonserver", EXPLICIT, "--grpc-use-ssl-mutual=false"], ENCRYPTED),  # so it is
        (["tritonserver", EXPLICIT, "--grpc-use-ssl-mutual=true", "--grpc-use-ssl=false"], None),
        (["tritonserver", EXPLICIT, "--reuse-grpc-port=1"], SHARED),
        (["tritonserver", EXPLICIT, "--reuse-grpc-port=false", "--reuse-http-port=1"], None),
        (["tritonserver", "--model-control-mode=EXPLICIT"], None),
    ],
)
def test_whether_models_can_be_loaded_is_read_from_the_command_line(
    command_line: list[str], refusal: str | None
) -> None:
    assert ServerOptions(command_line).refusal == refusal


@pytest.mark.parametrize(
    ("command_line", "url"),
    [
        ([], "127.0.0.1:8001"),
        (["--grpc-port=7", "--grpc-address", "10.0.0.8"], "10.0.0.8:7"),
        (["--grpc-port=7", "--grpc-port", "8"], "127.0.0.1:8"),
        (["--grpc-po=7", "--grpc-add=0.0.0.0"], "127.0.0.1:7"),
        (["--grpc-address=[::]"], "[::1]:8001"),
        (["--grpc-address", "[fe80::1]"], "[fe80::1]:8001"),
        (["--http-port=7", "--http-address=10.0.0.8"], "127.0.0.1:8001"),
    ],
)
def test_where_grpc_listens_is_read_from_the_command_line(
    command_line: list[str], url: str
) -> None:
    assert ServerOptions(["tritonserver", *command_line]).grpc_url == url


@pytest.mark.parametrize(
    ("restrictions", "metadata"),
    [
        ([], ()),
        (["health:a=b"], ()),
        (["health,model-repository:a=b=c"], (("triton-grpc-protocol-a", "b=c"),)),
        (["model-repository:a=b", "health:x=y"], (("triton-grpc-protocol-a", "b"),)),
        (["health:x=y", "model-repository:a=b"], (("triton-grpc-protocol-a", "b"),)),
    ],
)
def test_what_opens_model_control_is_read_from_the_command_line(
    restrictions: list[str], metadata: tuple[tuple[str, str], ...]
) -> None:
    command_line = [f"--grpc-restricted-protocol={one}" for one in restrictions]
    assert ServerOptions(command_line).metadata == metadata


def test_a_key_in_the_environment_is_part_of_the_name_of_what_is_loaded() -> None:
    environment = {**os.environ, KEY_VARIABLE: "a=b"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        # A process that was just started shows its environment a moment later.
        name = wait_for(
            lambda: ServerOptions.of_process(process.pid).control_name("engine"),
            lambda name: name != "engine",
        )
        process.kill()
    assert name == "a=b:engine"
    assert ServerOptions.of_process(os.getpid()).control_name("engine") == "engine"


def test_a_process_that_has_ended_was_started_in_no_explicit_mode() -> None:
    assert ServerOptions.of_process(os.getpid()).refusal == NOT_EXPLICIT
    assert ServerOptions.of_process(2**22 + 1).refusal == NOT_EXPLICIT


@pytest.mark.parametrize(
    ("pattern", "is_forwarded"),
    [("x-tenant", True), ("X-Tenant", True), ("(?i)^X-TENANT$", True), ("X-Other", False)],
)
def test_a_header_may_be_forwarded_in_another_case(pattern: str, is_forwarded: bool) -> None:
    options = ServerOptions(["tritonserver", f"--http-header-forward-pattern={pattern}"])
    if is_forwarded:
        options.check_forwarded("X-Tenant")
    else:
        with pytest.raises(ConfigError, match="does not forward the header X-Tenant; start it"):
            options.check_forwarded("X-Tenant")


@pytest.mark.parametrize(
    ("command_line", "name", "is_forwarded"),
    [
        ([], "X-Id", False),
        (["--http-header-forward-pattern=X-.*"], "X-Id", True),
        (["--http-header-forward-pattern", "X-.*"], "x-id", False),
        (["--http-h=.*"], "anything", True),
        (["--http-header-forward-pattern="], "anything", False),
        (["--http-header-forward-pattern=a", "--grpc-header-forward-pattern=b"], "b", True),
        (["--http-header-forward-pattern=a", "--http-header-forward-pattern=b"], "a", False),
        (["--grpc-header-forward-pattern=\\pN"], "7", True),  # what only RE2 knows
    ],
)
def test_which_headers_become_parameters_is_read_from_the_command_line(
    command_line: list[str], name: str, is_forwarded: bool
) -> None:
    assert ServerOptions(["tritonserver", *command_line]).forwards(name) == is_forwarded
