"""A question as a document (YAML): what `ray-slo plan` reads."""

from __future__ import annotations

from pathlib import Path

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ray_slo.core.cluster import DispatchDelay
from ray_slo.core.documents import ProfileSpec, Strict
from ray_slo.planning import loki
from ray_slo.planning.catalogue import CATALOGUE, InstanceType, load_catalogue
from ray_slo.policies.registry import POLICIES, make_policy, refuse_sizes
from ray_slo.simulation.sizing.question import KIND, Question
from ray_slo.simulation.spec import ClusterSpec, PolicySpec
from ray_slo.simulation.workloads import Workload


class _Document(Strict):
    model_config = ConfigDict(frozen=True)


class PoolSpec(_Document):
    """Instance types to choose from, by name: of the built-in catalogue, or of a file of types.

    Attributes:
        types: their names.
        catalogue: file of further types, relative to the document's folder.
        budget_per_hour: also show what carries most under it.
    """

    types: list[str] = Field(min_length=1)
    catalogue: Path | None = None
    budget_per_hour: PositiveFloat | None = None

    def build(self, base: Path) -> tuple[InstanceType, ...]:
        """Raises ValueError where the catalogue has no such type."""
        known = dict(CATALOGUE)
        if self.catalogue is not None:
            known |= load_catalogue(base / self.catalogue)
        for name in self.types:
            if name not in known:
                raise ValueError(f"pool.types: {name!r} must be one of {', '.join(known)}")
        if len(set(self.types)) < len(self.types):
            raise ValueError(f"pool.types must be different, got {', '.join(self.types)}")
        return tuple(known[name] for name in self.types)


class StageVariantSpec(_Document):
    """A network of a task.

    Attributes:
        accuracy: percent.
        profile: its latency profile.
        factors: requests that it makes per request, by child task.
    """

    accuracy: float = Field(ge=0, le=100)
    profile: ProfileSpec
    factors: dict[str, NonNegativeFloat] = Field(default_factory=dict)


class StageSpec(_Document):
    """A task of a pipeline; the root has no parent.

    Attributes:
        variants: by name.
        parent: the task that makes its requests.
    """

    variants: dict[str, StageVariantSpec] = Field(min_length=1)
    parent: str | None = None


class PipelineSpec(_Document):
    """A tree of tasks under one SLO, as `loki.Problem` has it.

    Attributes:
        latency_slo_ms: end to end.
        tasks: by name.
        batch_sizes: that may be configured.
        communication_ms: between two tasks.
        waiting_factor: time at a task, in executions of a batch, waiting included.
        headroom_quantile: of Poisson arrivals at the rate, planned for.
    """

    latency_slo_ms: PositiveFloat
    tasks: dict[str, StageSpec] = Field(min_length=1)
    batch_sizes: list[PositiveInt] = Field([1, 2, 4, 8, 16, 32])
    communication_ms: NonNegativeFloat = 0.0
    waiting_factor: float = Field(2.0, ge=1)
    headroom_quantile: float | None = Field(0.95, gt=0, lt=1)

    def build(self, base: Path) -> loki.Problem:
        """With a demand and a number of workers still to be filled in."""
        tasks = tuple(
            loki.Task(
                name,
                tuple(
                    loki.Variant(v, s.accuracy, s.profile.build(v, base), s.factors)
                    for v, s in task.variants.items()
                ),
                task.parent,
            )
            for name, task in self.tasks.items()
        )
        return loki.Problem(
            tasks,
            demand=0.0,
            workers=1,
            slo_s=self.latency_slo_ms / 1e3,
            batch_sizes=tuple(self.batch_sizes),
            waiting_factor=self.waiting_factor,
            communication_s=self.communication_ms / 1e3,
            headroom_quantile=self.headroom_quantile,
        )


