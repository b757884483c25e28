"""The planner `auto` in a config: when it is the default, its arguments, its brain's input."""

import math

import pytest

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.planning.auto import Demand, Kind
from ray_slo.planning.brains.brain import Seen, WorkerSays
from ray_slo.serve.app.build import build_app
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.auto import Auto
from ray_slo.serve.planner.autoscaling import autoscaling
from ray_slo.serve.planner.plugin import make_brain


class Plain:
    def __call__(self, items):
        return items


class Chosen:
    def __call__(self, network, items):
        return items


VARIANTS = {name: {"load": "apps:Network", "accuracy": 70 + i} for i, name in enumerate("vw")}
MODEL = {"callable": Plain, "latency_slo_ms": 100}
MANY = {"callable": Chosen, "latency_slo_ms": 100, "variants": VARIANTS}
SCALES = {"w": {"max_replicas": 4}}
PIPELINE = {
    "latency_slo_ms": 400,
    "tasks": {"find": {"callable": Plain}, "read": {"callable": Plain, "parent": "find"}},
}


def spec_of(**fields):
    return parse_spec({"models": {"m": MODEL}, "workers": SCALES, **fields})


def setting_of(**fields):
    return Auto.setting(spec_of(**fields))


def test_it_plans_whatever_scales_and_pipelines():
    assert spec_of().planner.name == "auto"
    assert spec_of(workers={"w": {}}).planner is None
    assert spec_of(models={"m": MODEL, "n": MANY}).planner.name == "auto"
    alone = {"models": {}, "pipelines": {"p": PIPELINE}}
    assert spec_of(**alone).planner.name == "auto"
    assert spec_of(**alone, workers={"w": {}}).planner.name == "auto"
    two = {"a": {"max_replicas": 2}, "b": {"max_replicas": 2}}
    assert spec_of(**alone, workers=two).planner.name == "auto"
    none = {"a": {"min_replicas": 0, "max_replicas": 2}}
    assert spec_of(**alone, workers=none).planner.name == "auto"
    assert spec_of(pipelines={"p": PIPELINE}, workers={"w": {}}).planner.name == "auto"


def test_the_decorator_scales():
    @ray_slo.deployment(latency_slo_ms=100, min_replicas=1, max_replicas=8)
    class Model(Plain):
        pass

    spec = Model._spec((), {})
    assert (spec.planner.name, spec.policy.name) == ("auto", "auto")
    assert spec.workers["default"].replica_bounds == (1, 8)
    other = Model.options(planner={"name": "auto", "kwargs": {"target_bad": 0.02}})._spec((), {})
    assert other.planner.kwargs == {"target_bad": 0.02}
    fixed = Model.options(min_replicas=None, max_replicas=None, num_replicas=2)._spec((), {})
    assert fixed.planner is None
    auto = Model.options(min_replicas=None, max_replicas=None, num_replicas="auto")._spec((), {})
    assert (auto.workers["default"].num_replicas, auto.workers["default"].replica_bounds) == (
        1,
        (1, 100),
    )


def test_what_its_brain_is_told(tmp_path):
    path = tmp_path / "profiles.json"
    save_profiles(path, {"m": LatencyProfile([0.1])})
    setting = setting_of(
        models={"m": {**MODEL, "profile": str(path), "slo_classes": {"gold": 50}}, "n": MANY},
        pipelines={"p": PIPELINE},
        workers={
            "cpu": {"num_replicas": 2},
            "gpu": {
                "price_per_hour": 2.5,
                "memory_mb": 8000,
                "autoscaling_config": {
                    "min_replicas": 0,
                    "max_replicas": 3,
                    "upscale_delay_s": 4,
                    "downscale_delay_s": 30,
                },
            },
        },
        planner={"name": "auto", "rates": {"p": 7.0, "m@gold": 2.0}, "interval_s": 5},
    )
    problem = setting.problem
    assert [model.name for model in problem.models] == ["m", "n", "find", "read"]
    assert [v.accuracy for v in problem.model["n"].variants] == [70, 71]
    assert problem.trees[0].slos_s == pytest.approx({"": 0.095, "gold": 0.045})
    assert [tree.name for tree in problem.trees] == ["m", "n", "p"]
    assert problem.demand == {
        "m": Demand(1.0),
        "m@gold": Demand(2.0),
        "n": Demand(1.0),
        "p": Demand(7.0),
    }
    cpu, gpu = problem.kinds
    assert cpu == Kind("cpu", 2, 2, 0.0, math.inf)
    assert gpu == Kind("gpu", 0, 3, 2.5, 8000.0)
    assert setting.first_workers == {"cpu": 2, "gpu": 1}
    assert setting.scales == {"gpu"}
    assert (setting.up_s["gpu"], setting.down_s, setting.idle_s) == (4, {"gpu": 30}, None)
    assert not setting.choosing  # the default policy with pipelines does not choose variants
    assert setting.profiles.keys() == {("m", "cpu"), ("m", "gpu")}
    assert setting.interval_s == 5


