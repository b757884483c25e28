"""What outlives a process: whose hooks it ran."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from ray_slo.serve import suspects
from ray_slo.serve.suspects import ATTEMPT, Marks, ended_itself, is_suspect, new_attempt
from ray_slo.serve.user_code import HookThreads

ENDS = """
import os, sys, threading
from pathlib import Path
from ray_slo.serve.suspects import ATTEMPT, Marks
marks = Marks(Path(sys.argv[1]))
ATTEMPT.set(sys.argv[2])
with marks.inside():
    pass
ATTEMPT.set(sys.argv[3])
with marks.inside():
    os._exit(1)
"""


def test_a_process_that_ended_in_a_hook_says_whose(tmp_path):
    before, during = new_attempt(), new_attempt()
    arguments = [sys.executable, "-c", ENDS, str(tmp_path), before, during]
    assert subprocess.run(arguments, check=False).returncode == 1
    assert is_suspect(during, tmp_path)
    assert not is_suspect(before, tmp_path)
    assert not is_suspect(new_attempt(), tmp_path)


ENDS_ITSELF = """
import ctypes, os, signal, sys
from pathlib import Path
from ray_slo.serve.suspects import note_own_end
note_own_end("w", Path(sys.argv[1]))
how = sys.argv[2]
if how == "exit":
    os._exit(3)
if how == "crash":
    ctypes.string_at(0)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("exit", "os._exit(3)"), ("crash", "Segmentation fault"), ("killed", ""), ("done", "")],
)
def test_a_worker_that_ends_itself_says_so(tmp_path, how, said):
    arguments = [sys.executable, "-c", ENDS_ITSELF, str(tmp_path), how]
    subprocess.run(arguments, check=False, capture_output=True)
    found = ended_itself("w", tmp_path)
    assert said in found if said else found == ""
    assert ended_itself("another", tmp_path) == ""


@pytest.mark.parametrize("hook", ["plain", "async"])
def test_hooks_leave_marks_while_they_run(tmp_path, hook):
    marks, attempt, go, running = Marks(tmp_path), new_attempt(), threading.Event(), []

    def plain():
        running.append(is_suspect(attempt, tmp_path))
        go.wait()
        return 7

    async def awaited():
        return await asyncio.to_thread(plain)

    async def ask():
        ATTEMPT.set(attempt)
        called = asyncio.create_task(
            HookThreads(2, marks).hook(plain if hook == "plain" else awaited)()
        )
        while not running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        go.set()
        return await called

    assert asyncio.run(ask()) == 7
    assert running == [True]
    assert not is_suspect(attempt, tmp_path)


@pytest.mark.parametrize("attempt", ["", "zz", "ab", "00" * 17, "é" * 32])
def test_what_is_no_attempt_leaves_none(tmp_path, attempt):
    marks = Marks(tmp_path)
    ATTEMPT.set(attempt)
    with marks.inside():
        assert not is_suspect(attempt, tmp_path)
    ATTEMPT.set("")


def test_there_may_be_more_of_them_than_places(tmp_path, monkeypatch):
    monkeypatch.setattr(suspects, "_SLOTS", 2)
    marks, attempts = Marks(tmp_path), [new_attempt() for _ in range(3)]

    def nested(rest):
        if not rest:
            return [is_suspect(a, tmp_path) for a in attempts]
        ATTEMPT.set(rest[0])
        with marks.inside():
            return nested(rest[1:])

    assert nested(attempts) == [True, True, False]
    assert not any(is_suspect(a, tmp_path) for a in attempts)
    ATTEMPT.set("")


def test_files_of_dead_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = [tmp_path / f"{ended.pid}-{i}" for i in range(20)]
    others = [tmp_path / f"{os.getpid()}-ours", tmp_path / "odd"]
    for path in [*dead, *others]:
        path.write_bytes(b"")
    for i, path in enumerate(dead):
        os.utime(path, (i, i))
    marks = Marks(tmp_path)
    assert [path.exists() for path in dead] == [False] * 4 + [True] * 16  # the latest stay
    assert all(path.exists() for path in others)
    marks.close()
    assert len(list(tmp_path.iterdir())) == 18
