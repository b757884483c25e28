"""The planner `loki`: how many workers of a pipeline serve which variant (Loki §4)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ray_slo.core import LatencyProfile
from ray_slo.core.demand import HEADROOM_QUANTILE
from ray_slo.core.names import nearest
from ray_slo.planning import loki
from ray_slo.planning.brains.loki import LokiBrain, LokiSetting
from ray_slo.serve.config.files import profiles_of_files
from ray_slo.serve.planner.plugin import PlannerPlugin, arguments_of

if TYPE_CHECKING:
    from ray_slo.serve.config.app import AppConfig, PlannerConfig
    from ray_slo.serve.config.spec import AppSpec
    from ray_slo.serve.config.workers import WorkerConfig

_MEASURED = {"tasks", "demand", "workers", "slo_s", "path_accuracies", "current"}
_FIXED = {"waiting_factor"}  # for comparisons

# A live plan has room for Poisson arrivals, and does not reload networks for nothing.
_LIVE = {"headroom_quantile": HEADROOM_QUANTILE, "swap_cost": 0.1}


class Loki(PlannerPlugin):
    Arguments = arguments_of(loki.Problem, without=_MEASURED | _FIXED)
    default_policy = "pipeline"
    scales = True
    unused = frozenset({"memory_mb", "min_gain"})

    @classmethod
    def check(cls, config: AppConfig, planner: PlannerConfig) -> None:
        pipeline, kinds = config.lone_pipeline, config.kinds
        if not config.all_pipelines:
            raise ValueError(
                "planner.name: 'loki' plans a pipeline, and there is none; "
                "choose 'auto', which plans any application"
            )
        if pipeline is None:
            raise ValueError(
                "planner.name: 'loki' plans one pipeline and nothing else, and each task must have "
                f"its own code; there are {', '.join(config.roots)}; choose 'auto'"
            )
        if config.groups:
            raise ValueError(
                "groups: 'loki' plans `workers`; leave groups out, or choose the planner 'auto'"
            )
        if len(kinds) > 1:
            raise ValueError(
                f"workers: the planner 'loki' plans for one kind of worker, but there are "
                f"{', '.join(kinds)}; name one kind, or choose 'auto'"
            )
        if none := [kind for kind, worker in kinds.items() if worker.least_replicas < 1]:
            raise ValueError(
                f"workers.{none[0]}.min_replicas must be at least 1 with the "
                "planner 'loki', got 0; only the planner 'auto' allows 0"
            )
        for task, rate in planner.rates.items():
            if task != pipeline.root:
                raise ValueError(
                    f"planner.rates.{task}: only the root task, {pipeline.root!r}, can have a rate"
                    f"{nearest(task, [pipeline.root])}"
                )
            if not 0 < rate < math.inf:
                raise ValueError(f"planner.rates.{task} must be positive, got {rate}")
        slo_s = pipeline.latency_slo_ms / 1e3
        try:  # only the arguments are checked, so any profile will do
            loki.Problem(
                pipeline.loki_tasks(lambda _: LatencyProfile([slo_s])),
                demand=1.0,
                workers=sum(w.most_replicas or w.first_replicas for w in kinds.values()),
                slo_s=slo_s,
                path_accuracies=pipeline.measured_paths,
                **cls.arguments(planner.kwargs),
            )
        except TypeError as error:
            raise ValueError(f"planner.kwargs: {error}") from None
        except ValueError as error:
            said = str(error)
            raise ValueError(
                said if said.startswith("planner.kwargs") else f"planner.kwargs: {said}"
            ) from None

    @classmethod
    def replica_bounds(cls, worker: WorkerConfig, planner: PlannerConfig) -> tuple[int, int] | None:
        most = worker.most_replicas
        return None if most is None else (worker.least_replicas, most)

    @classmethod
    def brain(cls, spec: AppSpec) -> LokiBrain:
        return LokiBrain(cls.setting(spec))

    @classmethod
    def setting(cls, spec: AppSpec) -> LokiSetting:
        ((_, pipeline),) = spec.pipelines.items()
        planner = spec.planner
        assert planner is not None
        kind, worker = next(iter(spec.workers.items()))
        slo_s = max(pipeline.latency_slo_ms - spec.response_margin_ms, 1.0) / 1e3
        problem = loki.Problem(
            pipeline.loki_tasks(lambda _: LatencyProfile([slo_s])),
            planner.rates.get(pipeline.root, 1.0),
            worker.most_replicas,
            slo_s,
            path_accuracies=pipeline.measured_paths,
            **{**_LIVE, **planner.kwargs},
        )
        return LokiSetting(
            problem,
            kind,
            worker.num_replicas,
            worker.replica_bounds is not None,
            planner.interval_s,
            planner.demand,
            planner.make_before_break,
            profiles_of_files(spec),
        )
