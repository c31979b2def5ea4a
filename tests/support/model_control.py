"""Model control that a test can look into, in the place of a real tritonserver's."""


class FakeControl:
    """Does nothing.

    Attributes:
        done: what was asked of it, in order. failure: what each load raises, if anything.
    """

    refusal: str | None = None

    def __init__(self, failure: Exception | None = None) -> None:
        self.done: list[str] = []
        self.failure = failure

    def load(self, model: str) -> None:
        self.done.append(f"load {model}")
        if self.failure is not None:
            raise self.failure

    def unload(self, model: str) -> None:
        self.done.append(f"unload {model}")

    def close(self) -> None:
        self.done.append("close")
