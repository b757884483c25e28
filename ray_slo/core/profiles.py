"""Latency profiles ℓ(b): execution time of a batch of b requests on one hardware kind.

`LatencyProfile` is an immutable snapshot that policies act on; `core.online` learns one from
measured batches. Symphony §2.1 and §3.3 use the linear form ℓ(b) = α·b + β; measured tables are
repaired to be monotone (a larger batch never takes less time than a smaller one).

The time of a batch size that was not measured is *assumed*, rather too slow than too fast. With one
measured size b, ℓ(n) = n/b · ℓ(b), as if batching had no advantage. With two or more, ℓ continues
with the slope from b/2 to b, and at least with ℓ(b) / (b + 4). That is the slope of a network with
a fixed cost of four items, so two noisy samples do not make a flat profile. The slope between two
neighboring sizes is not used: it is mostly noise. If it is steep, larger batches seem to gain
nothing. Then they are never tried, and the error remains.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ray_slo.core.files import write_text
from ray_slo.core.text import quoted, type_in_words

T = TypeVar("T")

_FORMAT = "ray-slo/latency-profile/1"
_LARGEST = 100_000  # batch of a profile; its table is kept in memory
_FIXED_COST = 4  # of a typical network, in items


class LatencyProfile:
    """ℓ(b) in seconds for b = 1 … max_batch_size, non-decreasing in b.

    Args:
        latencies_s: shape (max_batch_size,), seconds; entry b − 1 is ℓ(b). A table that is not
            monotone is repaired by isotonic (least-squares) regression.
        measured_to: largest batch size that was measured; larger ones are assumed. Default: all
            of the table counts as measured. 0: the whole table is a guess.

    Raises:
        ValueError: empty, non-finite or non-positive entries; `measured_to` out of range.
    """

    __slots__ = ("_table", "max_batch_size", "measured_to")

    def __init__(
        self,
        latencies_s: Sequence[float] | np.ndarray[Any, Any],
        measured_to: int | None = None,
    ) -> None:
        table = np.asarray(latencies_s, dtype=float)
        if table.ndim != 1 or table.size == 0:
            raise ValueError(f"latencies_s must be a non-empty list, got shape {table.shape}")
        if not np.all(np.isfinite(table)) or table.min() <= 0:
            wrong = int(np.argmin(np.isfinite(table) & (table > 0)))
            raise ValueError(
                f"latencies_s must be positive and finite, got {table[wrong]} for batch {wrong + 1}"
            )
        if np.any(np.diff(table) < 0):
            table = np.array(_isotonic(table.tolist()))
        # A list, not an array: policies read single values, which is 5 times faster.
        self._table: list[float] = table.tolist()
        self.max_batch_size = len(self._table)
        if measured_to is None:
            measured_to = self.max_batch_size
        if not 0 <= measured_to <= self.max_batch_size:
            raise ValueError(f"measured_to must be 0 … {self.max_batch_size}, got {measured_to}")
        self.measured_to = measured_to

    @classmethod
    def linear(
        cls,
        alpha_s: float,
        beta_s: float,
        max_batch_size: int = 128,
        measured_to: int | None = None,
    ) -> LatencyProfile:
        """ℓ(b) = alpha_s · b + beta_s (Symphony §2.1)."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        return cls(alpha_s * np.arange(1, max_batch_size + 1) + beta_s, measured_to)

    @classmethod
    def from_points(
        cls, points: Mapping[int, float], max_batch_size: int | None = None
    ) -> LatencyProfile:
        """From latencies measured at some batch sizes, seconds by batch size.

        Linear between the points. Larger sizes are assumed, see the head of this module. Smaller
        ones lie on the least-squares line. With only one point, they have its latency.
        """
        if not points:
            raise ValueError("points must hold at least one measured batch size")
        sizes = np.array(sorted(points), dtype=float)
        if sizes[0] < 1:
            raise ValueError(f"points: batch sizes are at least 1, got {int(sizes[0])}")
        values = np.array([points[int(b)] for b in sizes])
        if np.any(np.diff(values) < 0):
            values = np.array(_isotonic(values.tolist()))
        largest = max_batch_size or int(sizes[-1])
        grid = np.arange(1, largest + 1)
        table = np.interp(grid, sizes, values)
        beyond = values[-1] + slope_beyond(sizes, values) * (grid - sizes[-1])
        table = np.where(grid > sizes[-1], beyond, table)
        if len(sizes) > 1:
            slope = max(float(np.polyfit(sizes, values, 1)[0]), 0.0)
            below = np.maximum(values[0] - slope * (sizes[0] - grid), values[0] * 0.1)
            table = np.where(grid < sizes[0], below, table)
        return cls(table, min(int(sizes[-1]), largest))

    def latency(self, batch_size: int) -> float:
        """ℓ(batch_size) in seconds; 0 for 0, `inf` above `max_batch_size`."""
        if batch_size > self.max_batch_size:
            return math.inf
        return self._table[batch_size - 1] if batch_size > 0 else 0.0

    __call__ = latency

    def max_batch_within(self, time_s: float) -> int:
        """The largest b with ℓ(b) ≤ time_s; 0 if even ℓ(1) is longer. O(log max_batch_size)."""
        return bisect_right(self._table, time_s)

    def throughput(self, batch_size: int) -> float:
        """Requests per second of one worker that runs batches of this size back to back."""
        return batch_size / self.latency(batch_size)

    @property
    def table(self) -> list[float]:
        """ℓ(1) … ℓ(max_batch_size), seconds (a copy)."""
        return list(self._table)

    @property
    def measured(self) -> LatencyProfile:
        """The same without assumed sizes, for a plan. If nothing was measured, only size 1 is
        left."""
        return self.truncated(max(self.measured_to, 1))

    def fit_linear(self) -> tuple[float, float]:
        """(α, β) in seconds: least-squares line through the table; (ℓ(1), 0) for one entry."""
        if self.max_batch_size == 1:
            return self._table[0], 0.0
        alpha, beta = np.polyfit(np.arange(1, self.max_batch_size + 1), self._table, 1)
        return float(alpha), float(beta)

    def scaled(self, factor: float) -> LatencyProfile:
        """Every latency times `factor`."""
        return LatencyProfile([t * factor for t in self._table], self.measured_to)

    def truncated(self, max_batch_size: int) -> LatencyProfile:
        """The same, for batches of at most `max_batch_size`."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        table = self._table[:max_batch_size]
        return LatencyProfile(table, min(self.measured_to, len(table)))

    def differs(self, other: LatencyProfile, by: float) -> bool:
        """Whether a latency differs by more than the share `by` of `other`'s, or the sizes (all, or
        measured) differ."""
        sizes = (self.max_batch_size, self.measured_to)
        if sizes != (other.max_batch_size, other.measured_to):
            return True
        return any(abs(a - b) > by * b for a, b in zip(self._table, other._table, strict=True))

    @property
    def hash(self) -> str:
        """Short digest of the table at 1 µs resolution: equal tables, equal hashes."""
        rounded = np.round(np.array(self._table) * 1e6).astype(np.int64)
        return hashlib.sha256(rounded.tobytes()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"latency_ms": [round(t * 1e3, 6) for t in self._table]}
        if self.measured_to < self.max_batch_size:
            found["measured_to"] = self.measured_to
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LatencyProfile:
        """From {"latency_ms", "measured_to"?}, or {"alpha_ms", "beta_ms", "max_batch_size"?}.

        Raises:
            ValueError: other keys, or values that are no latencies.
        """
        try:
            if "latency_ms" in data:
                measured_to = data.get("measured_to")
                if measured_to is not None and type(measured_to) is not int:
                    raise ValueError(
                        f"measured_to must be a whole number, got {quoted(measured_to)}"
                    )
                return cls([t / 1e3 for t in data["latency_ms"]], measured_to)
            if "alpha_ms" in data and "beta_ms" in data:
                largest = data.get("max_batch_size", 128)
                if not isinstance(largest, int) or largest > _LARGEST:
                    raise ValueError(
                        f"max_batch_size must be a whole number, at most {_LARGEST}, got {largest}"
                    )
                return cls.linear(data["alpha_ms"] / 1e3, data["beta_ms"] / 1e3, largest)
        except (TypeError, ArithmeticError) as error:
            raise ValueError(f"a latency profile is made of numbers (ms): {error}") from None
        raise ValueError(
            "a latency profile needs latency_ms (a list), or alpha_ms and beta_ms; "
            f"got the keys {sorted(data)}"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LatencyProfile)
            and self._table == other._table
            and self.measured_to == other.measured_to
        )

    def __hash__(self) -> int:
        return hash(tuple(self._table))

    def __repr__(self) -> str:
        return (
            f"LatencyProfile(ℓ(1)={self._table[0] * 1e3:.3g} ms, "
            f"ℓ({self.max_batch_size})={self._table[-1] * 1e3:.3g} ms)"
        )


def median_profile(profiles: Sequence[LatencyProfile]) -> LatencyProfile:
    """The profile of a variant on several workers: by batch size, the median of those that measured
    it, or of all if none did. It ends at the largest size that all have."""
    largest = min(p.max_batch_size for p in profiles)
    alike = [p.truncated(largest) for p in profiles]
    sizes = np.arange(1, largest + 1)
    measured = np.array([sizes <= p.measured_to for p in alike])
    counts = measured | ~measured.any(axis=0)
    median = np.nanmedian(np.where(counts, [p.table for p in alike], np.nan), axis=0)
    # If fewer workers have measured the next size, its median may be lower.
    return LatencyProfile(np.maximum.accumulate(median), max(p.measured_to for p in alike))


def doubling_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, … and `largest` itself; none for 0."""
    sizes = [1 << k for k in range(largest.bit_length())]
    return sizes if not sizes or sizes[-1] == largest else [*sizes, largest]


