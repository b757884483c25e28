"""Solved policies: `Table` (one load), `PolicySet` (several loads), and their file.

The file is one compressed `.npz`. It has arrays stacked over the tables, and a JSON header. The
header has the version of the format, the options, and the hash of the profiles. A file of 20 tables
has some tens of kilobytes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ray_slo.core.documents import Column, check_arrays, load_columns, naming
from ray_slo.core.files import whole

FORMAT = "ray-slo/ramsis-tables/1"
_WHAT = "a file of RAMSIS tables"
_ROUNDING = 1e-3
DROP = ""  # `lookup` returns this variant if requests are to be dropped


@dataclass(frozen=True, eq=False)
class Table:
    """The decisions for one load: which variant takes how many requests, by queue length and slack
    (RAMSIS §4).

    Attributes:
        names, accuracies: variants that decisions choose from, and their accuracies in percent.
        slacks_s: lower bounds of the slots of slack, in seconds, ascending, shape (J,). Slot 0 also
            has late requests.
        variant: index into `names` for n = 1 … N queued requests, shape (N, J). −1: drop.
        batch: number of requests to take, the most urgent first, shape (N, J).
        occupancy: share of decisions in the empty state, in each (n, slot), and in the full-queue
            state, shape (2 + N·J,).
        expected_accuracy: expected mean accuracy over requests answered in time, in percent. It is
            for the slack's lower bounds, so the actual accuracy is slightly higher (§5.1).
        violation_rate: upper bound of the share of requests not answered in time (§5.1). All
            requests of a batch count as late if its most urgent one may be.
        rate: requests per second at the whole pool.
        profile_hash: digest of the variants' names, accuracies and profiles.
        options: options of the `Problem`: all fields but variants and rate.
        improvements, span: number of improvements of the policy iteration, and the largest gain of
            a further one.
    """

    names: tuple[str, ...]
    accuracies: tuple[float, ...]
    slacks_s: NDArray[np.float64]
    variant: NDArray[np.int16]
    batch: NDArray[np.int16]
    occupancy: NDArray[np.float64]
    expected_accuracy: float
    violation_rate: float
    rate: float
    profile_hash: str
    options: Mapping[str, Any]
    improvements: int = 0
    span: float = 0.0

    @property
    def slo_s(self) -> float:
        return float(self.options["slo_s"])

    @property
    def num_workers(self) -> int:
        return int(self.options["num_workers"])

    @property
    def max_queue(self) -> int:
        """N, the longest queue that decisions distinguish."""
        return int(self.variant.shape[0])

    @property
    def variant_mix(self) -> dict[str, float]:
        """Return the expected share of requests by variant, without shares below 1e-6. The share of
        `DROP` is dropped."""
        of_state = self.occupancy[1:-1].reshape(self.variant.shape) * self.batch
        of_state[-1, 0] += self.occupancy[-1] * self.batch[-1, 0]
        weights = np.bincount(self.variant.ravel() + 1, of_state.ravel(), len(self.names) + 1)
        shares = weights / weights.sum()
        return {n: float(w) for n, w in zip((DROP, *self.names), shares, strict=True) if w > 1e-6}

    def lookup(self, n: int, slack_s: float) -> tuple[str, int]:
        """Return the decision for n ≥ 1 queued requests, of which the most urgent one has this
        slack.

        Returns:
            The variant, and the number of requests to take, the most urgent first. If the variant
            is "" (`DROP`, only with late="drop"), this number is dropped. More than N requests are
            the full-queue state: N are taken as if late (§4.2.3). Slacks outside the range count as
            the nearest slot.

        The time does not depend on n or on the load: it is a bisection over the J slots.
        """
        queues, slots = self._fast
        if n > len(queues):
            return queues[-1][0]
        return queues[n - 1][max(bisect_right(slots, slack_s + 1e-9) - 1, 0)]

    @cached_property
    def _fast(self) -> tuple[list[list[tuple[str, int]]], list[float]]:
        # Use lists, because reading one entry of an array takes ten times as long.
        names = [*self.names, DROP]
        queues = [
            [(names[v], b) for v, b in zip(variants, sizes, strict=True)]
            for variants, sizes in zip(self.variant.tolist(), self.batch.tolist(), strict=True)
        ]
        return queues, self.slacks_s.tolist()

    def save(self, path: str | Path) -> None:
        """Write the table as a set of one table."""
        PolicySet((self,)).save(path)

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read a file that `save` wrote.

        Raises:
            ValueError: as in `PolicySet.load`, or the file has several tables.
        """
        tables = PolicySet.load(path).tables
        if len(tables) != 1:
            raise ValueError(f"{path}: holds {len(tables)} tables; read it with PolicySet.load")
        return tables[0]


