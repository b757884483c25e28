"""The planners `kairos` and `kairos_plus`. They decide the number of workers of each instance type
within a budget (Kairos §5.2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ray_slo.planning.brains.kairos import Arguments, KairosBrain, KairosSetting, Sustained
from ray_slo.planning.catalogue import CATALOGUE
from ray_slo.policies.registry import POLICIES, make_policy
from ray_slo.serve.planner.plugin import PlannerPlugin

if TYPE_CHECKING:
    from ray_slo.core.policy import Policy
    from ray_slo.serve.config.app import AppConfig, PlannerConfig
    from ray_slo.serve.config.spec import AppSpec
    from ray_slo.serve.config.workers import WorkerConfig


class Kairos(PlannerPlugin):
    simulates: ClassVar[bool] = False
    Arguments = Arguments
    default_policy = "kairos"
    assigns = False
    tunable = scales = True
    unused = frozenset({"memory_mb", "make_before_break"})
    reads_workers = frozenset({"price_per_hour"})

    @classmethod
    def check(cls, config: AppConfig, planner: PlannerConfig) -> None:
        name = planner.name
        if config.all_pipelines:
            raise ValueError(
                f"planner.name: {name!r} cannot plan a pipeline; choose 'loki' or 'auto'"
            )
        if config.groups:
            raise ValueError(
                f"groups: {name!r} plans `workers`; leave groups out, or choose the planner 'auto'"
            )
        own = config.policy.name
        if (
            isinstance(own, str)
            and own in POLICIES
            and own != cls.default_policy
            and not cls.simulates
        ):
            raise ValueError(
                f"policy: {name!r} plans only for its default policy ({cls.default_policy}), "
                f"got {own!r}; leave the policy out, or choose the planner 'auto'"
            )
        if len(config.models) > 1 or any(model.variants for model in config.models.values()):
            raise ValueError(
                f"models: {name!r} plans for one model without variants; choose 'auto'"
            )
        for kind, worker in config.kinds.items():
            if worker.rented is None:
                raise ValueError(
                    f"workers.{kind}.price_per_hour, or instance_type: required by the planner "
                    f"{name!r}: a price, or a name in the catalogue ({', '.join(CATALOGUE)})"
                )
        for model, rate in planner.rates.items():
            if model not in config.models or not 0 < rate < math.inf:
                raise ValueError(
                    f"planner.rates.{model}: must be a positive rate of the model "
                    f"{', '.join(config.models)}, got {rate}"
                )
        given = cls.arguments(planner.kwargs)
        ((model, served),) = config.models.items()
        if (sizes := given.get("sizes")) and max(sizes) > served.max_batch_size:
            raise ValueError(
                f"planner.kwargs.sizes: {max(sizes)} is more than max_batch_size of the model "
                f"{model!r}, {served.max_batch_size}"
            )
        if (base := given.get("base")) is not None and base not in config.kinds:
            raise ValueError(
                f"planner.kwargs.base must be one of the workers, {', '.join(config.kinds)}, "
                f"got {base!r}"
            )

    @classmethod
    def replica_bounds(cls, worker: WorkerConfig, planner: PlannerConfig) -> tuple[int, int] | None:
        assert worker.rented is not None
        paid = planner.kwargs["budget_per_hour"] / worker.rented.price_per_hour
        most = worker.most_replicas or max(worker.first_replicas, math.floor(paid + 1e-9))
        return worker.given_least or 0, most

    @classmethod
    def brain(cls, spec: AppSpec) -> KairosBrain:
        return KairosBrain(cls.setting(spec))

    @classmethod
    def setting(cls, spec: AppSpec) -> KairosSetting:
        planner = spec.planner
        assert planner is not None
        ((name, model),) = spec.models.items()
        policy = functools.partial(make_policy, spec.policy.name, spec.policy.kwargs)
        return KairosSetting(
            name,
            tuple(spec.variants()),
            max(model.latency_slo_ms - spec.response_margin_ms, 1.0) / 1e3,
            {
                kind: worker.instance_type.model_copy(update={"name": kind})
                for kind, worker in spec.workers.items()
                if worker.instance_type is not None
            },
            {kind: b[1] for kind, w in spec.workers.items() if (b := w.replica_bounds)},
            planner.kwargs,
            planner.rates.get(name, 1.0),
            planner.demand,
            planner.min_gain,
            _sustained(policy, name) if cls.simulates else None,
        )


class KairosPlus(Kairos):
    """The planner `kairos_plus`, which also simulates its candidates."""

    simulates = True


def _sustained(policy: Callable[[], Policy], model: str) -> Sustained:
    # The import is late, because only few planners simulate.
    from ray_slo.simulation.sustained import sustained

    return functools.partial(sustained, policy, model)
