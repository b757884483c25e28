"""Arrival distributions PF(k, T) at the central queue (RAMSIS §3.1.1). They are exchangeable.

A distribution has unit rate: a span of T seconds at `rate` requests per second has `rate · T`
units. A count may begin right *after an arrival*, or at *any time* (the equilibrium of the
process). The two are equal only for Poisson arrivals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, PositiveFloat
from scipy.special import gammainc, gammaln, xlogy

from ray_slo.core.arrival_files import read_arrivals
from ray_slo.core.documents import Frozen
from ray_slo.core.explain import Misplaced, placed, validated
from ray_slo.core.text import text_of

Floats = NDArray[np.float64]


class Arrivals(Protocol):
    """Counts of a stationary arrival process of unit rate."""

    @property
    def shape(self) -> float:
        """1 / squared coefficient of variation of the gaps. It is 1 for Poisson arrivals. Smaller
        values are burstier."""

    def at_least(self, k: ArrayLike, units: ArrayLike, *, after_arrival: bool) -> Floats:
        """Return P(N(units) ≥ k). k and units are broadcast against each other. The result is 1
        for k ≤ 0."""

    def pmf(self, k_max: int, units: Floats, *, after_arrival: bool) -> Floats:
        """Return P(N(units[i]) = k) for k = 0 … k_max, shape (len(units), k_max + 1)."""

    def to_json(self) -> dict[str, Any]:
        """Return the parameters. Equal distributions give equal results."""


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals, as in the paper."""

    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.shape != 1.0:
            raise ValueError(f"shape of Poisson arrivals is 1, got {self.shape}; use Gamma")

    def at_least(self, k: ArrayLike, units: ArrayLike, *, after_arrival: bool) -> Floats:
        k, units = np.asarray(k, dtype=float), np.asarray(units, dtype=float)
        return np.where(k <= 0, 1.0, gammainc(np.maximum(k, 1), units))

    def pmf(self, k_max: int, units: Floats, *, after_arrival: bool) -> Floats:
        k = np.arange(k_max + 1)
        units = np.asarray(units, dtype=float)[:, None]
        return np.asarray(np.exp(xlogy(k, units) - units - gammaln(k + 1)))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "poisson"}


POISSON = Poisson()


@dataclass(frozen=True)
class Gamma:
    """Renewal process with Gamma(shape) gaps. Shape 1 is Poisson, and smaller shapes are burstier.

    After an arrival, P(N(T) ≥ k) is the distribution function of the sum of k gaps. At any time,
    the first gap is the residual one. Then P(N(T) ≥ k) = ∫₀ᵀ P(N₀(u) = k − 1) du, where N₀ counts
    from an arrival on.
    """

    shape: float

    def __post_init__(self) -> None:
        if not self.shape > 0:
            raise ValueError(f"shape must be positive, got {self.shape}")

    def at_least(self, k: ArrayLike, units: ArrayLike, *, after_arrival: bool) -> Floats:
        k, units = np.broadcast_arrays(np.asarray(k, float), np.asarray(units, float))
        if after_arrival:
            tail = gammainc(np.maximum(k, 1) * self.shape, units * self.shape)
        else:
            tail = self._integral(np.maximum(k - 1, 0), units) - self._integral(
                np.maximum(k, 1), units
            )
        return np.where(k <= 0, 1.0, np.clip(tail, 0.0, 1.0))

    def pmf(self, k_max: int, units: Floats, *, after_arrival: bool) -> Floats:
        k = np.arange(k_max + 2)
        tail = self.at_least(k, np.asarray(units)[:, None], after_arrival=after_arrival)
        return np.maximum(tail[:, :-1] - tail[:, 1:], 0.0)

    def _integral(self, k: Floats, units: Floats) -> Floats:
        """Return ∫₀ᵀ P(S_k ≤ u) du, where S_k is the sum of k gaps."""
        a, x = np.maximum(k, 1e-9) * self.shape, units * self.shape
        return np.where(k <= 0, units, units * gammainc(a, x) - k * gammainc(a + 1, x))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "gamma", "shape": self.shape}


