"""Run tests, and write which lines of a room each of them runs: ROOM TESTS FILE."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest


class Watch:
    """A plugin of pytest: tells coverage which test runs, and takes the CPU time of each."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.took_s: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        start_s = sum(os.times()[:4])  # CPU time, with that of ended children
        done = yield
        self.took_s[item.nodeid] = sum(os.times()[:4]) - start_s
        self.measured.switch_context("")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def main(room: str, tests: str, file: str) -> int:
    root = Path.cwd()
    measured = coverage.Coverage(
        data_file=None, include=[f"{root / room}/*"], config_file=False, messages=False
    )
    measured.start()
    watch = Watch(measured)
    arguments = ["-q", "-p", "no:cacheprovider", "--timeout", "0", "-m", "not live and not slow"]
    arguments += tests.split(",")
    status = pytest.main(arguments, plugins=[watch])
    measured.stop()
    data = measured.get_data()
    lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for name in data.measured_files():
        for line, contexts in data.contexts_by_lineno(name).items():
            tests_of = sorted(set(filter(None, contexts)) - watch.failed)
            lines[str(Path(name).relative_to(root))][line] = tests_of
    said = {"took_s": watch.took_s, "failed": sorted(watch.failed), "lines": lines}
    Path(file).write_text(json.dumps(said))
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