def test_no_worker_is_needed_only_where_none_of_any_kind_is():
    none = {"min_replicas": 0, "max_replicas": 2}
    assert setting_of(workers={"a": none}).idle_s == 60.0
    assert setting_of(workers={"a": none, "b": {"max_replicas": 2}}).idle_s is None
    soon = {"autoscaling_config": {**none, "downscale_to_zero_delay_s": 20}}
    assert setting_of(workers={"a": soon}).idle_s == 20
    at_once = {"autoscaling_config": {**none, "downscale_to_zero_delay_s": 0}}
    assert setting_of(workers={"a": at_once}).idle_s == 2  # until every frontend has reported


def test_policies_that_do_not_choose_variants_go_by_its_assignments():
    assert setting_of(models={"m": MANY}).choosing
    assert setting_of(models={"m": MODEL}, policy="flex").choosing
    lone = {"models": {}, "pipelines": {"p": PIPELINE}}
    assert not setting_of(**lone, policy="pipeline").choosing  # it makes routes from assignments


def test_serve_follows_it_at_once_as_it_waits_itself():
    config = autoscaling(spec_of(workers={"w": {"min_replicas": 0, "max_replicas": 4}}), "w")
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)


def test_its_brain_is_made():
    brain = make_brain(spec_of())
    assert brain.target("w") is None
    assert brain.tune({"budget_per_hour": 2.0})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"planner": {"name": "auto", "kwargs": {"budget": 1}}}, "kwargs.budget: unknown key"),
        (
            {"planner": {"name": "auto", "kwargs": {"budget_per_hour": 1.0}}},
            "workers.w.price_per_hour, or instance_type: required",
        ),
        (
            {"planner": {"name": "auto", "kwargs": {"accuracy_floor": 101}}},
            "planner.kwargs.accuracy_floor",
        ),
        (
            {"planner": {"name": "auto", "kwargs": {"batch_sizes": [0]}}},
            "planner.kwargs.batch_sizes must be at least 1",
        ),
        (
            {"planner": {"name": "auto", "rates": {"n": 1}}},
            "planner.rates: 'n' is not a model or pipeline; there are m",
        ),
        ({"planner": {"name": "auto", "rates": {"m@gold": 1}}}, "planner.rates: 'm@gold'"),
        ({"planner": {"name": "auto", "rates": {"m": 0}}}, "planner.rates.m must be positive"),
        ({"planner": {"name": "auto", "min_gain": 0.2}}, "min_gain: not for the planner 'auto'"),
    ],
)
def test_mistakes_are_named(fields, says):
    with pytest.raises(ValueError, match=says):
        spec_of(**fields)


# -- groups ------------------------------------------------------------------------------------


class Sized(Plain):
    @staticmethod
    def size(item):
        return len(item)


GROUPS = {"one": {"workers": {"cpu": {"max_replicas": 2}}}, "two": {"workers": {"gpu": {}}}}


def test_models_that_no_group_lists_are_placed():
    models = {"m": MODEL, "n": MODEL, "o": MODEL}
    groups = {**GROUPS, "one": {**GROUPS["one"], "models": ["m"]}}
    spec = parse_spec({"models": models, "groups": groups})
    assert (spec.planner.name, spec.homes, spec.unlisted) == ("auto", {"m": "one"}, {"n", "o"})
    problem = Auto.setting(spec).problem
    assert problem.group_of == {"m": "one"}
    assert problem.allowed_groups == {"n": ("one", "two"), "o": ("one", "two")}
    assert {kind.name: kind.group for kind in problem.kinds} == {"one-cpu": "one", "two-gpu": "two"}
    brain = make_brain(spec)
    assert brain.routing.routes == {"m": "one"} and not brain.routing.complete
    fixed = {name: {"workers": {"cpu": {}}} for name in ("one", "two")}
    assert parse_spec({"models": models, "groups": fixed}).planner.name == "auto"
    fixed["one"]["models"] = list(models)
    assert parse_spec({"models": models, "groups": fixed}).planner is None


