"""Model control for tests that must not come to it."""


class NoControl:
    """Of a Triton in which nothing is ever loaded."""

    refusal: str | None = None

    def load(self, model: str) -> None:
        raise AssertionError(f"{model} was loaded")

    def unload(self, model: str) -> None:
        raise AssertionError(f"{model} was unloaded")

    def close(self) -> None:
        pass
