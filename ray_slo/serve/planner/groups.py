"""The planners `herd` and `partition`. They decide which models and workers form a serving group
(SHEPHERD §4, Symphony §4.4)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, create_model

from ray_slo.core.names import nearest
from ray_slo.core.text import quoted
from ray_slo.core.trees import stream_of
from ray_slo.papers import herd, partition
from ray_slo.papers.groups import plans as group_plans
from ray_slo.papers.groups.brain import GroupsBrain, GroupsSetting
from ray_slo.papers.groups.jobs import Goodput
from ray_slo.serve.config.files import profiles_of_files
from ray_slo.serve.planner.plugin import PlannerPlugin, arguments_of

if TYPE_CHECKING:
    from ray_slo.serve.config.app import AppConfig, PlannerConfig
    from ray_slo.serve.config.spec import AppSpec


class Groups(PlannerPlugin):
    """The groups that the config lists. It is the base of the planners of groups."""

    makes_groups = True
    assigns = False
    interval_s = 60.0
    unused = frozenset({"demand", "make_before_break"})

    @classmethod
    def check(cls, config: AppConfig, planner: PlannerConfig) -> None:
        models, kinds = config.models, config.kinds
        if config.all_pipelines:
            raise ValueError(
                f"planner.name: {planner.name!r} plans models, and cannot plan a pipeline; "
                "choose 'loki' or 'auto'"
            )
        streams = [stream_of(m, c) for m, said in models.items() for c in ("", *said.slo_classes)]
        _check_numbers("planner.rates", planner.rates, streams)
        _check_numbers("planner.memory_mb", planner.memory_mb, models)
        if not config.groups and len(kinds) > 1:
            raise ValueError(
                f"workers: a planner makes groups of one kind of worker, but there are "
                f"{', '.join(kinds)}; name one kind, or name groups"
            )
        room = planner.kwargs.get("memory_mb", math.inf)
        if not isinstance(room, int | float) or math.isnan(room):
            raise ValueError(
                f"planner.kwargs.memory_mb must be a number of megabytes, got {quoted(room)}"
            )
        kwargs = cls.arguments(planner.kwargs)
        cls._check_groups(config, planner)
        parts = kwargs.get("sub_clusters")
        names = list(config.groups) or ["g"] * int(parts or 1)
        alike = group_plans.Measured(dict.fromkeys(models, 1.0), dict.fromkeys(models, 1.0))
        for field in ("dynamic_mb", "change_cost"):
            _check_numbers(f"planner.kwargs.{field}", kwargs.get(field, {}), models)
        try:
            group_plans.make_problem(planner.name, kwargs, alike, planner.memory_mb, 1, names, {})
        except (ValueError, TypeError) as error:
            raise ValueError(f"planner.kwargs: {error}") from None

    @classmethod
    def _check_groups(cls, config: AppConfig, planner: PlannerConfig) -> None:
        """Check that the groups fit this planner."""

    @classmethod
    def brain(cls, spec: AppSpec) -> GroupsBrain:
        return GroupsBrain(cls.setting(spec))

    @classmethod
    def setting(cls, spec: AppSpec) -> GroupsSetting:
        variants: dict[str, tuple[str, ...]] = dict.fromkeys(spec.models, ())
        slos_s: dict[str, float] = {}
        for name, model in spec.models.items():
            slos_s |= {name: model.latency_slo_ms / 1e3}
            if tree := spec.trees.get(name):
                slos_s |= dict(tree.streams())
        for key, ref in spec.variants().items():
            variants[ref.model] += (key,)
        homes = {kind: w.group for kind, w in spec.workers.items() if w.group is not None}
        plain = GroupsSetting(
            variants,
            slos_s,
            sum(worker.num_replicas for worker in spec.workers.values()),
            {name: tuple(group.models) for name, group in spec.groups.items()},
            homes,
            refused=_refused(spec),
        )
        if (planner := spec.planner) is None:
            return plain
        return replace(
            plain,
            planner=planner.name,
            kwargs=planner.kwargs,
            rates=planner.rates,
            memory_mb=planner.memory_mb,
            min_gain=planner.min_gain,
            profiles=profiles_of_files(spec),
            goodput=_goodput(spec) if planner.name == "herd" else None,
        )


def _check_numbers(field: str, given: Mapping[str, float], valid: Iterable[str]) -> None:
    """Check that numbers are for known names and at least 0.

    Raises:
        ValueError: one is not.
    """
    for name, value in given.items():
        if name not in valid:
            what = "stream" if "@" in name else "model"
            raise ValueError(
                f"{field}: no {what} {name!r}; the {what}s are {', '.join(sorted(valid))}"
                f"{nearest(name, list(valid))}"
            )
        if not 0 <= value < math.inf:
            raise ValueError(f"{field}.{name} must be at least 0 and finite, got {value}")


def _goodput(spec: AppSpec) -> Goodput:
    """Return a function that simulates the application's policy on one worker."""
    # The import is late, because only few planners simulate.
    from ray_slo.simulation.sustained import of_one_worker

    accuracies = {key: ref.accuracy for key, ref in spec.variants().items()}
    return functools.partial(of_one_worker, spec.policy.name, spec.policy.kwargs, accuracies)


