"""The check whether other work disturbed the machine during a measurement."""

import os
import subprocess
import sys

import pytest

from ray_slo.demo.machine import MARK, Reading, Use, Watch, used


def reading(at_s, busy_s, ours, stolen_s=0.0):
    return Reading(at_s, busy_s, stolen_s, ours)


def test_what_others_took_is_what_is_left():
    first = reading(0.0, 100.0, {(1, 5): 10.0})
    last = reading(10.0, 115.0, {(1, 5): 14.0}, stolen_s=1.0)
    assert used([first, last], cores=2) == pytest.approx(((15 - 4) / 20, 1 / 20))


def test_processes_of_ours_come_and_go():
    readings = [
        reading(0.0, 0.0, {(1, 5): 50.0}),
        reading(1.0, 2.0, {(1, 5): 50.5, (2, 6): 1.5}),  # new: all its time is ours
        reading(2.0, 4.0, {(2, 6): 2.5, (1, 9): 1.0}),  # 1 ended; another one has its number
    ]
    others, stolen = used(readings, cores=2)
    assert others == pytest.approx((4.0 - (0.5 + 1.5 + 1.0 + 1.0)) / 4)
    assert stolen == 0


def test_less_than_nothing_is_nothing():
    """Ticks are counted in two places, which may differ a little."""
    readings = [reading(0.0, 0.0, {(1, 5): 0.0}), reading(1.0, 0.9, {(1, 5): 1.0})]
    assert used(readings, cores=1) == (0.0, 0.0)


@pytest.mark.parametrize("readings", [[], [reading(0.0, 1.0, {})]])
def test_without_two_readings_nothing_is_known(readings):
    assert used(readings, cores=2) == (None, None)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (Use(0.02, 0.01, 0.003), []),
        (Use(None, None, 0.003), []),
        (Use(0.31, 0.0, 0.0), ["other programs took 31 %"]),
        (Use(0.0, 0.2, 0.0), ["host took 20 %"]),
        (Use(None, None, 0.04), ["40 ms late"]),
        (Use(0.5, 0.5, 0.5), ["other programs", "host", "late"]),
    ],
)
def test_what_disturbed_it_is_said(use, words):
    complaints = use.complaints()
    assert len(complaints) == len(words)
    assert all(word in text for word, text in zip(words, complaints, strict=True))


BASE = 10_000_000  # no process has such an id


def write(proc, pid, parent, ticks, environ=b"", start=7):
    folder = proc / str(pid)
    folder.mkdir()
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, str(start)]
    (folder / "stat").write_text(f"{pid} (a name) with) spaces) {' '.join(fields)}\n")
    (folder / "environ").write_bytes(environ)


def test_ours_are_those_with_the_mark_and_their_children(tmp_path):
    mark = f"{MARK}={os.getpid()}".encode()
    (tmp_path / "stat").write_text("cpu  100 20 30 999 9 9 9 40 0 0\ncpu0 1 1\n")
    write(tmp_path, BASE + 10, 1, 100, b"PATH=/bin\0" + mark + b"\0")
    write(
        tmp_path, BASE + 11, BASE + 10, 200, b"ray::IDLE"
    )  # its title stands where its environment was
    write(tmp_path, BASE + 12, BASE + 11, 300)
    write(tmp_path, BASE + 13, 1, 400, b"PATH=/bin")
    write(tmp_path, BASE + 14, BASE + 13, 500, mark + b"0")  # of another run
    write(tmp_path, os.getpid(), 1, 600)
    (tmp_path / f"{BASE + 15}").mkdir()  # it ended while it was read
    (tmp_path / "self").mkdir()
    watch = Watch(proc=tmp_path)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = watch.read()
    assert {pid: s / tick_s for (pid, _), s in found.ours_s.items()} == pytest.approx(
        {BASE + 10: 100, BASE + 11: 200, BASE + 12: 300, os.getpid(): 600}
    )
    assert found.busy_s == pytest.approx(150 * tick_s)
    assert found.stolen_s == pytest.approx(40 * tick_s)


def test_where_there_is_no_proc_nothing_is_known(tmp_path):
    watch = Watch(period_s=0.001, proc=tmp_path / "none")
    assert watch.read() is None
    with watch:
        assert os.environ[MARK] == str(os.getpid())
    assert MARK not in os.environ
    assert watch.use(0.0, 1e12, late_s=0.5) == Use(None, None, 0.5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_that_we_start_is_ours():
    code = "import sys; print('on', flush=True); sys.stdin.read()"
    with Watch(period_s=60) as watch:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert child.stdout.readline() == b"on\n"
            found = watch.read()
        finally:
            child.communicate()
    pids = {pid for pid, _ in found.ours_s}
    assert {os.getpid(), child.pid} <= pids
    assert 1 not in pids
