"""Writes files that are whole: a full disk, or an end in between, leaves what was there before.
Makes folders that no other user can write to."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HALF = ".tmp"  # ending of the names of files that are not whole
_LONGEST = 100  # characters of a name that are in the other


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Return a context manager with the path of a file to write. At its end, that file takes the
    place of `path`, unless an exception was raised: then it is removed.

    The file is in the same folder, which must be there. What is no file, such as /dev/stdout, is
    itself written.

    Raises:
        OSError: it cannot be written. The error names `path`.
    """
    named = Path(path)
    try:
        target = named.resolve() if named.is_symlink() else named
        if target.exists() and not target.is_file():
            yield target
            return
        half = target.with_name(f".{target.name[:_LONGEST]}.{os.getpid()}{HALF}")
        try:
            yield half
            if target.exists():
                shutil.copymode(target, half)
            half.replace(target)
        except BaseException:
            with suppress(OSError):
                half.unlink()
            raise
    except OSError as error:
        if error.errno is None:  # of Arrow
            raise
        raise OSError(error.errno, error.strerror or str(error), str(named)) from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text in UTF-8 to a file, completely or not at all.

    Raises:
        OSError: see `whole`.
    """
    with whole(path) as half:
        half.write_text(text, encoding="utf-8")


def own_folder(path: Path) -> Path:
    """Make a folder that only this user can read and write, if it is not there. Return it.

    Raises:
        OSError: it cannot be made, or is another user's, or is no folder.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is no folder of this user")
    return path
