"""Latency profiles ℓ(b): execution time of a batch of b requests on one hardware kind.

`LatencyProfile` is an immutable snapshot that policies act on; `OnlineProfile` learns one from
measured batches. Symphony §2.1 and §3.3 use the linear form ℓ(b) = α·b + β; measured tables are
repaired to be monotone (a larger batch never takes less time than a smaller one).
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_FORMAT = "ray-slo/latency-profile/1"
_LARGEST = 100_000  # batch of a profile; its table is kept in memory


class LatencyProfile:
    """ℓ(b) in seconds for b = 1 … max_batch_size, non-decreasing in b.

    Args:
        latencies_s: shape (max_batch_size,), seconds; entry b − 1 is ℓ(b). A table that is not
            monotone is repaired by isotonic (least-squares) regression.

    Raises:
        ValueError: empty, non-finite or non-positive entries.
    """

    __slots__ = ("_table", "max_batch_size")

    def __init__(self, latencies_s: Sequence[float] | np.ndarray[Any, Any]) -> None:
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
        # A list, not an array: scalar access is what policies do, and is 5 times faster.
        self._table: list[float] = table.tolist()
        self.max_batch_size = len(self._table)

    @classmethod
    def linear(cls, alpha_s: float, beta_s: float, max_batch_size: int = 128) -> LatencyProfile:
        """ℓ(b) = alpha_s · b + beta_s (Symphony §2.1)."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        return cls(alpha_s * np.arange(1, max_batch_size + 1) + beta_s)

    @classmethod
    def from_points(
        cls, points: Mapping[int, float], max_batch_size: int | None = None
    ) -> LatencyProfile:
        """From latencies measured at some batch sizes, seconds by batch size.

        Linear between the points; outside, along the least-squares line (constant when there is
        one point, as nothing is known of its slope).
        """
        if not points:
            raise ValueError("points must hold at least one measured batch size")
        sizes = np.array(sorted(points), dtype=float)
        if sizes[0] < 1:
            raise ValueError(f"points: batch sizes are at least 1, got {int(sizes[0])}")
        values = np.array([points[int(b)] for b in sizes])
        if np.any(np.diff(values) < 0):
            values = np.array(_isotonic(values.tolist()))
        grid = np.arange(1, (max_batch_size or int(sizes[-1])) + 1)
        table = np.interp(grid, sizes, values)
        if len(sizes) > 1:
            slope = max(float(np.polyfit(sizes, values, 1)[0]), 0.0)
            table = np.where(grid > sizes[-1], values[-1] + slope * (grid - sizes[-1]), table)
            below = np.maximum(values[0] - slope * (sizes[0] - grid), values[0] * 0.1)
            table = np.where(grid < sizes[0], below, table)
        return cls(table)

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

    def fit_linear(self) -> tuple[float, float]:
        """(α, β) in seconds: least-squares line through the table; (ℓ(1), 0) for one entry."""
        if self.max_batch_size == 1:
            return self._table[0], 0.0
        alpha, beta = np.polyfit(np.arange(1, self.max_batch_size + 1), self._table, 1)
        return float(alpha), float(beta)

    def scaled(self, factor: float) -> LatencyProfile:
        """Every latency times `factor`."""
        return LatencyProfile([t * factor for t in self._table])

    def truncated(self, max_batch_size: int) -> LatencyProfile:
        """The same, for batches of at most `max_batch_size`."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        return LatencyProfile(self._table[:max_batch_size])

    def differs(self, other: LatencyProfile, by: float) -> bool:
        """Whether a latency is off by more than the share `by` of `other`'s, or the sizes are."""
        if self.max_batch_size != other.max_batch_size:
            return True
        return any(abs(a - b) > by * b for a, b in zip(self._table, other._table, strict=True))

    @property
    def hash(self) -> str:
        """Short digest of the table at 1 µs resolution: equal tables, equal hashes."""
        rounded = np.round(np.array(self._table) * 1e6).astype(np.int64)
        return hashlib.sha256(rounded.tobytes()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        return {"latency_ms": [round(t * 1e3, 6) for t in self._table]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LatencyProfile:
        """From {"latency_ms": [...]}, or {"alpha_ms", "beta_ms", "max_batch_size"?}.

        Raises:
            ValueError: other keys, or values that are no latencies.
        """
        try:
            if "latency_ms" in data:
                return cls([t / 1e3 for t in data["latency_ms"]])
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
        return isinstance(other, LatencyProfile) and self._table == other._table

    def __hash__(self) -> int:
        return hash(tuple(self._table))

    def __repr__(self) -> str:
        return (
            f"LatencyProfile(ℓ(1)={self._table[0] * 1e3:.3g} ms, "
            f"ℓ({self.max_batch_size})={self._table[-1] * 1e3:.3g} ms)"
        )


class OnlineProfile:
    """Learns a `LatencyProfile` from measured batches.

    The profile starts as `prior`. Measured durations are kept as ratios to the prior, a window
    per octave of batch sizes (1, 2, 3–4, 5–8, …); the estimate is the prior times the ratios'
    `quantile`, interpolated over log b between octaves that were seen. So one number scales a
    prior of the right shape, and a wrong shape is corrected where batches were measured.

    Args:
        prior: what is believed before the first batch (file, warm-up sweep or a guess).
        quantile: of the measured durations, 0 … 1. With n samples it is at most n / (n + 1), and
            always one that was measured, so that a single early outlier does not rule.
        window: samples kept per octave; older ones are forgotten.
        stale_after: an octave not measured among this many latest batches gives way to the
            others. Without it, one slow large batch could keep large batches from being tried
            (and measured) ever again.
    """

    def __init__(
        self,
        prior: LatencyProfile,
        *,
        quantile: float = 0.95,
        window: int = 64,
        stale_after: int = 256,
    ) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must lie between 0 and 1, got {quantile}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.prior = prior
        self.quantile = quantile
        self._window = window
        self._stale_after = stale_after
        self._seen_at: dict[int, int] = {}
        self._ratios: dict[int, deque[tuple[int, float]]] = {}
        self._profile: LatencyProfile | None = prior
        self.samples = 0

    def observe(self, batch_size: int, duration_s: float) -> None:
        """Record that a batch of `batch_size` took `duration_s`. O(1)."""
        if not 1 <= batch_size <= self.prior.max_batch_size:
            raise ValueError(
                f"batch_size must be 1 … {self.prior.max_batch_size}, got {batch_size}"
            )
        if not (math.isfinite(duration_s) and duration_s > 0):
            raise ValueError(f"duration_s must be positive and finite, got {duration_s}")
        octave = (batch_size - 1).bit_length()
        bucket = self._ratios.setdefault(octave, deque(maxlen=self._window))
        if self._is_stale(octave):
            bucket.clear()
        bucket.append((batch_size, duration_s / self.prior.latency(batch_size)))
        self.samples += 1
        self._seen_at[octave] = self.samples
        self._profile = None

    @property
    def profile(self) -> LatencyProfile:
        """The current estimate (computed when asked for after new samples)."""
        if self._profile is None:
            self._profile = self._estimate()
        return self._profile

    def _estimate(self) -> LatencyProfile:
        log_sizes, ratios = [], []
        for octave in sorted(self._ratios):
            if self._is_stale(octave):
                continue
            samples = np.array(self._ratios[octave])
            q = min(self.quantile, len(samples) / (len(samples) + 1))
            log_sizes.append(float(np.log(samples[:, 0]).mean()))
            ratios.append(float(np.quantile(samples[:, 1], q, method="lower")))
        grid = np.log(np.arange(1, self.prior.max_batch_size + 1))
        table = np.array(self.prior.table) * np.interp(grid, log_sizes, ratios)
        # A batch takes no longer than a larger one did: repair downwards, so that one slow small
        # batch (a cold start) does not outweigh quick larger ones, as an average would let it.
        return LatencyProfile(np.minimum.accumulate(table[::-1])[::-1])

    def _is_stale(self, octave: int) -> bool:
        seen_at = self._seen_at.get(octave, self.samples)
        return self.samples - seen_at >= self._stale_after


def _isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence of least squared distance, by pooling adjacent violators.

    To the last bit what `scipy.optimize.isotonic_regression` returns, whose module takes 0.4 s to
    import in every process that holds a profile.
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
    Path(path).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


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
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{path}: format must be {_FORMAT!r}, got {found!r}")
    profiles = body.get("profiles")
    if not isinstance(profiles, dict):
        raise ValueError(f"{path}: profiles must be a mapping by name of variants")
    found = {}
    for name, data in profiles.items():
        try:
            if not isinstance(data, dict):
                raise ValueError(f"it must be a mapping, got {type(data).__name__}")
            found[name] = LatencyProfile.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: profiles.{name}: {error}") from None
    return found
