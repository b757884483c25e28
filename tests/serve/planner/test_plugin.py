"""A planner is a class: the config knows it by name or by its path, and asks it for its rules."""

import pytest
from pydantic import BaseModel, ConfigDict

from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.loki import Loki
from ray_slo.serve.planner.plugin import (
    PLANNERS,
    PlannerPlugin,
    make_brain,
    planner_class,
    planners_of_workers,
)


class Model:
    def __call__(self, items):
        return items


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")

    spare: int = 1


class Steady(PlannerPlugin):
    """Wants as many workers as the config says, and some to spare."""

    Arguments = Arguments
    default_policy = "eager"
    tunable = True
    interval_s = 3.0
    unused = frozenset({"memory_mb"})

    @classmethod
    def check(cls, config, planner):
        if len(config.models) > 1:
            raise ValueError("models: 'steady' plans for one model")

    @classmethod
    def replica_bounds(cls, worker, planner):
        return worker.first_replicas, worker.first_replicas + planner.kwargs.get("spare", 1)

    @classmethod
    def brain(cls, spec):
        return cls, spec.planner.kwargs


STEADY = "tests.serve.planner.test_plugin:Steady"
MODEL = {"callable": Model, "latency_slo_ms": 100}


def app(models=("m",), **planner):
    return {"models": dict.fromkeys(models, MODEL), "planner": {"name": STEADY, **planner}}


def test_a_planner_of_ones_own_goes_all_the_way():
    spec = parse_spec(app(kwargs={"spare": 2}))
    assert spec.planned and not spec.grouped
    assert spec.workers["default"].replica_bounds == (1, 3)
    assert (spec.policy.name, spec.planner.interval_s, spec.planner.tunable) == ("eager", 3.0, True)
    planner, kwargs = make_brain(spec)
    assert planner.__name__ == "Steady"
    assert kwargs == {"spare": 2}
    assert parse_spec({**app(), "policy": "deferred"}).policy.name == "deferred"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (app(models=("a", "b")), "models: 'steady' plans for one model"),
        (app(kwargs={"spares": 2}), "planner.kwargs.spares: unknown key .did you mean 'spare'"),
        (app(kwargs={"spare": "x"}), "planner.kwargs.spare: must be a whole number, got 'x'"),
        (app(memory_mb={"m": 1}), "memory_mb: not for the planner"),
        ({**app(), "planner": "lokki"}, "planner: must be one of herd, .*did you mean 'loki'"),
        (
            {**app(), "planner": "tests.serve.planner.test_plugin:Model"},
            "which is no PlannerPlugin",
        ),
        ({**app(), "planner": "no.such:Planner"}, "no.such"),
    ],
)
def test_mistakes_are_named(given, says):
    with pytest.raises(ValueError, match=says):
        parse_spec(given)


@pytest.mark.parametrize("name", PLANNERS)
def test_those_of_ours_can_be_imported(name):
    planner = planner_class(name)
    assert issubclass(planner, PlannerPlugin)
    assert issubclass(planner.Arguments, BaseModel)


def test_a_name_stands_for_a_class():
    assert planner_class("loki") is Loki
    assert Loki.default_policy == "pipeline"


def test_planners_of_workers_are_those_that_make_no_groups():
    assert planners_of_workers() == "loki, kairos, kairos_plus or auto"
