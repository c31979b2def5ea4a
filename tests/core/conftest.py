"""A service for tests of it."""

import pytest

from core.service_bench import NUM_BLOCKS, make_service, wait_until_up
from support.echo import EchoExecutor


@pytest.fixture
def service():
    service = make_service(EchoExecutor(num_blocks=NUM_BLOCKS))
    wait_until_up(service)
    yield service
    service.close()
