"""Recorded workloads: which payload is sent when, kept in a file so that several systems can be
measured with the very same requests.

`Recorded` holds intended send times and payload indices; `Payloads` holds what is sent, and the
right answers where they are known. Neither imports Ray.
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

from ray_slo.core.documents import load_arrays
from ray_slo.core.names import import_attr

_FORMAT = "ray-slo/workload/1"


@dataclass(frozen=True)
class Payloads:
    """What is sent: a non-empty list of items (bytes, or anything JSON or a handle can carry).

    Args:
        items: request bodies. Over HTTP bytes and text go as they are, all else as JSON.
        labels: the right answer per item, compared as text; None where unknown.
        content_type: of the bytes; guessed from file names by `load_payloads`.
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
        """The HTTP body of an item, and its content type."""
        item = self.items[index]
        if isinstance(item, bytes | bytearray | memoryview):
            return bytes(item), self.content_type
        if isinstance(item, str):
            return item.encode(), self.content_type
        return json.dumps(item, default=_plain).encode(), "application/json"

    @cached_property
    def digest(self) -> str:
        """Tells one payload set from another (in workload files)."""
        sha = hashlib.sha256()
        for index in range(len(self)):
            sha.update(self.body(index)[0])
        return sha.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"payload: cannot send {type(value).__name__} as JSON; give bytes")


def load_payloads(source: str) -> Payloads:
    """Payloads from a file, a folder, a glob pattern or a Python name.

    * `photos/`: every file in it. Files in sub-folders are labelled with the sub-folder's name.
    * `photos/*.png`, `one.png`: these files, unlabelled.
    * `requests.jsonl`: one JSON body per line.
    * `module:attr`: a list of payloads, a pair (payloads, labels), a `Payloads`, or a function of
      no arguments that returns one of these.

    Raises:
        ValueError: nothing there, or not of these kinds.
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
        except ImportError as error:  # of what the payloads are made with
            raise ValueError(f"payload: {name}: {error}") from error
    if isinstance(value, Payloads):
        return value
    items, labels = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    items = list(items)
    kind = "application/octet-stream"
    if items and isinstance(items[0], bytes):
        kind = _sniff(items[0])
    return Payloads(items, None if labels is None else [str(x) for x in labels], kind)


def _sniff(data: bytes) -> str:
    for magic, kind in ((b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg")):
        if data.startswith(magic):
            return kind
    return "application/octet-stream"


@dataclass(frozen=True)
class Recorded:
    """When to send which payload.

    Args:
        times_s: intended send times from the start, seconds, ascending.
        payload: index into the payload set, per request.
        duration_s: length of the arrival window (rates are per this).
        warmup_s: requests sent before it load the system but are left out of the figures.
        payload_digest: of the payload set it was drawn for ("" = any).
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
        """Draw a payload for each time: shuffled rounds, so every payload is used equally often."""
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
        np.savez_compressed(
            path, times_s=self.times_s, payload=self.payload, header=np.array(json.dumps(header))
        )

    @classmethod
    def load(cls, path: str | Path) -> Recorded:
        """Read a file written by `save`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a workload file.
        """
        try:
            data = load_arrays(path, "a workload file", "header", "times_s", "payload")
            header = dict(json.loads(str(data["header"])))
            times, payload = data["times_s"], data["payload"]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a workload file: {error}") from None
        if header.get("format") != _FORMAT:
            raise ValueError(f"{path}: format must be {_FORMAT!r}, got {header.get('format')!r}")
        return cls(
            times,
            payload,
            header["duration_s"],
            header["warmup_s"],
            header["payload_digest"],
            header["about"],
        )

    def check(self, payloads: Payloads) -> None:
        """ValueError if this workload was recorded for another payload set."""
        if self.payload_digest not in ("", payloads.digest):
            raise ValueError(
                "workload: it was recorded for other payloads "
                f"(digest {self.payload_digest}, these have {payloads.digest})"
            )
        if len(self) and int(self.payload.max()) >= len(payloads):
            raise ValueError(
                f"workload: names payload {int(self.payload.max())}, there are {len(payloads)}"
            )
