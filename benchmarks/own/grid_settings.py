"""The settings of policies that take part in `policy-grid`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.own.grid_cells import Cell

TIMEOUT = 0.25
"""The wait of `timeout`, as a share of the shortest SLO."""

Arguments = Callable[[Cell], Mapping[str, Any]]
Fits = Callable[[Cell], bool]


@dataclass(frozen=True)
class Setting:
    """A policy with arguments, and the cells in which it takes part.

    Attributes:
        policy: name of the policy.
        arguments: makes its arguments for a cell.
        fits: tells which cells it can serve.
        preempts: it stops batches, so it takes part only where preemption is allowed.
        quickest: it has only the quickest variant of each model.
        planned: Loki's planner assigns variants to workers.
        exact: it is the policy as its paper prints it.
    """

    policy: str
    arguments: Arguments = lambda cell: {}
    fits: Fits = lambda cell: True
    preempts: bool = False
    quickest: bool = False
    planned: bool = False
    exact: bool = False

    def takes_part(self, cell: Cell) -> bool:
        return (cell.preemption or not self.preempts) and self.fits(cell)


def _always(**arguments: Any) -> Arguments:
    return lambda cell: arguments


def _plain(cell: Cell) -> bool:
    return cell.tree is None


def _matches(cell: Cell) -> bool:
    """Matching is meant for sizes and unlike workers, and costs O(requests · workers)."""
    workers = sum(kind.count for kind in cell.kinds)
    return _plain(cell) and workers <= 24 and (cell.sized or len(cell.kinds) > 1)


def _priced(cell: Cell) -> bool:
    """Pricing is meant for variants. Without them it takes part only with few models: CPU time."""
    return cell.variants > 1 or len(cell.models) <= 4


def _loki(cell: Cell) -> bool:
    """Loki's planner needs one kind of workers, and at least one worker for each task."""
    return (
        cell.tree is not None and len(cell.kinds) == 1 and cell.kinds[0].count >= len(cell.models)
    )


SETTINGS: dict[str, Setting] = {
    "deferred": Setting("deferred"),
    "deferred, consolidate": Setting("deferred", _always(objective="consolidate")),
    "deferred, prefix": Setting("deferred", _always(gathering="prefix"), _plain),
    "Symphony, as printed": Setting("deferred", fits=_plain, exact=True),
    "SHEPHERD, as printed": Setting(
        "flex",
        fits=lambda cell: _plain(cell) and not cell.sized,
        preempts=True,
        exact=True,
    ),
    "Kairos, as printed": Setting(
        "kairos", fits=lambda cell: _matches(cell) and cell.sized, exact=True
    ),
    "deferred, quickest variant": Setting(
        "deferred", fits=lambda cell: cell.variants > 1, quickest=True
    ),
    "eager": Setting("eager"),
    "timeout": Setting(
        "timeout", lambda cell: {"timeout_ms": 1e3 * TIMEOUT * min(cell.slos_s)}, _plain
    ),
    "price": Setting("price", fits=_priced),
    "flex, no preemption": Setting("flex", _always(preemption=False)),
    "flex": Setting("flex", preempts=True),
    "deferred_flex": Setting("deferred_flex", preempts=True),
    "deferred_flex, consolidate": Setting(
        "deferred_flex", _always(objective="consolidate"), preempts=True
    ),
    "kairos": Setting("kairos", fits=lambda cell: _matches(cell) and cell.sized),
    "kairos, batches": Setting("kairos", _always(batch=True), _matches),
    "pipeline, Loki's planner": Setting("pipeline", fits=_loki, planned=True),
    "auto": Setting("auto", lambda cell: {"preempt": cell.preemption}),
}