class PlanSpec(_Document):
    """A question in YAML. What it shares with `SimulationSpec` is written as there.

    Attributes:
        cluster: models and delay; `workers`, if given, is where the search begins.
        pipeline: instead of a cluster.
        workload: what arrives when.
        policies: to compare; by default `policy`: deferred, for models with variants price,
            for a pool kairos, for a pipeline pipeline.
        policy: the only one.
        pool: instance types, where the cheapest mix of them is wanted.
        bad_rate: share of bad requests that each model may have.
        accuracy_floor: percent; of the requests in time, on average.
        duration_s, warmup_s, seed, latency_noise: of each simulation.
        confirm_seeds: have to pass, too.
        max_workers: the search ends there.
    """

    cluster: ClusterSpec | None = None
    pipeline: PipelineSpec | None = None
    workload: Workload
    policy: PolicySpec | None = None
    policies: list[PolicySpec | str] = Field(default_factory=list)
    pool: PoolSpec | None = None
    bad_rate: float = Field(0.01, ge=0, lt=1)
    accuracy_floor: float = Field(0.0, ge=0, le=100)
    duration_s: PositiveFloat | None = None
    warmup_s: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    confirm_seeds: list[NonNegativeInt] = Field([1])
    latency_noise: NonNegativeFloat = 0.0
    max_workers: PositiveInt = 1000

    @model_validator(mode="after")
    def _check(self) -> PlanSpec:
        if (self.cluster is None) == (self.pipeline is None):
            raise ValueError("give either cluster or pipeline")
        if self.pipeline is not None and self.pool is not None:
            raise ValueError("pool: a pipeline's workers are of one kind; leave pool out")
        if self.policy is not None and self.policies:
            raise ValueError("give either policy or policies")
        if self.duration_s is None and self.workload.length_s is None:
            raise ValueError("duration_s is needed: the workload's arrivals go on for ever")
        if self.cluster is not None and not isinstance(self.cluster.workers, int):
            raise ValueError("cluster.workers: give one number; unlike machines go into pool.types")
        return self

    def build(self, base: str | Path = ".") -> Question:
        """The question; files are relative to `base`.

        Raises:
            ValueError, OSError: naming the field or the file.
        """
        base = Path(base)
        types = self.pool.build(base) if self.pool else ()
        usual = "pipeline" if self.pipeline else "kairos" if self.pool else "deferred"
        if self.cluster is not None and usual == "deferred":
            usual = self.cluster.usual_policy
        given = self.policies or [self.policy or usual]
        specs = [PolicySpec(name=p) if isinstance(p, str) else p for p in given]
        policies = [(p.name or usual, p.kwargs) for p in specs]
        if self.pipeline is not None:  # the policy is told of it, too
            for name, _ in policies:
                if name in POLICIES and name != "pipeline":
                    raise ValueError(
                        f"policy: a document with pipeline is planned as by Loki, and served by "
                        f"'pipeline', got {name!r}; for other policies write an application "
                        "(pipelines, models, workers, workloads)"
                    )
        else:
            assert self.cluster is not None
            for name, kwargs in policies:
                make_policy(name, kwargs)
                if self.workload.sizes is not None:
                    refuse_sizes(name, kwargs)
        cluster = self.cluster
        kinds = [t.name for t in types] or [KIND]
        duration_s = self.duration_s or self.workload.length_s
        assert duration_s is not None
        guess = None
        if cluster is not None and "workers" in cluster.model_fields_set and not types:
            assert isinstance(cluster.workers, int)
            guess = cluster.workers
        return Question(
            models=tuple(m.build(n, kinds, base) for n, m in cluster.models.items())
            if cluster
            else (),
            workload=self.workload,
            policies=tuple(policies),
            duration_s=duration_s,
            warmup_s=self.warmup_s,
            latency_noise=self.latency_noise,
            delay=cluster.delay.build() if cluster else DispatchDelay(),
            bad_rate=self.bad_rate,
            accuracy_floor=self.accuracy_floor,
            seeds=(self.seed, *(s for s in self.confirm_seeds if s != self.seed)),
            guess=guess,
            most=self.max_workers,
            types=types,
            budget_per_hour=self.pool.budget_per_hour if self.pool else None,
            pipeline=self.pipeline.build(base) if self.pipeline else None,
        )
