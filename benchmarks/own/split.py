"""The best single-purpose set-ups on a pool that is split by hand, to compare with `composition`.

*Single-purpose* is what one application could serve before ray-slo could combine features:

* models without variants, under a policy that batches: `deferred` or `eager`, and with preemption
  `flex` or `deferred_flex`;
* models with variants: under `price`, or each with one variant that its user chose;
* requests with sizes: under `kairos`, or under the others without their sizes. Profiles then have
  the 95th percentile of the items in that many requests, as measured profiles do;
* one pipeline: on one kind of workers under Loki, or on all kinds without a planner.

Several models without variants may share workers; nothing else may.

*By hand*: each part gets a fixed number of workers of each kind for the whole run. A search finds
the best parts, set-ups and numbers. It starts from equal numbers and moves workers one by one. It
tries them on the same requests that they are then judged by, which no operator could do. So this is
better than what an operator gets. With a budget, the mix of kinds is searched, too. Autoscaling is
not part of any set-up: then the pool has the mean number of workers that ours used, rounded up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.own.applications import (
    BUDGET,
    GROUPS,
    ITEMS,
    PREEMPTION,
    SIZES,
    UNLIKE,
    VARIANTS,
    WORKERS,
    Application,
    one_variant,
)
from ray_slo.core.profiles import LatencyProfile
from ray_slo.planning import auto
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.serve.planner.loki import Loki
from ray_slo.simulation import simulate_application

Workers = tuple[tuple[str, int], ...]  # (kind, number), for each kind with at least one worker
Parts = tuple[tuple[str, ...], ...]  # the roots of each part


@dataclass(frozen=True)
class SetUp:
    """A way to serve a part: a policy, and the only variant of each model if the user chose one."""

    policy: str
    variant: int | None = None
    loki: bool = False
    sized: bool = True


@dataclass
class Hand:
    """Searches for the best split of one application."""

    case: Application
    seed: int
    known: dict[Any, float] = field(default_factory=dict)

    def best(self, pool: Mapping[str, int]) -> float:
        """Return the value of the best split of this number of workers of each kind.

        It is the mean accuracy over all requests, where those not answered in time count 0.
        """
        grouped = GROUPS in self.case.features
        splits = (
            self._of_groups(parts, pool) if grouped else self._climb(parts, pool)
            for parts in self._partitions()
        )
        return max(splits)

    def _of_groups(self, parts: Parts, pool: Mapping[str, int]) -> float:
        """Return the value of the best split in which each part gets whole groups."""
        of = {g: tuple((k, n) for k, n in pool.items() if k.endswith(g) and n) for g in "ab"}
        deals = (
            ([of[g]] for g in "ab") if len(parts) == 1 else ([of["a"], of["b"]], [of["b"], of["a"]])
        )
        return max(self._split(parts, deal) for deal in deals)

    def _climb(self, parts: Parts, pool: Mapping[str, int]) -> float:
        """Start with equal shares, and move workers as long as that improves the value."""
        dealt = [dict.fromkeys(pool, 0) for _ in parts]
        for k, n in pool.items():
            for i in range(n):
                dealt[i % len(parts)][k] += 1
        best = self._split(parts, [_workers(deal) for deal in dealt])
        while len(parts) > 1:
            found = best
            for k, giver, taker in itertools.product(pool, range(len(parts)), range(len(parts))):
                step = min(max(pool[k] // 8, 1), dealt[giver][k])
                if giver == taker or not step:
                    continue
                moved = [dict(deal) for deal in dealt]
                moved[giver][k] -= step
                moved[taker][k] += step
                split = self._split(parts, [_workers(deal) for deal in moved])
                if split > found:
                    found, chosen = split, moved
            if found == best:
                break
            best, dealt = found, chosen
        return best

    def _split(self, parts: Parts, dealt: Sequence[Workers]) -> float:
        """Return the value of the split of these parts on these workers."""
        total = sum(len(w.arrivals.times_s) for w in self.case.workloads.values())  # type: ignore[union-attr]
        return sum(self._best_of(p, a) for p, a in zip(parts, dealt, strict=True)) / total

    def _partitions(self) -> Iterator[Parts]:
        """Yield the ways to divide the roots: each root alone, or all models together."""
        roots = self.case.roots
        models = tuple(r for r in roots if r != "photo")
        yield tuple((r,) for r in roots)
        if len(models) > 1:
            yield (models, *((r,) for r in roots if r == "photo"))

    def _best_of(self, part: tuple[str, ...], workers: Workers) -> float:
        """Return the value of a part under its best set-up, summed over its requests."""
        if not workers:
            return 0.0
        return max(self._worth(part, workers, s) for s in self._promising(part))

    def _promising(self, part: tuple[str, ...]) -> list[SetUp]:
        """Return the best set-up on an even share of the pool; the two best for the only part."""
        if part not in self.known:
            setups = list(self._setups(part))
            if len(setups) > 1:
                pool = [(k.name, k.max_workers) for k in self.case.problem.kinds]
                share = max(len(self._parts_like(part)), 1)
                even = tuple((k, max(round(_usual(self.case, n) / share), 1)) for k, n in pool)
                setups.sort(key=lambda s: -self._worth(part, even, s))
            alone = len(part) == len(self.case.roots)
            self.known[part] = setups[: 2 if alone else 1]  # type: ignore[assignment]
        return self.known[part]  # type: ignore[return-value]

    def _parts_like(self, part: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        return next((p for p in self._partitions() if part in p), ())

    def _setups(self, part: tuple[str, ...]) -> Iterator[SetUp]:
        has = self.case.features
        variants = range(3) if VARIANTS in has else (None,)
        if part == ("photo",):
            yield SetUp("pipeline", loki=True, sized=False)
            yield from (SetUp("pipeline", v, sized=False) for v in variants)
            return
        if VARIANTS in has:
            yield SetUp("price", sized=False)
        for v in variants:
            if SIZES in has:
                yield SetUp("kairos", v)
            yield SetUp("deferred", v, sized=False)
            if VARIANTS not in has:
                yield SetUp("eager", v, sized=False)
            if PREEMPTION in has:
                yield SetUp("flex", v, sized=False)
                yield SetUp("deferred_flex", v, sized=False)

    def _worth(self, part: tuple[str, ...], workers: Workers, setup: SetUp) -> float:
        key = part, workers, setup
        if key not in self.known:
            self.known[key] = self._run(part, workers, setup)
        return self.known[key]

    def _run(self, part: tuple[str, ...], workers: Workers, setup: SetUp) -> float:
        case = self.case.part(part, dict(workers))
        problem = case.problem
        if setup.variant is not None:
            problem = one_variant(problem, setup.variant)
        truth = problem.models
        if SIZES in case.features and not setup.sized:
            problem = replace(problem, models=tuple(_unsaid(m) for m in problem.models))
        if setup.loki:
            used = [k for k in problem.kinds if k.max_workers]
            kinds = sorted(used, key=lambda k: -k.max_workers * k.price_per_hour)[:1]
            if kinds[0].max_workers < len(problem.models):
                return 0.0
            problem = replace(problem, kinds=tuple(kinds), models=_on(problem.models, kinds))
            truth = _on(truth, kinds)
        report = simulate_application(
            problem,
            case.workloads,
            policy=setup.policy,
            planner=loki_of if setup.loki else None,
            duration_s=case.duration_s,
            interval_s=5.0,
            load_s=0.5,
            preempt_delay_s=0.002,
            truth=truth,
            tells_sizes=setup.sized,
            seed=self.seed,
        )
        return report.value() * report.count()


def _usual(case: Application, most: int) -> float:
    return most / 2 if BUDGET in case.features else most


def _workers(deal: Mapping[str, int]) -> Workers:
    return tuple((kind, n) for kind, n in deal.items() if n)


def pools(case: Application, used: Mapping[str, float] | None) -> list[dict[str, int]]:
    """Return the pools (number of workers by kind) that may be split.

    Args:
        used: mean number of workers by kind that ours used, with autoscaling.
    """
    kinds = [kind.name for kind in case.problem.kinds]
    if used is not None:
        return [{kind: math.ceil(n - 0.05) for kind, n in used.items()}]
    if BUDGET in case.features:
        if UNLIKE in case.features:
            mixes = ((4, 8), (6, 2), (5, 5), (2, 14))
            if GROUPS in case.features:
                mixes = tuple((f // 2, f - f // 2, s // 2, s - s // 2) for f, s in mixes)
            return [dict(zip(kinds, mix, strict=True)) for mix in mixes]
        if GROUPS in case.features:
            return [dict(zip(kinds, (n, WORKERS - n), strict=True)) for n in range(1, WORKERS)]
        return [{kinds[0]: WORKERS}]
    return [{kind.name: kind.max_workers for kind in case.problem.kinds}]


def _unsaid(model: auto.Model) -> auto.Model:
    """Return the model with profiles by requests, for policies that do not know their sizes."""
    if model.items == 1:
        return model
    rng = np.random.default_rng(0)
    sums = np.cumsum(ITEMS.draw(20 * 2000, rng).reshape(2000, 20), axis=1)
    items = np.ceil(np.quantile(sums, 0.95, axis=0)).astype(int).tolist()
    variants = []
    for v in model.variants:
        profiles = {
            kind: LatencyProfile([p.latency(n) for n in items if n <= 0.7 * p.max_batch_size])
            for kind, p in v.profiles.items()
        }
        variants.append(replace(v, profiles=profiles))
    return replace(model, variants=tuple(variants), items=1.0)


def _on(models: tuple[auto.Model, ...], kinds: list[auto.Kind]) -> tuple[auto.Model, ...]:
    """Return the models with profiles for these kinds alone."""
    names = {kind.name for kind in kinds}
    return tuple(
        replace(
            m,
            variants=tuple(
                replace(v, profiles={k: p for k, p in v.profiles.items() if k in names})
                for v in m.variants
            ),
        )
        for m in models
    )


def loki_of(problem: auto.Problem) -> AutoBrain:
    """Return Loki's planner for a problem with one pipeline and one kind of workers."""
    (kind,) = problem.kinds
    asked = replace(problem, **{**Loki.settings, "relative_gap": 0.005})
    profiles = {(v.name, kind.name): v.profiles[kind.name] for v in problem.variant.values()}
    first = {kind.name: kind.max_workers}
    return AutoBrain(AutoSetting(asked, first, interval_s=5.0, profiles=profiles))
