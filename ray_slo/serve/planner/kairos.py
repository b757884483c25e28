"""The planners `kairos` and `kairos_plus`. They decide the number of workers of each instance type
within a budget (Kairos §5.2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ray_slo.core.demand import HEADROOM_QUANTILE
from ray_slo.papers.kairos.solver import Arguments, Sustained, mix
from ray_slo.planning.auto import Size
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.planning.catalogue import CATALOGUE
from ray_slo.policies.registry import POLICIES, make_policy
from ray_slo.serve.planner.auto import Auto

if TYPE_CHECKING:
    from ray_slo.core.policy import Policy
    from ray_slo.serve.config.app import AppConfig, PlannerConfig
    from ray_slo.serve.config.spec import AppSpec
    from ray_slo.serve.config.workers import WorkerConfig


class Kairos(Auto):
    """`auto` with Kairos' choice of workers."""

    simulates: ClassVar[bool] = False
    Arguments = Arguments
    settings: ClassVar[Mapping[str, Any]] = {
        "headroom": False,
        "headroom_quantile": HEADROOM_QUANTILE,
        "batch_sizes": (1,),
    }
    default_policy = "kairos"
    chooses_groups = False
    unused = frozenset({"memory_mb"})
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
        for kind, worker in config.kinds.items():
            if worker.rented is None:
                raise ValueError(
                    f"workers.{kind}.price_per_hour, or instance_type: required by the planner "
                    f"{name!r}: a price, or a name in the catalogue ({', '.join(CATALOGUE)})"
                )
        super().check(config, planner)
        given = cls.arguments(planner.kwargs)
        for model, served in config.models.items():
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
    def fields(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = Arguments(**given)
        own = {"budget_per_hour": arguments.budget_per_hour, "waiting_factor": 1 / arguments.xi}
        return {**cls.settings, **own}

    @classmethod
    def setting(cls, spec: AppSpec) -> AutoSetting:
        usual, planner = super().setting(spec), spec.planner
        assert planner is not None
        given = Arguments(**planner.kwargs)
        problem = usual.problem
        if given.sizes is not None:
            sizes = _sizes(given.sizes)
            models = tuple(replace(model, sizes=sizes) for model in problem.models)
            problem = replace(problem, models=models)
        simulated = None
        if cls.simulates and len(spec.models) == 1:
            policy = functools.partial(make_policy, spec.policy.name, spec.policy.kwargs)
            simulated = _sustained(policy, next(iter(spec.models)))
        return replace(
            usual,
            problem=problem,
            down_s={**dict.fromkeys(spec.workers, 0.0), **usual.down_s},
            idle_s=None,
            plan=functools.partial(
                mix, arguments=given, min_gain=planner.min_gain, sustained=simulated
            ),
            sized=frozenset(spec.models if len(spec.models) == 1 else ()),
            retuned=functools.partial(_retuned, cls, spec),
        )


class KairosPlus(Kairos):
    """The planner `kairos_plus`, which also simulates its candidates."""

    simulates = True


def _retuned(planner: type[Kairos], spec: AppSpec, kwargs: Mapping[str, Any]) -> AutoSetting:
    assert spec.planner is not None
    given = planner.arguments({**spec.planner.kwargs, **kwargs})
    changed = spec.planner.model_copy(update={"kwargs": given})
    return planner.setting(spec.model_copy(update={"planner": changed}))


def _sizes(weights: Mapping[int, float]) -> tuple[Size, ...]:
    total = sum(weights.values())
    return tuple(Size(size, size, weight / total) for size, weight in sorted(weights.items()))


def _sustained(policy: Callable[[], Policy], model: str) -> Sustained:
    # The import is late, because only few planners simulate.
    from ray_slo.simulation.sustained import sustained

    return functools.partial(sustained, policy, model)
