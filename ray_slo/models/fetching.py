"""Fetches a published file once per machine, and gives up soon where there is no network."""

from __future__ import annotations

import hashlib
import http.client
import logging
import re
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

TIMEOUT_S = 10.0
"""Longest wait for an address of the server, and for the next piece of a file."""

_PIECE = 2**20
_HASH = re.compile(r"-([0-9a-f]{8,})\.")  # of the content, as torchvision's file names carry it

_log = logging.getLogger(__name__)


def fetch(url: str, file: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Have the file there, whole. One process fetches it; the others wait for that one.

    There is no second try: what is down for a moment is for the caller's own retries.

    Args:
        url: http or https. If its last part carries a hash (`resnet18-f37072fd.pth`), the content
            must have it (SHA-256).
        file: where to; its folder is made.
        timeout_s: see `TIMEOUT_S`.

    Raises:
        OSError: the server cannot be reached, stalls, refuses, breaks off or sends something else,
            or the file cannot be written.
    """
    try:
        with _opened(url, timeout_s):
            pass  # before the lock: without a network, all processes learn it at the same time
        from filelock import FileLock  # comes with torch

        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                _log.info("downloading %s to %s", url, file)
                _download(url, file, timeout_s)
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _opened(url: str, timeout_s: float) -> Any:
    return urlopen(Request(url, headers={"User-Agent": "ray-slo"}), timeout=timeout_s)


def _download(url: str, file: Path, timeout_s: float) -> None:
    partial = file.with_name(f"{file.name}.partial")
    try:
        with _opened(url, timeout_s) as answer, partial.open("wb") as out:
            got, digest = _copied(answer, out)
            size = answer.headers["Content-Length"]
        if size is not None and got != int(size):
            raise OSError(f"it broke off after {got} of {size} bytes")
        hashed = _HASH.search(url.rpartition("/")[2])
        if hashed and not digest.startswith(hashed[1]):
            raise OSError(f"its SHA-256 is {digest}, which does not begin with {hashed[1]}")
        partial.replace(file)  # so that a reader sees a whole file or none
    finally:
        partial.unlink(missing_ok=True)


def _copied(answer: Any, out: IO[bytes]) -> tuple[int, str]:
    """Bytes, and their SHA-256."""
    got, sha = 0, hashlib.sha256()
    while piece := answer.read(_PIECE):
        out.write(piece)
        sha.update(piece)
        got += len(piece)
    return got, sha.hexdigest()
