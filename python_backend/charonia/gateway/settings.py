"""The settings of a gateway.

Owns names and defaults. Must not know what they do.
"""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A model that answers while no server of the gateway's own model can.

    Attributes:
        servers, tokenizer: see `GatewaySettings`. model_name: its name in answers.
    """

    servers: tuple[str, ...]
    tokenizer: Path
    model_name: str


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Settings of one gateway.

    Attributes:
        servers: gRPC `host:port` of each charonia server; all serve the same model.
        tokenizer: directory of the checkpoint that they serve, or of its tokenizer's files.
        model_names: names of the model in requests. The first is listed; all are accepted.
        fallback: a model that answers while none of the servers can.
        api_key_file: API keys that may call, see `Keys.from_file`; None lets everybody call.
        chat_template: a file that replaces the checkpoint's own template.
        scheduler_model: name of the scheduler's model on the servers.
        max_body_bytes: bytes of one request's body. max_held_bytes: bytes of all running requests.
        max_prompts: prompts of one request.
        max_requests: concurrent requests; further ones are refused.
        read_timeout_s: timeout for reading a request's body.
        stall_timeout_s: a stream is cancelled if its client reads nothing for this long.
        request_timeout_s: timeout of a whole request, which the fallback model gets again; None is
            no limit.
        drain_timeout_s: time for running requests to finish after SIGTERM.
        num_threads: threads for requests that are too large to read and tokenize on the event loop.
        otlp_traces_endpoint: OTLP collector of spans, see `tracing.endpoint`; None sends none.
        trace_rate: of the requests without a trace context, one in so many is traced; 0 is none.
    """

    servers: tuple[str, ...]
    tokenizer: Path
    model_names: tuple[str, ...]
    fallback: Fallback | None = None
    api_key_file: Path | None = None
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
    otlp_traces_endpoint: str | None = None
    trace_rate: int = 1
