"""What a tritonserver's command line says of model control."""

import os
import subprocess

import pytest

from charonia.errors import ConfigError
from charonia.server_options import (
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


HTTP_FLAG = "--http-header-forward-pattern"
GRPC_FLAG = "--grpc-header-forward-pattern"
NEEDED_HTTP, NEEDED_GRPC = f"{HTTP_FLAG}='(?i)X-Tenant'", f"{GRPC_FLAG}=x-tenant"


@pytest.mark.parametrize(
    "command_line",
    [
        [f"{HTTP_FLAG}=(?i)^X-TENANT$", f"{GRPC_FLAG}=x-tenant"],
        [f"{HTTP_FLAG}=(X-Tenant|x-tenant)", f"{GRPC_FLAG}=(?i)X-Tenant"],
        [f"{HTTP_FLAG}=.*", "--allow-grpc=false"],
        [f"{GRPC_FLAG}=x-.*", "--allow-http=false"],
    ],
)
def test_a_header_that_every_protocol_forwards_may_say_whose_a_request_is(
    command_line: list[str],
) -> None:
    ServerOptions(["tritonserver", *command_line]).check_forwarded("X-Tenant")


@pytest.mark.parametrize(
    ("command_line", "missing"),
    [
        ([], [NEEDED_HTTP, NEEDED_GRPC]),
        ([f"{HTTP_FLAG}=X-Other", f"{GRPC_FLAG}=x-other"], [NEEDED_HTTP, NEEDED_GRPC]),
        ([f"{HTTP_FLAG}=(?i)x-tenant"], [NEEDED_GRPC]),
        ([f"{GRPC_FLAG}=x-tenant"], [NEEDED_HTTP]),
        ([f"{HTTP_FLAG}=x-tenant", f"{GRPC_FLAG}=x-tenant"], [NEEDED_HTTP]),
        ([f"{HTTP_FLAG}=X-Tenant", f"{GRPC_FLAG}=x-tenant"], [NEEDED_HTTP]),
        ([f"{HTTP_FLAG}=(?i)x-tenant", f"{GRPC_FLAG}=X-Tenant"], [NEEDED_GRPC]),
        ([f"{HTTP_FLAG}=(?i)x-tenant", "--allow-grpc=true"], [NEEDED_GRPC]),
        ([f"{HTTP_FLAG}=\\pL", f"{GRPC_FLAG}=x-tenant"], [NEEDED_HTTP]),  # what only RE2 knows
    ],
)
def test_a_header_that_a_protocol_does_not_forward_is_refused_by_the_options_it_lacks(
    command_line: list[str], missing: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(["tritonserver", *command_line]).check_forwarded("X-Tenant")
    assert str(caught.value) == (
        "tritonserver does not forward the header X-Tenant over every protocol; start it with "
        + " and ".join(missing)
    )


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
