"""The engine model's side: takes plans from the scheduler alone and has a Runner execute them.

Owns the secret's check and what becomes of an exception. Must not know what is in a plan, nor
torch: the runner is made by a function that is passed in.
"""

import hmac
import locale
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from charonia.config import EngineArgs
from charonia.engine.inline import PlanRunner
from charonia.errors import CharoniaError, ConfigError, PlanRefusedError, UnavailableError
from charonia.protocol import (
    EngineReply,
    EngineRequest,
    Hello,
    StepFailure,
    StepPlan,
    decode_request,
    encode,
)
from charonia.serving.bls import PLAN, STEPS_SOCKET, clean, is_reload
from charonia.serving.channel import ChannelServer
from charonia.serving.cores import has_core_to_itself, take_engine_cores
from charonia.serving.secret import FILE_NAME, read_or_create
from charonia.serving.tensors import INTERNAL_ERROR, error_response

MODEL_FILE = "model.json"
_SPIN_S = 1e-3
"""How long the engine looks for the next step where that takes nobody's core: about twice what lies
between two steps of a busy engine."""
NOT_THE_SCHEDULER = "the engine takes plans from the scheduler alone; send requests to that model"


class EngineHost:
    """One engine behind Triton.

    An engine that the scheduler loads again comes up even when it cannot work, see `bls`.

    Args:
        make_runner: loads the engine.
        version_dir: the model's version directory, with model.json; the secret lies beside it.
        instance_kind: Triton's, e.g. "MODEL". log: takes one line.

    Raises:
        ConfigError, CheckpointError: the engine cannot be loaded as configured.
    """

    def __init__(
        self,
        pb_utils: Any,
        make_runner: Callable[[EngineArgs], PlanRunner],
        version_dir: Path,
        instance_kind: str,
        *,
        log: Callable[[str], None],
    ) -> None:
        # The stub's interpreter decodes files as ASCII otherwise, also inside torch.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        self._pb_utils = pb_utils
        self._log = log
        self._version_dir = version_dir
        self._channel_server: ChannelServer | None = None
        self._one_step_at_a_time = threading.Lock()
        self._secret = read_or_create(version_dir / FILE_NAME)
        self._runner: PlanRunner | UnavailableError
        try:
            check_instance_kind(version_dir / MODEL_FILE, instance_kind)
            take_engine_cores()
            self._runner = make_runner(EngineArgs.from_file(version_dir / MODEL_FILE))
        except Exception as error:
            if not is_reload(version_dir):
                raise
            self._log(f"the engine cannot be loaded: {traceback.format_exc()}")
            reason = clean(str(error)) if isinstance(error, CharoniaError) else type(error).__name__
            self._runner = UnavailableError(reason)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer hellos with nothing; all else with an error that gives nothing away."""
        return [self._answer_hello(request) for request in requests]

    def serve_steps(self) -> None:
        """Answer the scheduler's messages through the socket, from now until `finalize`.

        Raises:
            ConfigError: the model's directory takes no socket.
        """
        path = self._version_dir / STEPS_SOCKET
        try:
            self._channel_server = ChannelServer(
                path, self._answer_message, spin=_SPIN_S if has_core_to_itself() else 0.0
            )
        except OSError as error:
            raise ConfigError(
                f"the engine's directory must take a socket, {path.name}: {error.strerror}"
            ) from None

    def finalize(self) -> None:
        """Stop taking messages through the socket."""
        if self._channel_server is not None:
            self._channel_server.close()

    def _answer_message(self, data: bytes) -> bytes | None:
        """Answer a message of the socket; None for one that is not the scheduler's."""
        try:
            return encode(self._reply(self._decode(data)))
        except (PlanRefusedError, UnavailableError) as error:
            self._log(f"refused: {error}")
        except Exception:
            self._log(f"a message could not be read: {traceback.format_exc()}")
        return None

    def _answer_hello(self, request: Any) -> Any:
        pb_utils = self._pb_utils
        try:
            data = pb_utils.get_input_tensor_by_name(request, PLAN)
            message = self._decode(b"" if data is None else data.as_numpy().tobytes())
            if not isinstance(message, Hello):
                raise PlanRefusedError(NOT_THE_SCHEDULER)
            if isinstance(self._runner, UnavailableError):
                raise self._runner
        except (PlanRefusedError, UnavailableError) as error:
            self._log(f"refused: {error}")
            return error_response(pb_utils, error)
        except Exception:
            self._log(f"a request could not be read: {traceback.format_exc()}")
            return error_response(pb_utils, CharoniaError(INTERNAL_ERROR))
        return pb_utils.InferenceResponse([])

    def _decode(self, data: bytes) -> EngineRequest:
        """Raises PlanRefusedError for anything but a message that carries the secret."""
        try:
            message = decode_request(data)
        except (RecursionError, msgspec.DecodeError):
            raise PlanRefusedError(NOT_THE_SCHEDULER) from None
        if not hmac.compare_digest(message.secret.encode(), self._secret.encode()):
            raise PlanRefusedError(NOT_THE_SCHEDULER)
        return message

    def _reply(self, message: EngineRequest) -> EngineReply:
        if isinstance(self._runner, UnavailableError):
            raise self._runner
        try:
            if isinstance(message, Hello):
                return self._runner.info()
            assert isinstance(message, StepPlan)
            with self._one_step_at_a_time:
                return self._runner.execute(message)
        except PlanRefusedError as error:
            # An answer and no end of the connection, which would look like a dead engine.
            self._log(f"refused: {error}")
            return StepFailure(f"the plan was refused: {error}")
        except Exception as error:
            self._log(f"a step failed: {traceback.format_exc()}")
            return StepFailure(f"{type(error).__name__} in a step of the engine")


def check_instance_kind(model_file: Path, instance_kind: str) -> None:
    """Refuse one Triton instance per GPU for an engine that brings its own ranks.

    Raises:
        ConfigError: tensor_parallel_size > 1 with KIND_GPU, whatever else is wrong.
    """
    try:
        values: Mapping[str, Any] = msgspec.json.decode(model_file.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        return  # EngineArgs says it better
    size = values.get("tensor_parallel_size", 1)
    if instance_kind == "GPU" and isinstance(size, int) and size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the engine's instance group is KIND_GPU: "
            "please specify KIND_MODEL in the engine's config.pbtxt"
        )
