"""A stream that runs while something else happens, and what it should have given.

Owns reading it in a thread of its own. Must not know what happens beside it.
"""

import contextlib
import threading
import time
from typing import Any

from tritonclient.utils import InferenceServerException

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import GrpcStream, ids_of, infer_grpc, request_inputs, stream_grpc

PROMPT = "A request waits"
REQUEST_ID = "bystander"
MAX_TOKENS = 4000


class Bystander:
    """A long stream, as a context manager: it has begun when that is entered.

    At the end it is cancelled. Where it ends by itself before, on a machine that is busy with other
    things, the same request is sent again.

    Attributes:
        token_ids: of the last stream so far.
    """

    def __init__(self, server: TritonServer, *, seed: int) -> None:
        self.token_ids: list[int] = []
        self._ended: list[list[int]] = []
        self._num_tokens = 0
        self._is_over = False
        self._server = server
        self._sampling = {"temperature": 1.5, "seed": seed, "ignore_eos": True}
        self._stream = GrpcStream(server)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Bystander":
        self._thread.start()
        self.wait_tokens(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        is_alive = self._thread.is_alive()
        self._is_over = True
        infer_grpc(self._server, {"cancel": True}, request_id=REQUEST_ID)
        self._thread.join()
        self._stream.close()
        assert is_alive or kind is not None, "the stream ended early"
        assert all(one[: len(self.token_ids)] == self.token_ids for one in self._ended)

    def wait_tokens(self, num_tokens: int) -> None:
        """Wait for so many more tokens."""
        num_tokens += self._num_tokens
        while self._num_tokens < num_tokens:
            assert self._thread.is_alive(), "the stream ended early"
            time.sleep(0.01)

    def undisturbed(self) -> list[int]:
        """Return as many tokens of the same request when it is alone."""
        return ids_of(stream_grpc(self._server, self._inputs(max_tokens=len(self.token_ids))))

    def _inputs(self, max_tokens: int) -> dict[str, Any]:
        sampling = self._sampling | {"max_tokens": max_tokens}
        return request_inputs(PROMPT, sampling, stream=True, return_token_ids=True)

    def _read(self) -> None:
        with contextlib.suppress(InferenceServerException):  # cancelled at the end
            while not self._is_over:
                self._stream.send(self._inputs(MAX_TOKENS), request_id=REQUEST_ID)
                is_new = bool(self.token_ids)
                for response in self._stream:
                    if is_new:
                        self._ended.append(self.token_ids)
                        self.token_ids, is_new = [], False
                    self.token_ids += response.outputs["output_ids"]
                    self._num_tokens += len(response.outputs["output_ids"])