@dataclass(frozen=True, eq=False)
class PolicySet:
    """Tables for the same profiles and options, in order of ascending rate.

    Raises:
        ValueError: there is no table, or two have the same rate, or they are of different problems.
    """

    tables: tuple[Table, ...]
    _rates: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tables = tuple(sorted(self.tables, key=lambda t: t.rate))
        if not tables:
            raise ValueError("a policy set needs at least one table")
        for a, b in pairwise(tables):
            if a.rate == b.rate:
                raise ValueError(f"two tables for {a.rate:g} requests per second")
            if a.profile_hash != b.profile_hash or dict(a.options) != dict(b.options):
                raise ValueError("tables of one set must have the same profiles and options")
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "_rates", tuple(t.rate for t in tables))

    @property
    def rates(self) -> tuple[float, ...]:
        """Rates of the tables in requests per second, ascending."""
        return self._rates

    @property
    def profile_hash(self) -> str:
        return self.tables[0].profile_hash

    @property
    def options(self) -> Mapping[str, Any]:
        return self.tables[0].options

    def covering(self, rate: float) -> Table:
        """Return the table of the lowest rate that covers `rate` (§3.2.2). If none does, return the
        table of the highest rate."""
        at = bisect_right(self._rates, rate * (1 - 1e-9))
        return self.tables[min(at, len(self.tables) - 1)]

    def __iter__(self) -> Iterator[Table]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def save(self, path: str | Path) -> None:
        """Write the tables to `path`. The usual ending is `.npz`; it is not added."""
        first = self.tables[0]
        header = {
            "format": FORMAT,
            "profile_hash": first.profile_hash,
            "options": dict(first.options),
            "names": list(first.names),
            "accuracies": list(first.accuracies),
            "tables": [
                {
                    "rate": t.rate,
                    "expected_accuracy": t.expected_accuracy,
                    "violation_rate": t.violation_rate,
                    "improvements": t.improvements,
                    "span": t.span,
                }
                for t in self.tables
            ],
        }
        occupancy = np.stack([t.occupancy for t in self.tables])
        with whole(path) as half, half.open("wb") as file:
            np.savez_compressed(
                file,
                header=np.array(json.dumps(header)),
                slacks_s=first.slacks_s,
                variant=np.stack([t.variant for t in self.tables]),
                batch=np.stack([t.batch for t in self.tables]),
                occupancy=np.where(occupancy > 1e-9, occupancy, 0).astype(np.float32),
            )

    @classmethod
    def load(cls, path: str | Path) -> PolicySet:
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file has no tables, or is of another version.
        """
        needed = ("slacks_s", "variant", "batch", "occupancy")
        header, arrays = load_columns(path, _WHAT, FORMAT, "header", _Header, *needed)
        with naming(path, _WHAT):
            header.check(arrays)
            return cls(
                tuple(
                    Table(
                        names=tuple(header.names),
                        accuracies=tuple(header.accuracies),
                        slacks_s=arrays["slacks_s"],
                        variant=arrays["variant"][i],
                        batch=arrays["batch"][i],
                        occupancy=arrays["occupancy"][i].astype(float),
                        profile_hash=header.profile_hash,
                        options=header.options,
                        **entry.model_dump(),
                    )
                    for i, entry in enumerate(header.tables)
                )
            )


class _Entry(BaseModel):
    """What the header says of one table."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    rate: float = Field(gt=0)
    expected_accuracy: float
    violation_rate: float
    improvements: int
    span: float


class _Options(BaseModel):
    """The options that are read from a header; there are others."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    slo_s: float = Field(gt=0)
    num_workers: int = Field(ge=1)
    objective: str
    arrivals: dict[str, Any]


class _Header(BaseModel):
    """The header of a file."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    format: str
    profile_hash: str
    options: dict[str, Any]
    names: list[str] = Field(min_length=1)
    accuracies: list[float]
    tables: list[_Entry]

    @field_validator("options")
    @classmethod
    def _checked(cls, value: dict[str, Any]) -> dict[str, Any]:
        _Options.model_validate(value)
        return value

    def check(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Check that the arrays fit.

        Raises:
            ValueError: one does not. The message names it.
        """
        if len(self.accuracies) != len(self.names):
            said = f"{len(self.names)} names and {len(self.accuracies)} accuracies"
            raise ValueError(f"header has {said}")
        shape = arrays["variant"].shape
        if len(shape) != 3 or shape[0] != len(self.tables) or not all(shape):
            raise ValueError(f"variant must have 3 dimensions, one entry per table, got {shape}")
        tables, queues, slots = shape
        check_arrays(arrays, (slots,), slacks_s=Column())
        check_arrays(
            arrays,
            shape,
            variant=Column(-1, len(self.names) - 1, is_whole=True),
            batch=Column(0, queues, is_whole=True),
        )
        check_arrays(arrays, (tables, 2 + queues * slots), occupancy=Column(0, 1 + _ROUNDING))
        if (np.diff(arrays["slacks_s"]) < 0).any():
            raise ValueError("slacks_s must be in ascending order")
