"""What a policy knows about the cluster: models, variants, workers, delays. Immutable.

A host makes a new `Cluster` when something changed (a worker came or went, a profile was learned),
and passes it to the policy as an event. So a recorded event log replays exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import WorkerId

Kind = tuple[str, frozenset[str]]
"""Hardware and names of the loaded variants. Workers with equal kinds serve equally well."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A network that can answer for a model.

    Attributes:
        name: unique in the cluster.
        profiles: latency profile per hardware kind.
        accuracy: percent, if known.
    """

    name: str
    profiles: Mapping[str, LatencyProfile]
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """What a client asks for.

    Attributes:
        variants: in the order of preference of their author.
        slos_s: every SLO of its requests, rising, for a policy that `plans_per_slo`; empty if
            `latency_slo_s` is the only one.
    """

    name: str
    latency_slo_s: float
    variants: tuple[Variant, ...]
    slos_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.latency_slo_s > 0:
            raise ValueError(
                f"model {self.name!r}: latency_slo_s must be positive, got {self.latency_slo_s}"
            )
        if not self.variants:
            raise ValueError(f"model {self.name!r}: variants must name at least one variant")

    def runnable(
        self, hardware: str, loaded: frozenset[str]
    ) -> Iterator[tuple[Variant, LatencyProfile]]:
        """Variants that a worker of this kind can run, the preferred one first."""
        for variant in self.variants:
            if variant.name in loaded and (profile := variant.profiles.get(hardware)) is not None:
                yield variant, profile


@dataclass(frozen=True, slots=True)
class Assigned:
    """A variant that a planner assigns to a worker.

    Attributes:
        variant: its name.
        batch_size: largest number of requests in a batch.
        load: planned requests per second; None if the plan does not say.
    """

    variant: str
    batch_size: int
    load: float | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """One accelerator or CPU slot.

    Attributes:
        hardware: key into `Variant.profiles`.
        loaded: names of the variants that it can run now.
        assigned: what the plan assigns to it; empty without a plan.
    """

    id: WorkerId
    hardware: str
    loaded: frozenset[str]
    assigned: tuple[Assigned, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.hardware, self.loaded


@dataclass(frozen=True, slots=True)
class DispatchDelay:
    """Time from a decision to the start of execution on an idle worker (Symphony App. D).

    `delay(b) = control_s + per_request_s * b`.
    """

    control_s: float = 0.0
    per_request_s: float = 0.0

    def __call__(self, batch_size: int) -> float:
        return self.control_s + self.per_request_s * batch_size


@dataclass(frozen=True)
class Cluster:
    """Models and workers by name, in a stable order (the order is the workers' rank).

    Attributes:
        preempt_delay_s: expected time from a `Preempt` until the worker is free, seconds.
    """

    models: Mapping[str, Model]
    workers: Mapping[WorkerId, Worker]
    delay: DispatchDelay = field(default_factory=DispatchDelay)
    preempt_delay_s: float = 0.0

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for model in self.models.values():
            for variant in model.variants:
                if (other := seen.setdefault(variant.name, model.name)) != model.name:
                    raise ValueError(
                        f"variant {variant.name!r} is named by models {other!r} and "
                        f"{model.name!r}; variant names are unique in a cluster"
                    )

    @classmethod
    def of(
        cls,
        models: Iterable[Model],
        workers: Iterable[Worker],
        delay: DispatchDelay | None = None,
        preempt_delay_s: float = 0.0,
    ) -> Cluster:
        """Build from lists."""
        return cls(
            {m.name: m for m in models},
            {w.id: w for w in workers},
            delay or DispatchDelay(),
            preempt_delay_s,
        )

    @classmethod
    def uniform(
        cls,
        models: Iterable[Model],
        num_workers: int,
        hardware: str = "default",
        delay: DispatchDelay | None = None,
    ) -> Cluster:
        """`num_workers` equal workers "w0", "w1", … with every variant loaded."""
        models = list(models)
        loaded = frozenset(v.name for m in models for v in m.variants)
        workers = [Worker(f"w{i}", hardware, loaded) for i in range(num_workers)]
        return cls.of(models, workers, delay)

    @cached_property
    def variants(self) -> Mapping[str, Variant]:
        """Every variant by name."""
        return {v.name: v for m in self.models.values() for v in m.variants}

    def profile(self, variant: str, worker: WorkerId) -> LatencyProfile:
        """Latency profile of `variant` on the hardware of `worker`."""
        return self.variants[variant].profiles[self.workers[worker].hardware]
