"""A whole simulated run as one document (YAML): policy, cluster, workload, duration.

policy: {name: deferred, kwargs: {objective: responsive}}
cluster:
  workers: 8                                  # or per hardware: {t4: 4, a100: 2}
  models:
    resnet50: {latency_slo_ms: 25, profile: {alpha_ms: 1.053, beta_ms: 5.072}}
workload: {arrivals: {kind: poisson, rate: 4000}}
duration_s: 20
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from ray_slo.core.cluster import Cluster, DispatchDelay, Model, Variant, Worker
from ray_slo.core.documents import Frozen, ProfileSpec
from ray_slo.core.policy import Policy
from ray_slo.policies.registry import DEFAULTS, policy_for
from ray_slo.simulation.engine import WorkerEvent
from ray_slo.simulation.report import Report
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.workloads import Workload

MAX_WORKERS = 100_000


class VariantSpec(Frozen):
    """A variant: one profile for all hardware, or one per hardware kind.

    Attributes:
        profile: on any worker.
        profiles: by hardware kind, instead.
        accuracy: percent, where known.
    """

    profile: ProfileSpec | None = None
    profiles: dict[str, ProfileSpec] | None = None
    accuracy: float | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> VariantSpec:
        if (self.profile is None) == (self.profiles is None):
            raise ValueError("give either profile or profiles (per hardware kind)")
        return self

    def build(self, name: str, hardware: list[str], base: Path) -> Variant:
        if self.profile is not None:
            profile = self.profile.build(name, base)
            return Variant(name, dict.fromkeys(hardware, profile), self.accuracy)
        built = {kind: p.build(name, base) for kind, p in (self.profiles or {}).items()}
        return Variant(name, built, self.accuracy)


class ModelSpec(Frozen):
    """A model: its SLO and its variants, or a profile where it is its own only variant.

    Attributes:
        latency_slo_ms: from arrival to answer.
        profile: of a model without variants.
        variants: by name, instead.
    """

    latency_slo_ms: PositiveFloat
    profile: ProfileSpec | None = None
    variants: dict[str, VariantSpec] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> ModelSpec:
        if (self.profile is None) == (not self.variants):
            raise ValueError("give either profile or variants")
        return self

    def build(self, name: str, hardware: list[str], base: Path) -> Model:
        variants = self.variants or {name: VariantSpec(profile=self.profile)}
        built = tuple(v.build(n, hardware, base) for n, v in variants.items())
        return Model(name, self.latency_slo_ms / 1e3, built)


class DelaySpec(Frozen):
    """From a decision to the start of execution: control_ms + per_request_ms · batch size.

    Attributes:
        control_ms: of any batch.
        per_request_ms: for each request in it.
    """

    control_ms: NonNegativeFloat = 0.0
    per_request_ms: NonNegativeFloat = 0.0

    def build(self) -> DispatchDelay:
        return DispatchDelay(self.control_ms / 1e3, self.per_request_ms / 1e3)


_Count = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class ClusterSpec(Frozen):
    """Models and workers; a worker loads every variant that has a profile for its hardware.

    Attributes:
        models: by name.
        workers: how many, or how many of each hardware kind.
        delay: as the policy knows it, and as it is unless `true_delay` says otherwise.
    """

    models: dict[str, ModelSpec] = Field(min_length=1)
    workers: _Count | dict[str, _Count] = 8
    delay: DelaySpec = DelaySpec()

    @property
    def usual_policy(self) -> str:
        """The policy where none is named."""
        variants = any(model.variants for model in self.models.values())
        return DEFAULTS["variants" if variants else "models"]

    def policy(self, name: str, kwargs: dict[str, Any]) -> Policy:
        """One that chooses among the variants, if there are several."""
        variants = {name: len(model.variants or ()) for name, model in self.models.items()}
        return policy_for(name, kwargs, variants=variants)

    def build(self, base: Path) -> Cluster:
        """The cluster; workers are "w0", "w1", …, or "KIND-0", … where hardware is named."""
        if isinstance(self.workers, int):
            kinds, names = ["default"] * self.workers, [f"w{i}" for i in range(self.workers)]
        else:
            kinds = [kind for kind, n in self.workers.items() for _ in range(n)]
            names = [f"{kind}-{i}" for kind, n in self.workers.items() for i in range(n)]
        hardware = sorted(set(kinds))
        models = [m.build(name, hardware, base) for name, m in self.models.items()]
        loaded = {
            kind: frozenset(v.name for m in models for v in m.variants if kind in v.profiles)
            for kind in hardware
        }
        workers = [Worker(n, kind, loaded[kind]) for n, kind in zip(names, kinds, strict=True)]
        return Cluster.of(models, workers, self.delay.build())


class PolicySpec(Frozen):
    """Who decides.

    Attributes:
        name: of a policy, or "module:attr"; None for `deferred`, or `price` where a model has
            variants.
        kwargs: its arguments.
    """

    name: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)


class WorkerEventSpec(Frozen):
    """A worker goes away or comes back.

    Attributes:
        at_s: seconds from the start.
        worker: its name: "w0", "w1", …, or "KIND-0", … where hardware is named.
        action: what happens.
    """

    at_s: NonNegativeFloat
    worker: str
    action: Literal["leave", "join"]


class SimulationSpec(Frozen):
    """Everything that `simulate` takes. Defaults are those of `simulate`.

    Attributes:
        cluster: models and workers.
        workload: what arrives when.
        policy: who decides.
        duration_s: time for which requests arrive; may be left out where they end by
            themselves.
        warmup_s: start that is not counted.
        seed: of everything random.
        latency_noise: σ of log(actual / profiled execution time).
        true_delay: of dispatch, where it is not what the policy knows (`cluster.delay`).
        report_delay_ms: from the end of a batch until the policy hears of it.
        worker_events: workers that go and come back.
    """

    cluster: ClusterSpec
    workload: Workload
    policy: PolicySpec = PolicySpec()
    duration_s: PositiveFloat | None = None
    warmup_s: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    latency_noise: NonNegativeFloat = 0.0
    true_delay: DelaySpec | None = None
    report_delay_ms: NonNegativeFloat = 0.0
    worker_events: list[WorkerEventSpec] = Field(default_factory=list)

    @property
    def policy_name(self) -> str:
        """Of the policy that is given, or the default."""
        return self.policy.name or self.cluster.usual_policy

    @model_validator(mode="after")
    def _there_is_such_a_policy(self) -> SimulationSpec:
        self.make_policy()
        return self

    def make_policy(self) -> Policy:
        return self.cluster.policy(self.policy_name, self.policy.kwargs)

    def options(self, cluster: Cluster) -> dict[str, Any]:
        """Keyword arguments for `simulate` or `goodput_search` beside policy and workload."""
        truth = self.true_delay and Cluster(
            cluster.models, cluster.workers, self.true_delay.build()
        )
        return {
            "duration_s": self.duration_s,
            "warmup_s": self.warmup_s,
            "seed": self.seed,
            "latency_noise": self.latency_noise,
            "truth": truth,
            "report_delay_s": self.report_delay_ms / 1e3,
            "worker_events": [WorkerEvent(e.at_s, e.worker, e.action) for e in self.worker_events],
        }

    def run(self, base: str | Path = ".") -> Report:
        """Simulate; profile files are relative to `base`."""
        cluster = self.cluster.build(Path(base))
        return simulate(self.make_policy(), cluster, self.workload, **self.options(cluster))
