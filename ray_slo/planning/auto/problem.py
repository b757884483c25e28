"""Problems of the planner `auto`: trees of tasks, their models, a demand, kinds of workers.

Worked example: a detector finds 4 faces per frame. Clients may also ask for the recogniser alone.
There are two kinds of workers.

    >>> from ray_slo.core.profiles import LatencyProfile
    >>> from ray_slo.core.trees import Tree, TreeTask
    >>> fixed = lambda ms: LatencyProfile([ms / 1e3] * 2)
    >>> detector = Model("detect", (Variant("d", 90.0, {"gpu": fixed(20)}),))
    >>> small = Variant("small", 80.0, {"gpu": fixed(10), "cpu": fixed(40)}, {"gpu": 500.0})
    >>> faces = {"d": {"name": 4.0}}
    >>> tasks = TreeTask("detect", "detect", None, faces), TreeTask("name", "name", "detect")
    >>> face = Tree("face", (TreeTask("face", "name"),), {"": 0.1, "gold": 0.05})
    >>> problem = Problem(
    ...     (detector, Model("name", (small,))),
    ...     (Tree("photo", tasks, {"": 0.1}), face),
    ...     {"photo": Demand(20.0), "face@gold": Demand(5.0)},
    ...     (Kind("gpu", 0, 4, memory_mb=800.0), Kind("cpu", 0, 8)),
    ... )
    >>> problem.streams
    ('photo', 'face', 'face@gold')
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from ray_slo.core.arguments import Above0, AtLeast0, NonNegative, Positive, check_fields
from ray_slo.core.demand import HEADROOM_QUANTILE, poisson_rate
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import WorkerId
from ray_slo.core.trees import WAITING_FACTOR, Tree, TreeTask, root_and_class, tree_of_task
from ray_slo.planning.milp import Backend

Percent = Annotated[float, Field(ge=0, le=100)]
Objective = Literal["accuracy", "cost"]

LOKI: Mapping[str, Any] = {
    "sharing": False,
    "headroom": False,
    "headroom_quantile": HEADROOM_QUANTILE,
    "fits_alone": True,
}
"""Loki's settings: a worker has one variant, and there is no room for bursts, except for a quantile
of the demand (Loki §4)."""


@dataclass(frozen=True)
class Variant:
    """A network that can answer for a model.

    Args:
        name: unique in the application.
        accuracy: accuracy of this network alone, in percent.
        profiles: latency by number of items, by kind of worker. Other kinds cannot run the variant.
        memory_mb: memory that the variant needs on a worker, in MB, by kind. The default is 0.
    """

    name: str
    accuracy: Percent
    profiles: Mapping[str, LatencyProfile]
    memory_mb: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, f" of variant {self.name!r}")
        for kind, memory_mb in self.memory_mb.items():
            if not 0 <= memory_mb < math.inf:
                raise ValueError(
                    f"memory_mb.{kind} of variant {self.name!r} must be at least 0, got {memory_mb}"
                )


@dataclass(frozen=True)
class Size:
    """Requests of about the same size.

    Attributes:
        largest: number of items in the largest request. It is the name of the class.
        items: mean number of items in a request.
        share: share of the model's requests.
    """

    largest: Annotated[int, Field(ge=1)]
    items: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    share: Annotated[float, Field(ge=0, le=1)]

    def __post_init__(self) -> None:
        check_fields(self, " of a class of sizes")
        if self.items > self.largest:
            raise ValueError(
                f"items of a class of sizes must be at most largest {self.largest}, "
                f"got {self.items:g}"
            )


@dataclass(frozen=True)
class Model:
    """A model, which serves tasks.

    Args:
        name: unique in the application.
        variants: variants to choose from.
        items: mean size of a request. A batch of b requests takes ℓ(b · items).
        sizes: size classes of clients' requests, if they are known. Each class is a separate
            demand, and is served by workers on which it is in time (`sizes.py`). For requests that
            other tasks make, only the mean size counts.
    """

    name: str
    variants: tuple[Variant, ...]
    items: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    sizes: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f" of model {self.name!r}")
        if not self.variants:
            raise ValueError(f"variants of model {self.name!r} must name at least one")
        largest = [size.largest for size in self.sizes]
        if largest != sorted(set(largest)):
            raise ValueError(f"sizes of model {self.name!r} must come by rising largest ones")
        if largest and abs(sum(size.share for size in self.sizes) - 1) > 1e-6:
            raise ValueError(f"shares of the sizes of model {self.name!r} must sum to 1")


@dataclass(frozen=True)
class Kind:
    """A kind of worker.

    Args:
        name: key of the variants' profiles.
        min_workers, max_workers: least and largest number of workers.
        price_per_hour: price of one worker.
        memory_mb: memory of one worker for its variants, MB.
        group: group of these workers, if workers are divided into groups.
        interruptions_per_hour: mean number of times that a spot worker is taken away per hour.
        replacement_s: time from an interruption until another worker serves, in seconds.
    """

    name: str
    min_workers: Annotated[int, Field(ge=0)]
    max_workers: Annotated[int, Field(ge=0)]
    price_per_hour: NonNegative = 0.0
    memory_mb: Above0 = math.inf
    group: str | None = None
    interruptions_per_hour: NonNegative = 0.0
    replacement_s: NonNegative = 180.0

    @property
    def there(self) -> float:
        """Share of the time for which a worker is present."""
        return 1 / (1 + self.interruptions_per_hour * self.replacement_s / 3600)

    def __post_init__(self) -> None:
        check_fields(self, f" of kind {self.name!r}")
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers of kind {self.name!r} must be at most max_workers "
                f"{self.max_workers}, got {self.min_workers}"
            )


@dataclass(frozen=True)
class Demand:
    """The demand of a stream.

    Args:
        rate: mean requests per second.
        dispersion: index of dispersion: the variance of the number of arrivals in a time, divided
            by its mean. It is 1 for Poisson arrivals. It is 0 for a constant rate, which needs no
            room for bursts.
    """

    rate: NonNegative
    dispersion: NonNegative = 1.0

    def __post_init__(self) -> None:
        check_fields(self, " of a demand")


@dataclass(frozen=True)
class Hosted:
    """A present worker, and the variants that it has loaded or is loading."""

    worker: WorkerId
    kind: str
    variants: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Problem:
    """A planning problem.

    Args:
        models: models of all tasks.
        trees: what clients may ask for.
        demand: demand by stream ("root" or "root@class"); 0 for missing streams.
        kinds: kinds of workers.
        objective: order of the goals. "accuracy": first all demand in time, then the highest
            accuracy, then the least cost. "cost": first all demand in time with at least
            `accuracy_floor`, then the least cost, then the highest accuracy.
        budget_per_hour: upper limit of the cost. None for no limit. With `present` it is ignored.
        accuracy_floor: least mean accuracy of every root over its served requests, in percent.
            Requests are shed rather than served below it.
        sharing: whether a worker may host several variants. Otherwise each has one, as in Loki.
        group_of: the only group that may serve a model, by model. If kinds have groups, a group is
            chosen for the other models (`groups.py`). All models of a tree are in one group.
        group_now: present group of each model whose group is chosen.
        allowed_groups: groups to choose from, by model. The default is all groups.
        move_cost: least gain, in points of accuracy, for which a model moves to another group. A
            tenth of the cost, or of a group's overload, counts as one point.
        present: number of present workers by kind, if the plan is for exactly these. None: the plan
            chooses the numbers, within the bounds and the budget.
        current: present workers and the variants that they have loaded.
        swap_cost: least gain, in points of accuracy, for which a variant is loaded on a worker that
            has other variants.
        max_swaps: largest number of such loads. None for no limit.
        waiting_factor: time of a request at a task including the wait, as a multiple of the time of
            a batch.
        communication_s: delay per task on a path, in seconds.
        batch_sizes: allowed numbers of requests per batch. A variant's profile limits them too.
        target_bad: share of the requests that may be late or refused because of bursts.
        headroom: whether workers have as much free time as bursts need (`headroom.py`). Without it,
            a plan fills every worker, as Loki does. This is for comparisons.
        headroom_quantile: the plan is for this quantile of the arrivals in `headroom_period_s`, if
            these are Poisson at the demand. None: it is for the mean. Without `headroom`, this is
            the only room for bursts.
        fits_alone: whether the requests that a single request at the root makes at a task must fit
            into the task's time (`rows.add_alone`). It needs `sharing` to be false.
        backend, time_limit_s, relative_gap, seed: arguments of the solver, for each program.

    Raises:
        ValueError: a field is not valid. The message names it.
    """

    models: tuple[Model, ...]
    trees: tuple[Tree, ...]
    demand: Mapping[str, Demand]
    kinds: tuple[Kind, ...]
    objective: Objective = "accuracy"
    budget_per_hour: AtLeast0 | None = None
    accuracy_floor: Percent = 0.0
    sharing: bool = True
    group_of: Mapping[str, str] = field(default_factory=dict)
    group_now: Mapping[str, str] = field(default_factory=dict)
    allowed_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    move_cost: NonNegative = 1.0
    present: Mapping[str, int] | None = None
    current: tuple[Hosted, ...] = ()
    swap_cost: NonNegative = 0.0
    max_swaps: Annotated[int, Field(ge=0)] | None = None
    waiting_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = WAITING_FACTOR
    communication_s: NonNegative = 0.0
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    target_bad: Annotated[float, Field(gt=0, lt=1)] = 0.01
    headroom: bool = True
    headroom_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    headroom_period_s: Positive = 1.0
    fits_alone: bool = False
    backend: Backend = "auto"
    time_limit_s: Positive = 10.0
    relative_gap: NonNegative = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1, got {self.batch_sizes}")
        if self.fits_alone and self.sharing:
            raise ValueError("fits_alone: only without sharing")
        self._check_names()
        self._check_variants()
        self._check_references()

    def _check_names(self) -> None:
        for where, named in (("models", self.models), ("trees", self.trees), ("kinds", self.kinds)):
            names = [one.name for one in named]
            if not names:
                raise ValueError(f"{where} must name at least one")
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{where}: two are named {twice[0]!r}")
        tree_of_task({tree.name: tree for tree in self.trees})
        variants = [variant.name for model in self.models for variant in model.variants]
        if twice := sorted({name for name in variants if variants.count(name) > 1}):
            raise ValueError(f"variants must have names of their own, got {twice[0]!r} twice")

    def _check_variants(self) -> None:
        kinds = [kind.name for kind in self.kinds]
        for model in self.models:
            for variant in model.variants:
                _known(variant.profiles, kinds, f"profiles of variant {variant.name!r}", "kinds")
                _known(variant.memory_mb, kinds, f"memory_mb of variant {variant.name!r}", "kinds")
        for tree in self.trees:
            for task in tree.tasks:
                _known([task.model], self.model, f"model of task {task.name!r}", "models")
                known = [variant.name for variant in self.model[task.model].variants]
                _known(task.factors, known, f"factors of task {task.name!r}", "variants")

    def _check_references(self) -> None:
        kinds = [kind.name for kind in self.kinds]
        self._check_groups()
        _known(self.demand, self.streams, "demand", "streams")
        _known([hosted.kind for hosted in self.current], kinds, "current", "kinds")
        workers = [hosted.worker for hosted in self.current]
        if len(set(workers)) < len(workers):
            raise ValueError(f"current must name every worker once, got {workers}")
        if self.present is not None:
            _known(self.present, kinds, "present", "kinds")
            if min(self.present.values(), default=0) < 0:
                raise ValueError(f"present must count at least 0 workers, got {self.present}")

    def _check_groups(self) -> None:
        alone = [kind.name for kind in self.kinds if kind.group is None]
        if alone and self.groups:
            raise ValueError(f"kinds: {alone[0]!r} has no group, and others have one")
        for name in ("group_of", "group_now", "allowed_groups"):
            given: Mapping[str, Any] = getattr(self, name)
            _known(given, self.model, name, "models")
            for groups in given.values():
                named = (groups,) if isinstance(groups, str) else groups
                _known(named, self.groups, name, "groups")
        if none := [model for model, groups in self.allowed_groups.items() if not groups]:
            raise ValueError(f"allowed_groups.{none[0]} must name at least one group")

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups of workers, if there are any."""
        return tuple(dict.fromkeys(k.group for k in self.kinds if k.group is not None))

    @cached_property
    def model(self) -> Mapping[str, Model]:
        """Models by name."""
        return {model.name: model for model in self.models}

    @cached_property
    def kind(self) -> Mapping[str, Kind]:
        """Kinds by name."""
        return {kind.name: kind for kind in self.kinds}

    @cached_property
    def variant(self) -> Mapping[str, Variant]:
        """Variants by name."""
        return {v.name: v for model in self.models for v in model.variants}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """All streams that clients may ask for, in the order of the trees."""
        return tuple(stream for tree in self.trees for stream, _ in tree.streams())

    def most(self, kind: Kind) -> int:
        """Return the largest number of workers of a kind."""
        return kind.max_workers if self.present is None else self.present.get(kind.name, 0)

    def rate(self, stream: str) -> float:
        """Return a stream's requests per second at the root, with `headroom_quantile`."""
        rate = self.demand[stream].rate if stream in self.demand else 0.0
        if self.headroom_quantile is None:
            return rate
        return poisson_rate(rate, self.headroom_quantile, self.headroom_period_s)

    def tree_of(self, stream: str) -> Tree:
        root, _ = root_and_class(stream)
        return next(tree for tree in self.trees if tree.name == root)

    def slo_s(self, stream: str) -> float:
        return self.tree_of(stream).slos_s[root_and_class(stream)[1]]

    def variants_of(self, task: TreeTask) -> tuple[Variant, ...]:
        return self.model[task.model].variants


def most_accurate(problem: Problem) -> Problem:
    """Return the problem with only the most accurate variants of each model."""
    models, names = [], set[str]()
    for model in problem.models:
        top = max(variant.accuracy for variant in model.variants)
        kept = tuple(variant for variant in model.variants if variant.accuracy == top)
        models.append(replace(model, variants=kept))
        names |= {variant.name for variant in kept}
    trees = [
        replace(
            tree,
            tasks=tuple(
                replace(task, factors={v: f for v, f in task.factors.items() if v in names})
                for task in tree.tasks
            ),
        )
        for tree in problem.trees
    ]
    current = tuple(replace(hosted, variants=hosted.variants & names) for hosted in problem.current)
    return replace(problem, models=tuple(models), trees=tuple(trees), current=current)


def _known(names: Collection[Any], known: Collection[Any], field: str, what: str) -> None:
    """Check that all of `names` are among `known`."""
    if unknown := [name for name in names if name not in known]:
        valid: Sequence[str] = [str(name) for name in known]
        raise ValueError(
            f"{field}: {unknown[0]!r} is none of the {what} {', '.join(valid) or '(none)'}"
        )
