"""An honest client beside a hostile one.

Owns its request, again and again with one seed, and what it saw. Must not know the attack.
"""

import threading
import time
from dataclasses import dataclass, field
from statistics import median

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import GrpcStream, ids_of, request_inputs, text_of

PROMPT = "A request waits in the queue until"
SAMPLING = {"max_tokens": 150, "temperature": 1.5, "seed": 12, "ignore_eos": True}
NUM_MEASURED = 3

Answer = tuple[str, tuple[int, ...]]
"""Text and token ids of one request."""


@dataclass
class Neighbour:
    """A context manager: requests follow each other on one gRPC stream while it lasts.

    The one under way at the end comes to its end.

    Attributes:
        answers, seconds: of each request. error: why it could not go on.
    """

    server: TritonServer
    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def median_s(self) -> float:
        """Median time of a request, in seconds; infinite if none was answered."""
        return median(self.seconds or [float("inf")])

    def _run(self) -> None:
        try:
            with GrpcStream(self.server) as stream:
                while not self._is_over.is_set() or not self.answers:
                    self._ask(stream)
        except Exception as error:  # whatever it was is the trial's to judge
            self.error = error

    def _ask(self, stream: GrpcStream) -> None:
        started = time.monotonic()
        inputs = request_inputs(PROMPT, SAMPLING, stream=True, return_token_ids=True)
        responses = list(stream.send(inputs))
        self.seconds.append(time.monotonic() - started)
        self.answers.append((text_of(responses), tuple(ids_of(responses))))


def undisturbed(server: TritonServer) -> Neighbour:
    """Measure the neighbour's answers and their times when nobody attacks."""
    neighbour = Neighbour(server)
    with neighbour:
        while len(neighbour.answers) < NUM_MEASURED and neighbour.error is None:
            time.sleep(0.01)
    assert neighbour.error is None, neighbour.error
    return neighbour
