"""The planner `loki`: how many workers of a pipeline serve which variant (Loki §4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ray_slo.planning import auto
from ray_slo.serve.planner.auto import FOLLOWS, Auto
from ray_slo.serve.planner.plugin import arguments_of

if TYPE_CHECKING:
    from ray_slo.serve.config.app import AppConfig, PlannerConfig

# What is not Loki's.
_OURS = {"objective", "budget_per_hour", "sharing", "move_cost", "target_bad", "headroom"}


class Loki(Auto):
    """`auto` with Loki's settings."""

    Arguments = arguments_of(auto.Problem, without=FOLLOWS | _OURS | {"waiting_factor"})
    settings: ClassVar[Mapping[str, Any]] = {**Auto.settings, **auto.LOKI}
    default_policy = "pipeline"
    assigns = True
    chooses_groups = reads_classes = False
    reads_workers = frozenset()

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
        super().check(config, planner)
