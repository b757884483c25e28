"""A question as a document (YAML) that `ray-slo plan` reads."""

from __future__ import annotations

from pathlib import Path

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ray_slo.core.cluster import DispatchDelay
from ray_slo.core.documents import DelayMs, Frozen, ProfileSpec, SloMs, exactly_one
from ray_slo.core.explain import Misplaced, placed
from ray_slo.core.names import listed, nearest
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.text import text_of
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.planning.catalogue import CATALOGUE, InstanceType, load_catalogue
from ray_slo.policies.registry import DEFAULT, POLICIES, make_policy, refuse_sizes
from ray_slo.simulation.sizing.question import KIND, Question
from ray_slo.simulation.spec import MAX_WORKERS, ClusterSpec, Noise, PolicySpec
from ray_slo.simulation.workloads import Workload


class PoolSpec(Frozen):
    """Instance types to choose from: those of the built-in catalogue, or of a file.

    Attributes:
        types: names of the types.
        catalogue: file of further types, relative to the document's folder.
        budget_per_hour: also show the pool with the highest throughput within this budget.
    """

    types: list[str] = Field(min_length=1)
    catalogue: Path | None = None
    budget_per_hour: PositiveFloat | None = None

    def build(self, base: Path) -> tuple[InstanceType, ...]:
        """Raises ValueError where the catalogue has no such type."""
        known = dict(CATALOGUE)
        if self.catalogue is not None:
            try:
                known |= load_catalogue(base / self.catalogue)
            except (OSError, ValueError) as error:
                raise Misplaced("pool.catalogue", text_of(error)) from None
        for i, name in enumerate(self.types):
            if name not in known:
                raise Misplaced(
                    f"pool.types.{i}",
                    f"must be one of {', '.join(known)}, got {name!r}{nearest(name, list(known))}",
                )
        if len(set(self.types)) < len(self.types):
            raise Misplaced("pool.types", f"must be different, got {', '.join(self.types)}")
        return tuple(known[name] for name in self.types)


class StageVariantSpec(Frozen):
    """A network of a task.

    Attributes:
        accuracy: percent.
        profile: its latency profile.
        factors: mean number of requests that one of its requests makes, by child task.
    """

    accuracy: float = Field(ge=0, le=100)
    profile: ProfileSpec
    factors: dict[str, NonNegativeFloat] = Field(default_factory=dict)


class StageSpec(Frozen):
    """A task of a pipeline; the root has no parent.

    Attributes:
        variants: by name.
        parent: the task that makes its requests.
    """

    variants: dict[str, StageVariantSpec] = Field(min_length=1)
    parent: str | None = None


class PipelineSpec(Frozen):
    """A tree of tasks under one SLO, planned as by Loki.

    Attributes:
        latency_slo_ms: end-to-end SLO, milliseconds.
        tasks: tasks by name.
        batch_sizes: batch sizes to choose from.
        communication_ms: time between two tasks, milliseconds.
    """

    latency_slo_ms: SloMs
    tasks: dict[str, StageSpec] = Field(min_length=1)
    batch_sizes: list[PositiveInt] = Field([1, 2, 4, 8, 16, 32], min_length=1)
    communication_ms: DelayMs = 0.0

    @model_validator(mode="after")
    def _is_a_tree(self) -> PipelineSpec:
        nodes = [TreeTask(name, name, task.parent) for name, task in self.tasks.items()]
        Tree("the pipeline", tuple(nodes), {"": self.latency_slo_ms / 1e3})
        for name, task in self.tasks.items():
            children = [child for child, of in self.tasks.items() if of.parent == name]
            for variant, said in task.variants.items():
                for unknown in [child for child in said.factors if child not in children]:
                    raise Misplaced(
                        f"tasks.{name}.variants.{variant}.factors.{unknown}",
                        f"no child of {name!r}; its children are {listed(children)}"
                        f"{nearest(unknown, children)}",
                    )
        return self

    def _profile(self, task: str, variant: str, base: Path) -> LatencyProfile:
        with placed(f"pipeline.tasks.{task}.variants.{variant}.profile"):
            return self.tasks[task].variants[variant].profile.build(variant, base)

    def build(self, base: Path) -> auto.Problem:
        """The problem, without its demand and its number of workers."""
        models, tasks = [], []
        for name, task in self.tasks.items():
            variants = (
                auto.Variant(v, s.accuracy, {KIND: self._profile(name, v, base)})
                for v, s in task.variants.items()
            )
            models.append(auto.Model(name, tuple(variants)))
            factors = {v: s.factors for v, s in task.variants.items()}
            tasks.append(TreeTask(name, name, task.parent, factors))
        root = next(name for name, task in self.tasks.items() if task.parent is None)
        return auto.Problem(
            tuple(models),
            (Tree(root, tuple(tasks), {"": self.latency_slo_ms / 1e3}),),
            {},
            (auto.Kind(KIND, 1, 1),),
            batch_sizes=tuple(self.batch_sizes),
            communication_s=self.communication_ms / 1e3,
            **auto.LOKI,
        )


class PlanSpec(Frozen):
    """A question in YAML. Fields that it shares with `SimulationSpec` are the same there.

    Attributes:
        cluster: models and delay. The search begins at `workers`, if it is given.
        pipeline: a pipeline instead of a cluster.
        workload: the arrivals.
        policies: policies to compare; default: `policy`.
        policy: the only policy; default: `auto`, or `pipeline` for a pipeline.
        pool: instance types, to find the cheapest mix of them.
        bad_rate: allowed share of bad requests of each model.
        accuracy_floor: least mean accuracy of the requests in time, percent.
        duration_s, warmup_s, seed, latency_noise: as in a simulation.
        confirm_seeds: further seeds that an answer must pass.
        max_workers: the largest number of workers in the search.
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
    latency_noise: Noise = 0.0
    max_workers: int = Field(1000, ge=1, le=MAX_WORKERS)

    @model_validator(mode="after")
    def _check(self) -> PlanSpec:
        exactly_one(self, "cluster", "pipeline")
        if self.pipeline is not None and self.pool is not None:
            raise Misplaced("pool", "a pipeline's workers are of one kind; leave pool out")
        if self.policy is not None and self.policies:
            raise Misplaced("policies", "give either policy or policies, got both")
        if self.duration_s is None and self.workload.length_s is None:
            raise Misplaced("duration_s", "required, as the workload's arrivals go on for ever")
        if self.cluster is not None and not isinstance(self.cluster.workers, int):
            raise Misplaced(
                "cluster.workers", "give one number; unlike machines go into pool.types"
            )
        if self.cluster is not None:
            with placed("workload"):
                self.workload.check_models(list(self.cluster.models))
        return self

    def build(self, base: str | Path = ".") -> Question:
        """The question; files are relative to `base`.

        Raises:
            ValueError, OSError: naming the field or the file.
        """
        base = Path(base)
        types = self.pool.build(base) if self.pool else ()
        usual = "pipeline" if self.pipeline else DEFAULT
        given = self.policies or [self.policy or usual]
        specs = [PolicySpec(name=p) if isinstance(p, str) else p for p in given]
        policies = [(p.name if "name" in p.model_fields_set else usual, p.kwargs) for p in specs]
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
            for i, (name, kwargs) in enumerate(policies):
                at = f"policies.{i}" if self.policies else "policy"
                with placed(at, instead_of="policy"):
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
            models=tuple(cluster.built(kinds, base)) if cluster else (),
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
