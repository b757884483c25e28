"""A whole simulated run as one document (YAML): policy, cluster, workload, duration.

cluster:
  workers: 8                                  # or per hardware: {t4: 4, a100: 2}
  models:
    resnet50: {latency_slo_ms: 25, profile: {alpha_ms: 1.053, beta_ms: 5.072}}
workload: {arrivals: {kind: poisson, rate: 4000}}
duration_s: 20
policy: {name: deferred, kwargs: {objective: consolidate}}   # default: auto
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
from ray_slo.core.documents import DelayMs, Frozen, ProfileSpec, SloMs, exactly_one
from ray_slo.core.explain import Misplaced, placed
from ray_slo.core.names import listed, nearest
from ray_slo.core.policy import Policy
from ray_slo.policies.registry import DEFAULT, policy_for
from ray_slo.simulation.engine import WorkerEvent
from ray_slo.simulation.report import Report
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.workloads import Workload

MAX_WORKERS = 100_000
Noise = Annotated[float, Field(ge=0, le=10)]
"""σ of log(actual / profiled execution time). At 10, times differ by a factor of 20,000."""


class VariantSpec(Frozen):
    """A variant, with one profile for all hardware, or one per hardware kind.

    Attributes:
        profile: its profile on any worker.
        profiles: its profiles by hardware kind, instead.
        accuracy: its accuracy, percent, if known.
    """

    profile: ProfileSpec | None = None
    profiles: dict[str, ProfileSpec] | None = None
    accuracy: Annotated[float, Field(ge=0, le=100)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> VariantSpec:
        exactly_one(self, "profile", "profiles")
        return self

    def build(self, name: str, hardware: list[str], base: Path) -> Variant:
        if self.profile is not None:
            with placed("profile"):
                profile = self.profile.build(name, base)
            return Variant(name, dict.fromkeys(hardware, profile), self.accuracy)
        built = {}
        for kind, said in (self.profiles or {}).items():
            with placed(f"profiles.{kind}"):
                built[kind] = said.build(name, base)
        return Variant(name, built, self.accuracy)


class ModelSpec(Frozen):
    """A model: its SLO and its variants, or a profile if it has only one network.

    Attributes:
        latency_slo_ms: time from arrival to answer, milliseconds.
        profile: the profile of a model without variants.
        variants: its variants by name, instead.
    """

    latency_slo_ms: SloMs
    profile: ProfileSpec | None = None
    variants: dict[str, VariantSpec] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> ModelSpec:
        exactly_one(self, "profile", "variants")
        return self

    def build(self, name: str, hardware: list[str], base: Path) -> Model:
        if not self.variants:
            built = [VariantSpec(profile=self.profile).build(name, hardware, base)]
        else:
            built = []
            for variant, said in self.variants.items():
                with placed(f"variants.{variant}"):
                    built.append(said.build(variant, hardware, base))
        return Model(name, self.latency_slo_ms / 1e3, tuple(built))


class DelaySpec(Frozen):
    """Time from a decision to the start of execution: control_ms + per_request_ms · batch size.

    Attributes:
        control_ms: delay of any batch, milliseconds.
        per_request_ms: further delay for each request in it, milliseconds.
    """

    control_ms: DelayMs = 0.0
    per_request_ms: DelayMs = 0.0

    def build(self) -> DispatchDelay:
        return DispatchDelay(self.control_ms / 1e3, self.per_request_ms / 1e3)


_Count = Annotated[int, Field(ge=1, le=MAX_WORKERS)]


class ClusterSpec(Frozen):
    """Models and workers; a worker loads every variant that has a profile for its hardware.

    Attributes:
        models: models by name.
        workers: number of workers, or the number of each hardware kind.
        delay: the delay that the policy expects. It is also the real one, unless there is a
            `true_delay`.
    """

    models: dict[str, ModelSpec] = Field(min_length=1)
    workers: _Count | Annotated[dict[str, _Count], Field(min_length=1)] = 8
    delay: DelaySpec = DelaySpec()

    @property
    def names(self) -> list[str]:
        """Of the workers."""
        if isinstance(self.workers, int):
            return [f"w{i}" for i in range(self.workers)]
        return [f"{kind}-{i}" for kind, n in self.workers.items() for i in range(n)]

    def policy(self, name: str, kwargs: dict[str, Any]) -> Policy:
        """One that chooses among the variants, if there are several."""
        variants = {name: len(model.variants or ()) for name, model in self.models.items()}
        return policy_for(name, kwargs, variants=variants)

    def built(self, hardware: list[str], base: Path) -> list[Model]:
        """The models on such hardware.

        Raises:
            ValueError: names the field.
        """
        made = []
        for name, said in self.models.items():
            with placed(f"cluster.models.{name}"):
                made.append(said.build(name, hardware, base))
        return made

    def build(self, base: Path) -> Cluster:
        """The cluster; workers are "w0", "w1", …, or "KIND-0", … where hardware is named."""
        if isinstance(self.workers, int):
            kinds = ["default"] * self.workers
        else:
            kinds = [kind for kind, n in self.workers.items() for _ in range(n)]
        hardware = sorted(set(kinds))
        models = self.built(hardware, base)
        loaded = {
            kind: frozenset(v.name for m in models for v in m.variants if kind in v.profiles)
            for kind in hardware
        }
        workers = [Worker(n, kind, loaded[kind]) for n, kind in zip(self.names, kinds, strict=True)]
        return Cluster.of(models, workers, self.delay.build())


class PolicySpec(Frozen):
    """A policy and its arguments.

    Attributes:
        name: name of a policy, or "module:attr".
        kwargs: its arguments.
    """

    name: str = DEFAULT
    kwargs: dict[str, Any] = Field(default_factory=dict)


class WorkerEventSpec(Frozen):
    """A worker leaves or joins.

    Attributes:
        at_s: time of the event, seconds from the start.
        worker: its name: "w0", "w1", …, or "KIND-0", … where hardware is named.
        action: whether it leaves or joins.
    """

    at_s: NonNegativeFloat
    worker: str
    action: Literal["leave", "join"]


class SimulationSpec(Frozen):
    """All arguments of `simulate`, with the same defaults.

    Attributes:
        cluster: models and workers.
        workload: the arrivals.
        policy: the policy.
        duration_s: time for which requests arrive, seconds; not needed if they end by themselves.
        warmup_s: time at the start that is not counted, seconds.
        seed: seed of all random numbers.
        latency_noise: σ of log(actual / profiled execution time).
        true_delay: the real delay of a dispatch, if it differs from the one that the policy expects
            (`cluster.delay`).
        report_delay_ms: time from the end of a batch until the policy hears of it, milliseconds.
        worker_events: workers that leave and join.
        first_profile: factor of the profiles that the policy's host believes at first. It learns
            from batches. Default: the policy knows the profiles.
        pace: times in seconds and factors of the execution time from then on, interpolated.
    """

    cluster: ClusterSpec
    workload: Workload
    policy: PolicySpec = PolicySpec()
    duration_s: PositiveFloat | None = None
    warmup_s: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    latency_noise: Noise = 0.0
    true_delay: DelaySpec | None = None
    report_delay_ms: DelayMs = 0.0
    worker_events: list[WorkerEventSpec] = Field(default_factory=list)
    first_profile: PositiveFloat | None = None
    pace: list[tuple[NonNegativeFloat, PositiveFloat]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_what_there_is(self) -> SimulationSpec:
        with placed("policy", instead_of="policy"):
            self.make_policy()
        with placed("workload"):
            self.workload.check_models(list(self.cluster.models))
        workers = self.cluster.names
        for i, event in enumerate(self.worker_events):
            if event.worker not in workers:
                raise Misplaced(
                    f"worker_events.{i}.worker",
                    f"no worker {event.worker!r}; they are {listed(workers)}"
                    f"{nearest(event.worker, workers)}",
                )
        return self

    def make_policy(self) -> Policy:
        return self.cluster.policy(self.policy.name, self.policy.kwargs)

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
            "first_profile": self.first_profile,
            "pace": self.pace,
        }

    def run(self, base: str | Path = ".") -> Report:
        """Simulate; profile files are relative to `base`."""
        cluster = self.cluster.build(Path(base))
        return simulate(self.make_policy(), cluster, self.workload, **self.options(cluster))
