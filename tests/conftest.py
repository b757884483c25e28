"""How tests are shared out when they run in several processes (`make test`)."""

from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
# Each of these stays together: one Ray cluster for all live tests, one pool for the programs.
_TOGETHER = {_TESTS / "live": "live", _TESTS / "benchmarks" / "test_front_door.py": "programs"}


def pytest_collection_modifyitems(config, items):
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        for place, group in _TOGETHER.items():
            if item.path == place or place in item.path.parents:
                item.add_marker(pytest.mark.xdist_group(group))
