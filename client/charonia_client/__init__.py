"""A typed client for charonia: synchronous and asyncio, over gRPC and HTTP.

from charonia_client import Client

with Client() as client:
    for chunk in client.stream("def fibonacci(n):", max_tokens=64, temperature=0):
        print(chunk.text, end="", flush=True)
"""

from charonia_client.client import AsyncClient, Client
from charonia_client.errors import (
    Cancelled,
    CharoniaClientError,
    ConnectionFailed,
    ConnectionLost,
    InvalidRequest,
    Late,
    Overloaded,
    QueueFull,
    RateLimited,
    ServerError,
    Timeout,
    Unavailable,
)
from charonia_client.metrics import MetricsSnapshot
from charonia_client.retry import RetryPolicy
from charonia_client.streams import AsyncCompletionStream, CompletionStream
from charonia_client.values import (
    Chunk,
    Completion,
    EngineState,
    Health,
    Load,
    PositionLogprobs,
    Sample,
    Sampling,
    Timeouts,
    TokenLogprob,
)

__all__ = [
    "AsyncClient",
    "AsyncCompletionStream",
    "Cancelled",
    "CharoniaClientError",
    "Chunk",
    "Client",
    "Completion",
    "CompletionStream",
    "ConnectionFailed",
    "ConnectionLost",
    "EngineState",
    "Health",
    "InvalidRequest",
    "Late",
    "Load",
    "MetricsSnapshot",
    "Overloaded",
    "PositionLogprobs",
    "QueueFull",
    "RateLimited",
    "RetryPolicy",
    "Sample",
    "Sampling",
    "ServerError",
    "Timeout",
    "Timeouts",
    "TokenLogprob",
    "Unavailable",
]