class Empirical:
    """Counts of recorded arrival times, stretched to the wanted rate.

    Args:
        times_s: at least 100 arrival times in seconds, ascending, shape (n,).
        points: number of windows that are counted. They are spread evenly over the record.
    """

    def __init__(self, times_s: Sequence[float] | Floats, *, points: int = 2000) -> None:
        times = np.asarray(times_s, dtype=float)
        if times.ndim != 1 or len(times) < 100:
            raise ValueError(f"times_s must hold at least 100 arrivals, got shape {times.shape}")
        gaps = np.diff(times)
        if not np.all(np.isfinite(gaps)) or gaps.min() < 0 or times[-1] <= times[0]:
            raise ValueError("times_s must be finite and ascending")
        self._times: Floats = (times - times[0]) * (len(gaps) / (times[-1] - times[0]))
        self._points = points
        self.shape = 1.0 / max(float(np.var(gaps) / np.mean(gaps) ** 2), 1e-3)

    def at_least(self, k: ArrayLike, units: ArrayLike, *, after_arrival: bool) -> Floats:
        k, units = np.broadcast_arrays(np.asarray(k, float), np.asarray(units, float))
        if units.size and units.max() >= 0.5 * self._times[-1]:
            raise ValueError(
                f"the record of {len(self._times)} arrivals is too short: counts over spans of "
                f"{units.max():.0f} arrivals are needed"
            )
        result = np.ones(k.shape)
        for span in np.unique(units):
            here = (units == span) & (k > 0)
            sorted_counts = np.sort(self._counts(float(span), after_arrival))
            below = np.searchsorted(sorted_counts, k[here], side="left")
            result[here] = 1 - below / len(sorted_counts)
        return result

    def pmf(self, k_max: int, units: Floats, *, after_arrival: bool) -> Floats:
        # The kernel asks for tens of thousands of spans. So count on a grid, and interpolate.
        units = np.asarray(units, dtype=float)
        grid = np.unique(np.concatenate([[0.0], np.linspace(0, units.max(), 600), [units.max()]]))
        k = np.arange(k_max + 2)
        tail = self.at_least(k[None, :], grid[:, None], after_arrival=after_arrival)
        at = np.clip(np.searchsorted(grid, units, side="right") - 1, 0, max(len(grid) - 2, 0))
        upper = np.minimum(at + 1, len(grid) - 1)
        width = np.where(upper > at, grid[upper] - grid[at], 1.0)
        share = ((units - grid[at]) / width)[:, None]
        mixed = tail[at] * (1 - share) + tail[upper] * share
        return np.asarray(np.maximum(mixed[:, :-1] - mixed[:, 1:], 0.0))

    def _counts(self, span: float, after_arrival: bool) -> NDArray[np.int64]:
        last = self._times[-1] - span
        if after_arrival:
            usable = np.flatnonzero(self._times <= last)
            index = usable[
                np.linspace(0, len(usable) - 1, min(self._points, len(usable)), dtype=int)
            ]
            starts, before = self._times[index], index + 1
        else:
            starts = np.linspace(0, last, self._points)
            before = np.searchsorted(self._times, starts, side="right")
        return np.asarray(np.searchsorted(self._times, starts + span, side="right") - before)

    def to_json(self) -> dict[str, Any]:
        digest = hashlib.sha256(np.round(self._times, 6).tobytes()).hexdigest()[:12]
        return {"kind": "empirical", "arrivals": len(self._times), "hash": digest}


class PoissonSpec(Frozen):
    """Exponential gaps: requests arrive independently of each other."""

    kind: Literal["poisson"] = "poisson"

    def build(self, base: Path) -> Arrivals:
        return POISSON


class GammaSpec(Frozen):
    """Gamma-distributed gaps.

    Attributes:
        shape: 1 is Poisson, smaller is burstier.
    """

    kind: Literal["gamma"]
    shape: PositiveFloat

    def build(self, base: Path) -> Arrivals:
        return Gamma(self.shape)


class EmpiricalSpec(Frozen):
    """Recorded arrivals; the rate is stretched as needed.

    Attributes:
        file: the time of each request, one per line. It is relative to the document's folder.
    """

    kind: Literal["empirical"]
    file: Path

    def build(self, base: Path) -> Arrivals:
        path = base / self.file
        try:
            found = read_arrivals(path, bare="times")
            if found.times_s is None:
                raise ValueError(f"{path}: must hold the time of each request; it has {found.said}")
        except (OSError, ValueError) as error:
            raise Misplaced("file", text_of(error)) from None
        try:
            return Empirical(found.times_s)
        except ValueError as error:
            raise Misplaced("file", f"{path}: {error}") from None


ArrivalsSpec = Annotated[PoissonSpec | GammaSpec | EmpiricalSpec, Field(discriminator="kind")]


class _Given(Frozen):
    arrivals: ArrivalsSpec


def arrivals_of(given: Any) -> Arrivals:
    """Return the arrivals of a document, e.g. {"kind": "gamma", "shape": 0.3} (`ArrivalsSpec`), or
    "poisson". Files are relative to the working folder. An `Arrivals` is returned unchanged.

    Raises:
        ValueError: the document is not valid. The message names the field.
    """
    if hasattr(given, "at_least"):
        found: Arrivals = given
        return found
    given = {"kind": given} if isinstance(given, str) else given
    spec = validated(_Given, {"arrivals": given}).arrivals
    with placed("arrivals"):
        return spec.build(Path())


def label(about: Mapping[str, Any]) -> str:
    """Return a short name for the result of `Arrivals.to_json`: "poisson", "gamma 0.25"."""
    rest = [value for key, value in about.items() if key != "kind"]
    words = (f"{value:g}" if isinstance(value, float) else str(value) for value in rest)
    return " ".join((str(about["kind"]), *words))
