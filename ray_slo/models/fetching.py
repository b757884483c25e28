"""Downloads a published file once per machine. Without a network it fails after a short wait."""

from __future__ import annotations

import hashlib
import http.client
import logging
import re
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

TIMEOUT_S = 10.0
"""Longest wait for a connection to the server, and for the next piece of a file, in seconds."""

_PIECE = 2**20
# File names of torchvision contain the first digits of the content's SHA-256.
_HASH = re.compile(r"-([0-9a-f]{8,})\.")

_log = logging.getLogger(__name__)


def fetch(url: str, file: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Download a file unless it is there. If several processes ask for it, one downloads it and the
    others wait. There is one attempt; the caller may try again.

    Args:
        url: http or https URL. If its last part contains a hash (`resnet18-f37072fd.pth`), the
            SHA-256 of the content must begin with it.
        file: path of the downloaded file. Its folder is made if needed.
        timeout_s: as `TIMEOUT_S`, in seconds.

    Raises:
        OSError: the server cannot be reached, is too slow, refuses, or closes the connection early;
            or the content has another hash; or the file cannot be written.
    """
    try:
        # Connect before taking the lock. So without a network, all processes fail at the same time
        # instead of one after the other.
        with _opened(url, timeout_s):
            pass
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
            raise OSError(f"the transfer broke off after {got} of {size} bytes")
        hashed = _HASH.search(url.rpartition("/")[2])
        if hashed and not digest.startswith(hashed[1]):
            raise OSError(f"its SHA-256 is {digest}, which does not begin with {hashed[1]}")
        partial.replace(file)  # atomic, so a reader sees a complete file or none
    finally:
        partial.unlink(missing_ok=True)


def _copied(answer: Any, out: IO[bytes]) -> tuple[int, str]:
    """Copy the answer to `out`. Return the number of bytes, and their SHA-256."""
    got, sha = 0, hashlib.sha256()
    while piece := answer.read(_PIECE):
        out.write(piece)
        sha.update(piece)
        got += len(piece)
    return got, sha.hexdigest()