def slope_beyond(sizes: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> float:
    """Seconds per item that a batch larger than all measured ones is assumed to take.

    Args:
        sizes, values: measured batch sizes, ascending, and their times, seconds.
    """
    largest, last = float(sizes[-1]), float(values[-1])
    if len(sizes) == 1:
        return last / largest
    half = max(largest / 2, float(sizes[0]))
    slope = (last - float(np.interp(half, sizes, values))) / (largest - half)
    return max(slope, slope_hoped(largest, last))


def slope_hoped(size: float, latency_s: float) -> float:
    """Seconds per item beyond this size, in a network with a fixed cost of four items."""
    return latency_s / (size + _FIXED_COST)


def _isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence of least squared distance, by pooling adjacent violators.

    The result equals that of `scipy.optimize.isotonic_regression` to the last bit. Importing that
    module would cost 0.4 s in every process that has a profile.
    """
    blocks: list[tuple[float, int]] = []  # mean and length
    rest = iter(values)
    upcoming = next(rest, None)
    while upcoming is not None:
        total, count, mean = upcoming, 1, upcoming
        upcoming = next(rest, None)
        if blocks and blocks[-1][0] >= mean:
            before, length = blocks.pop()
            total, count = length * before + total, length + count
            mean = total / count
            while upcoming is not None and mean >= upcoming:
                total, count = total + upcoming, count + 1
                mean = total / count
                upcoming = next(rest, None)
            while blocks and blocks[-1][0] >= mean:
                before, length = blocks.pop()
                total, count = total + length * before, count + length
                mean = total / count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def save_profiles(
    path: str | Path, profiles: Mapping[str, LatencyProfile], **metadata: Any
) -> None:
    """Write profiles by variant name, with free-form metadata (hardware, quantile, date)."""
    body = {
        "format": _FORMAT,
        **metadata,
        "profiles": {name: p.to_json() for name, p in profiles.items()},
    }
    write_text(path, json.dumps(body, indent=1) + "\n")


def load_profiles(path: str | Path) -> dict[str, LatencyProfile]:
    """Read a file written by `save_profiles`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a profile file, or of another format version.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a latency-profile file: {error}") from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        got = quoted(body.get("format")) if isinstance(body, dict) else type_in_words(body)
        raise ValueError(f"{path}: format must be {_FORMAT!r}, got {got}")
    profiles = body.get("profiles")
    if not isinstance(profiles, dict):
        raise ValueError(f"{path}: profiles must be a mapping by name of variants")
    found = {}
    for name, data in profiles.items():
        try:
            if not isinstance(data, dict):
                raise ValueError(f"it must be a mapping, got {type_in_words(data)}")
            found[name] = LatencyProfile.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: profiles.{name}: {error}") from None
    return found


def profile_of(known: Mapping[str, T], variant: str, model: str, *, alone: bool = True) -> T | None:
    """A variant's entry in a profile file: its name or "model/name", else the only entry.

    Args:
        known: the file's entries by name.
        alone: the file is for one network, so its only entry counts under any name.
    """
    for name in (variant, f"{model}/{variant}"):
        if name in known:
            return known[name]
    return next(iter(known.values())) if alone and len(known) == 1 else None