def test_a_pipeline_goes_where_one_of_its_tasks_is_listed():
    groups = {**GROUPS, "one": {**GROUPS["one"], "models": ["find"]}}
    fields = {"models": {"m": MODEL}, "pipelines": {"p": PIPELINE}, "groups": groups}
    spec = parse_spec(fields)
    assert (spec.homes, spec.unlisted) == ({"find": "one", "read": "one"}, {"m"})
    shared = {**PIPELINE, "tasks": {**PIPELINE["tasks"], "m": {"model": "m", "parent": "find"}}}
    shared["tasks"] = {k if k != "m" else "who": v for k, v in shared["tasks"].items()}
    spec = parse_spec({**fields, "pipelines": {"p": shared}})
    assert spec.homes == {"find": "one", "read": "one", "m": "one"}
    two = {**groups, "two": {**GROUPS["two"], "models": ["m"]}}
    with pytest.raises(ValueError, match=r"pipelines.p: its tasks are in the groups one, two"):
        parse_spec({**fields, "pipelines": {"p": shared}, "groups": two})


def test_a_group_whose_policy_cannot_serve_a_model_does_not_get_it():
    groups = {**GROUPS, "two": {**GROUPS["two"], "policy": "ramsis"}}
    args = {"models": {"m": {**MODEL, "callable": Sized}, "n": MODEL}, "groups": groups}
    assert build_app(args)
    spec = parse_spec(args).model_copy(update={"sized": frozenset({"m"})})
    allowed = Auto.setting(spec).problem.allowed_groups
    assert allowed == {"m": ("one",), "n": ("one", "two")}
    both = {name: {**group, "policy": "ramsis"} for name, group in GROUPS.items()}
    with pytest.raises(ValueError, match=r"models.m.callable: Sized.size: policy 'ramsis' counts"):
        build_app({**args, "groups": both})


def test_without_a_planner_every_model_is_listed():
    args = {"models": {"m": MODEL}, "groups": {"one": {}}, "planner": None}
    with pytest.raises(ValueError, match=r"no group lists 'm'.* or choose the planner 'auto'"):
        parse_spec(args)


# -- spot workers ------------------------------------------------------------------------------

SPOT = {"max_replicas": 4, "price_per_hour": 0.2, "interruptions_per_hour": 2.0}


def test_a_kind_of_worker_may_be_taken_away():
    firm = {"max_replicas": 4, "price_per_hour": 0.5}
    spec = spec_of(workers={"firm": firm, "spot": SPOT})
    kinds = Auto.setting(spec).problem.kind
    assert (kinds["firm"].there, kinds["spot"].there) == (1.0, pytest.approx(1 / 1.1))
    brain = make_brain(spec)
    profile = {("m", kind): LatencyProfile([0.01]) for kind in kinds}
    workers = {k: WorkerSays(k, k, frozenset({"m"}), ready_s=36.0) for k in kinds}
    there = Seen(workers, profile)
    brain.due(0.0, there)
    asked = brain.problem(0.0, there).whole.kind
    assert asked["spot"].there == pytest.approx(1 / 1.02)  # it takes 36 s to replace one


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {
                "workers": {"w": SPOT},
                "planner": {"name": "kairos", "kwargs": {"budget_per_hour": 1.0}},
            },
            "workers.w.interruptions_per_hour: no planner reads it here; leave it out, or choose",
        ),
        (
            {"workers": {"w": {**SPOT, "max_replicas": None}}, "planner": None},
            r"price_per_hour: no planner reads it here",
        ),
        (
            {"workers": {"w": {**SPOT, "interruptions_per_hour": 0}}},
            "workers.w.interruptions_per_hour",
        ),
    ],
)
def test_spot_workers_that_nobody_plans_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        spec_of(**fields)
