"""What holds for all tests of this folder."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Collect no garbage of other tests while what is nested deeply is read.

    Where no frame is left a finalizer cannot be called, and what it would have closed stays open.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()
