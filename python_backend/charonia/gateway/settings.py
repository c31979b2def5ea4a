"""What the operator of a gateway chooses.

Owns names and defaults. Must not know how any of it is done.
"""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Of one gateway.

    Attributes:
        servers: `host:port` of gRPC, of one charonia server each; all serve the same model.
        tokenizer: directory of the checkpoint that they serve, or of its tokenizer's files.
        model_names: of the model in requests. The first is listed, the others are served as well.
        chat_template: a file that counts instead of the checkpoint's own.
        scheduler_model: what the scheduler is called on the servers.
        max_body_bytes: of a request. max_held_bytes: of all that are under way.
        max_prompts: of one request.
        max_requests: that are under way at a time; what comes above is refused.
        read_timeout_s: in which a request's body must have come.
        stall_timeout_s: for which a reader may take nothing of its stream, before it is cancelled.
        request_timeout_s: that a request may take in all; None is without end.
        drain_timeout_s: in which running requests may finish after SIGTERM.
        num_threads: for texts that are too long to be tokenized on the event loop.
    """

    servers: tuple[str, ...]
    tokenizer: Path
    model_names: tuple[str, ...]
    chat_template: Path | None = None
    scheduler_model: str = "scheduler"
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    max_body_bytes: int = 2**24
    max_held_bytes: int = 2**28
    max_prompts: int = 128
    max_requests: int = 1024
    read_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    num_threads: int = 4