def _refused(spec: AppSpec) -> dict[tuple[str, str], str]:
    """Return the reasons why the policy of a group cannot serve a model, by (model, group)."""
    refused = {
        (name, group): why
        for group in spec.groups
        for name in spec.models
        if (why := spec.policy_of(group).refusal(name in spec.sized))
    }
    homes = spec.homes
    for root, tree in spec.trees.items():
        if len(tree.models) > 1:
            for name in tree.models:
                for group in spec.groups.keys() - {homes.get(name)}:
                    refused[name, group] = f"it serves {root!r}, whose tasks stay together"
    return refused


class Herd(Groups):
    """The planner `herd`. It chooses the groups and their sizes for the largest burst tolerance."""

    reads_classes = True
    Arguments = create_model(
        "Arguments",
        __base__=arguments_of(herd.Problem, without={"models", "workers"}),
        max_affinity=(Annotated[float, Field(ge=1)], math.inf),
    )

    @classmethod
    def _check_groups(cls, config: AppConfig, planner: PlannerConfig) -> None:
        if config.groups:
            raise ValueError(
                "planner.name: 'herd' decides how many workers a group has; leave groups out and "
                "name the workers, or choose 'partition'"
            )
        if "memory_mb" not in planner.kwargs and planner.memory_mb:
            raise ValueError(
                "planner.kwargs.memory_mb: required if models have memory_mb; give a worker's "
                "memory in megabytes"
            )
        room = planner.kwargs.get("memory_mb", math.inf)
        for model, memory_mb in planner.memory_mb.items():
            if memory_mb > room:
                raise ValueError(
                    f"planner.memory_mb.{model} is {memory_mb:g}, more than a worker has "
                    f"(planner.kwargs.memory_mb is {room:g})"
                )


class Partition(Groups):
    """The planner `partition`. It balances the loads of a fixed number of groups."""

    reads_classes = True
    Arguments = create_model(
        "Arguments",
        __base__=arguments_of(partition.Problem, without={"models", "current", "change_cost"}),
        dynamic_mb=(dict[str, float], Field(default_factory=dict)),
        change_cost=(dict[str, float], Field(default_factory=dict)),
    )

    @classmethod
    def _check_groups(cls, config: AppConfig, planner: PlannerConfig) -> None:
        parts = planner.kwargs.get("sub_clusters")
        if config.groups and parts not in (None, len(config.groups)):
            raise ValueError(
                f"planner.kwargs.sub_clusters is {parts}, but there are {len(config.groups)} "
                "groups; leave it out"
            )
        most = sum(worker.first_replicas for worker in config.kinds.values())
        if not config.groups and (not isinstance(parts, int) or not 1 <= parts <= most):
            raise ValueError(
                f"planner.kwargs.sub_clusters: must be the number of groups that 'partition' "
                f"makes, from 1 to {most} (the number of workers), got {quoted(parts)}"
            )
