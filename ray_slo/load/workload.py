"""Recorded workloads: the send time and the payload of each request. They are kept in a file, so
that several systems can be measured with the same requests.

`Recorded` contains the intended send times and the payload indices. `Payloads` contains the
payloads, and the right answers if they are known. This module does not import Ray.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mimetypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ray_slo.core.documents import MAX_TIME_S, Column, check_arrays, load_columns, naming
from ray_slo.core.files import whole
from ray_slo.core.names import import_attr
from ray_slo.core.text import type_in_words

_FORMAT = "ray-slo/workload/1"
_WHAT = "a workload file"


@dataclass(frozen=True)
class Payloads:
    """The payloads that requests are drawn from. There is at least one.

    Args:
        items: bodies of requests. Over HTTP, bytes and text are sent as they are, and other objects
            as JSON. Through a handle, every object is sent as it is.
        labels: the right answer to each item, as text. None if they are unknown.
        content_type: content type of items that are bytes. `load_payloads` guesses it from the
            names of the files.
    """

    items: Sequence[Any]
    labels: Sequence[str] | None = None
    content_type: str = "application/octet-stream"

    def __post_init__(self) -> None:
        if len(self.items) == 0:
            raise ValueError("payloads: there must be at least one item")
        if self.labels is not None and len(self.labels) != len(self.items):
            raise ValueError(
                f"payloads: {len(self.items)} items, but {len(self.labels)} labels: "
                "give one label per item"
            )

    def __len__(self) -> int:
        return len(self.items)

    def body(self, index: int) -> tuple[bytes, str]:
        """Return the HTTP body of an item, and its content type."""
        item = self.items[index]
        if isinstance(item, bytes | bytearray | memoryview):
            return bytes(item), self.content_type
        if isinstance(item, str):
            return item.encode(), self.content_type
        return json.dumps(item, default=_plain).encode(), "application/json"

    @cached_property
    def digest(self) -> str:
        """Digest of the payloads. A workload file has it, to recognise its payloads."""
        sha = hashlib.sha256()
        for index in range(len(self)):
            sha.update(self.body(index)[0])
        return sha.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"payload: cannot send {type(value).__name__} as JSON; give bytes")


def load_payloads(source: str) -> Payloads:
    """Load payloads from a file, a folder, a glob pattern or a Python name.

    * `photos/`: every file in the folder. The label of a file in a sub-folder is the sub-folder's
      name.
    * `photos/*.png`, `one.png`: these files, without labels.
    * `requests.jsonl`: one JSON body per line.
    * `module:attr`: a list of payloads, a pair (payloads, labels), a `Payloads`, or a function
      without arguments that returns one of these.

    Raises:
        ValueError: there are no such payloads, or the source is of another kind.
    """
    path = Path(source)
    if ":" in source and not path.exists():
        return _from_python(source)
    if path.suffix == ".jsonl" and path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        try:
            return Payloads([json.loads(line) for line in lines])
        except json.JSONDecodeError as error:
            raise ValueError(f"payload: {source} has a line that is not JSON: {error}") from None
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        nested = [p.parent != path for p in files]
        labels = [p.parent.name for p in files] if files and all(nested) else None
    else:
        files = sorted(Path(p) for p in glob.glob(source) if Path(p).is_file())  # noqa: PTH207
        labels = None
    if not files:
        raise ValueError(
            f"payload: nothing at {source!r}; give a file, a folder, a glob pattern, "
            "a .jsonl file, or module:attr"
        )
    kind = mimetypes.guess_type(files[0].name)[0] or "application/octet-stream"
    return Payloads([p.read_bytes() for p in files], labels, kind)


def _from_python(name: str) -> Payloads:
    value = import_attr(name)
    if callable(value):
        try:
            value = cast(Callable[[], Any], value)()
        except ImportError as error:  # the function that makes the payloads lacks a package
            raise ValueError(f"payload: {name}: {error}") from error
    if isinstance(value, Payloads):
        return value
    items, labels = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    try:
        items = list(items)
    except TypeError:
        raise ValueError(
            f"payload: {name} gives {type_in_words(items)}; wanted a list of payloads, a pair "
            "(payloads, labels), ray_slo.load.workload.Payloads, or a function that returns one of "
            "these"
        ) from None
    kind = "application/octet-stream"
    if items and isinstance(items[0], bytes):
        kind = _sniff(items[0])
    return Payloads(items, None if labels is None else [str(x) for x in labels], kind)


def _sniff(data: bytes) -> str:
    for magic, kind in ((b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg")):
        if data.startswith(magic):
            return kind
    return "application/octet-stream"


class _Header(BaseModel):
    """The header of a workload file."""

    model_config = ConfigDict(allow_inf_nan=False, strict=True)

    format: str
    duration_s: float = Field(gt=0, le=MAX_TIME_S)
    warmup_s: float = Field(ge=0, le=MAX_TIME_S)
    payload_digest: str
    about: dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The send time and the payload of each request.

    Args:
        times_s: intended send times from the start, in seconds, ascending, shape (n,).
        payload: index of each request's payload, shape (n,).
        duration_s: time during which requests are sent, in seconds. Rates are relative to it.
        warmup_s: requests that are sent before this time, in seconds, are not in the figures.
        payload_digest: digest of the payloads that the indices are for. "" means any payloads.
    """

    times_s: NDArray[np.float64]
    payload: NDArray[np.int64]
    duration_s: float
    warmup_s: float = 0.0
    payload_digest: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.times_s.shape != self.payload.shape or self.times_s.ndim != 1:
            raise ValueError(
                f"workload: times {self.times_s.shape} and payloads {self.payload.shape} "
                "must be lists of equal length"
            )
        if len(self.times_s) and (self.times_s[0] < 0 or np.any(np.diff(self.times_s) < 0)):
            raise ValueError("workload: times_s must be ascending and not negative")
        if not 0 <= self.warmup_s < self.duration_s:
            raise ValueError(
                f"workload: warmup_s must lie in [0, duration_s = {self.duration_s:g}), "
                f"got {self.warmup_s:g}"
            )

    def __len__(self) -> int:
        return len(self.times_s)

    @classmethod
    def record(
        cls,
        times_s: Iterable[float] | NDArray[np.float64],
        payloads: Payloads,
        *,
        duration_s: float,
        warmup_s: float = 0.0,
        seed: int = 0,
        **about: Any,
    ) -> Recorded:
        """Draw a payload for each time. Every payload is used once in random order, then every
        payload again, and so on."""
        times = np.asarray(list(times_s), dtype=float)
        rng = np.random.default_rng(seed)
        rounds = -(-len(times) // len(payloads))
        order = [rng.permutation(len(payloads)) for _ in range(rounds)]
        index = np.concatenate(order)[: len(times)] if order else np.empty(0, dtype=np.int64)
        return cls(times, index, duration_s, warmup_s, payloads.digest, dict(about, seed=seed))

    def save(self, path: str | Path) -> None:
        """Write a `.npz` file that `load` reads."""
        header = {
            "format": _FORMAT,
            "duration_s": self.duration_s,
            "warmup_s": self.warmup_s,
            "payload_digest": self.payload_digest,
            "about": self.about,
        }
        text = np.array(json.dumps(header))
        with whole(path) as half, half.open("wb") as file:
            np.savez_compressed(file, times_s=self.times_s, payload=self.payload, header=text)

    @classmethod
    def load(cls, path: str | Path) -> Recorded:
        """Read a file written by `save`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a workload file.
        """
        needed = ("times_s", "payload")
        header, data = load_columns(path, _WHAT, _FORMAT, "header", _Header, *needed)
        times, payload = data["times_s"], data["payload"]
        with naming(path, _WHAT):
            check_arrays(data, times.shape[:1], times_s=Column(0))
            check_arrays(data, times.shape, payload=Column(0, 2**31 - 1, is_whole=True))
            return cls(
                times,
                payload,
                header.duration_s,
                header.warmup_s,
                header.payload_digest,
                header.about,
            )

    def check(self, payloads: Payloads) -> None:
        """Check that these are the payloads that the workload was recorded for.

        Raises:
            ValueError: they are other payloads.
        """
        if self.payload_digest not in ("", payloads.digest):
            raise ValueError(
                "workload: it was recorded for other payloads "
                f"(digest {self.payload_digest}, these have {payloads.digest})"
            )
        if len(self) and int(self.payload.max()) >= len(payloads):
            raise ValueError(
                f"workload: it has payload index {int(self.payload.max())}, but there are "
                f"{len(payloads)} payloads"
            )
