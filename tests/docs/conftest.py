"""A decision log for the pages whose commands read one."""

import pytest

from tests.docs.log import write


@pytest.fixture(scope="session")
def sample_log(tmp_path_factory):
    return write(tmp_path_factory.mktemp("log"))
