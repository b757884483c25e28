"""Notes that survive a process: which requests' hooks it was running."""

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ray_slo.serve import suspects
from ray_slo.serve.suspects import (
    ATTEMPT,
    Marks,
    ended_itself,
    is_suspect,
    new_attempt,
    note_own_end,
)
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


def test_there_are_1024_slots_at_a_time(tmp_path):
    """Hooks that run beyond that go on without a note; a slot is free again after its hook."""
    marks, attempt = Marks(tmp_path), new_attempt()
    (path,) = tmp_path.iterdir()
    token = ATTEMPT.set(attempt)
    try:
        for _ in range(2):
            with contextlib.ExitStack() as hooks:
                for _ in range(1025):
                    hooks.enter_context(marks.inside())
                assert path.read_bytes() == 1024 * bytes.fromhex(attempt)
            assert path.read_bytes() == bytes(1024 * 16)
        with pytest.raises(ValueError), marks.inside():
            assert is_suspect(attempt, tmp_path)
            raise ValueError
        assert not is_suspect(attempt, tmp_path)
    finally:
        ATTEMPT.reset(token)
    marks.close()
    assert list(tmp_path.iterdir()) == []


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
if how.startswith("child"):
    if not (child := os.fork()):
        if how == "child crashes":
            ctypes.string_at(0)
        os._exit(3)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "os._exit(3)"),
        ("crash", "Segmentation fault"),
        ("killed", ""),
        ("done", ""),
        ("child", ""),
        ("child crashes", ""),
    ],
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
        called = asyncio.ensure_future(
            HookThreads(2, marks).hook(plain if hook == "plain" else awaited)()
        )
        while not running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        go.set()
        return await called

    assert asyncio.run(ask()) == 7
    assert running == [True]
    assert not is_suspect(attempt, tmp_path)


def test_files_that_come_and_go_are_seen(tmp_path, monkeypatch):
    """The folder is listed only when it has changed; marks are always read anew."""
    ATTEMPT.set(attempt := new_attempt())
    first = Marks(tmp_path)
    assert not is_suspect(attempt, tmp_path)
    monkeypatch.setattr(suspects, "_TICK_S", 0.0)
    for _ in range(2):  # the second time, no other file can have come with the first change
        assert not is_suspect(attempt, tmp_path)
    listed = []
    monkeypatch.setattr(suspects.Path, "iterdir", lambda self: iter(listed.append(self) or ()))
    with first.inside():
        assert is_suspect(attempt, tmp_path)
    assert not is_suspect(attempt, tmp_path)
    assert not listed
    monkeypatch.undo()
    second = Marks(tmp_path)
    with second.inside():
        assert is_suspect(attempt, tmp_path)
        first.close()
        assert is_suspect(attempt, tmp_path)
        second.close()
        assert not is_suspect(attempt, tmp_path)
    ATTEMPT.set("")


def test_without_descriptors_a_file_is_read_later(tmp_path, monkeypatch):
    ATTEMPT.set(attempt := new_attempt())
    monkeypatch.setattr(suspects, "_TICK_S", 0.0)

    def none_left(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    with Marks(tmp_path).inside():
        with monkeypatch.context() as without:
            without.setattr(suspects.os, "open", none_left)
            assert not any(is_suspect(attempt, tmp_path) for _ in range(3))
        assert is_suspect(attempt, tmp_path)
    ATTEMPT.set("")


def test_a_worker_takes_the_room_for_its_note_when_it_starts(tmp_path):
    """Files may grow no more, as on a full disk."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    arguments = [sys.executable, "-c", limited + ENDS_ITSELF, str(tmp_path), "crash"]
    subprocess.run(arguments, check=False, capture_output=True)
    assert "Segmentation fault" in ended_itself("w", tmp_path)


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


def goes_on_without(caplog, folder=None):
    """Whether a process without files of its own does all that another does."""
    caplog.clear()
    marks, attempt, end = Marks(folder), new_attempt(), os._exit
    ATTEMPT.set(attempt)
    with marks.inside():
        assert not is_suspect(attempt, folder)
    ATTEMPT.set("")
    marks.close()
    assert len(caplog.records) == 1
    note_own_end("w", folder)
    assert os._exit is end
    assert len(caplog.records) == 2
    return ended_itself("w", folder) == ""


def test_without_a_folder_a_process_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    assert goes_on_without(caplog, tmp_path / "file")
    assert goes_on_without(caplog, tmp_path / "absent")


@pytest.mark.parametrize("whose", ["another's", "linked", "broken"])
def test_only_a_folder_of_this_user_will_do(tmp_path, monkeypatch, caplog, whose):
    monkeypatch.setattr(suspects.tempfile, "gettempdir", lambda: str(tmp_path))
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path != Path("/dev/shm") and is_dir(path))
    me = os.getuid()
    folder = tmp_path / f"ray-slo-{me}"
    assert suspects._folder() == folder
    if whose == "another's":
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        folder.rename(tmp_path / f"ray-slo-{me + 1}")
    else:
        folder.rmdir()
        folder.symlink_to(tmp_path if whose == "linked" else tmp_path / "absent")
    assert goes_on_without(caplog)


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch, caplog):
    """`/dev/full` has no room for what is written, as a full tmpfs; a hole would fit in."""
    opened = Path.open

    def full(path, mode="r", *rest):
        opened(path, mode, *rest).close()
        return opened(Path("/dev/full"), "wb")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        marks = Marks(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text
    ATTEMPT.set(new_attempt())
    with marks.inside():
        pass
    ATTEMPT.set("")
