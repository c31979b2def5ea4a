"""Has the kernels built before the first test is run."""

import pytest

from support.kernels import build_kernels_of


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        build_kernels_of(session.items)
