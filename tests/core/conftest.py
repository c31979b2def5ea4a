"""A service, and the entries of a journal."""

import pytest

from charonia.simulate.replay import read_journal
from core.service_bench import NUM_BLOCKS, make_service, wait_until_up
from support.echo import EchoExecutor


@pytest.fixture
def service():
    service = make_service(EchoExecutor(num_blocks=NUM_BLOCKS))
    wait_until_up(service)
    yield service
    service.close()


@pytest.fixture
def entries(tmp_path):
    """The entries of the only journal that a test writes."""

    def read():
        (path,) = tmp_path.glob("*.journal")
        return list(read_journal(path))

    return read
