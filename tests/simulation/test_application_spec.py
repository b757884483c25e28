"""A simulated application as a document."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ray_slo.core.documents import read_yaml
from ray_slo.simulation.application_spec import ApplicationSpec

CONFIG = Path(__file__).parents[2] / "configs" / "simulate-application.yaml"
SPEC = """
workers:
  gpu: {max_replicas: 2, price_per_hour: 3, memory_mb: 900, group: left}
  cpu: {max_replicas: 1, group: right}
models:
  faces:
    latency_slo_ms: 300
    slo_classes: {gold: 150}
    items: 2
    variants:
      large: {accuracy: 90, profile: {alpha_ms: 10}, memory_mb: 500, factors: {eyes: 2}}
      small: {accuracy: 80, profiles: {cpu: {alpha_ms: 4}}, memory_mb: {cpu: 100}}
pipelines:
  photo:
    latency_slo_ms: 900
    tasks:
      detect: {accuracy: 88, profile: {alpha_ms: 15}, factors: {who: 2}}
      who: {parent: detect, model: faces}
      eyes: {parent: who, profile: {latency_ms: [5, 6]}}
groups: {faces: left, photo: left}
workloads: {faces: {arrivals: {kind: poisson, rate: 5}}}
objective: cost
budget_per_hour: 7
"""


def spec(**changes):
    return ApplicationSpec.model_validate(yaml.safe_load(SPEC) | changes)


def test_builds_the_problem():
    problem = spec().problem(Path())
    assert problem.streams == ("faces", "faces@gold", "photo")
    assert problem.slo_s("faces@gold") == 0.15
    photo = problem.tree_of("photo")
    assert [(t.name, t.model, t.parent) for t in photo.tasks] == [
        ("detect", "detect", None),
        ("who", "faces", "detect"),
        ("eyes", "eyes", "who"),
    ]
    assert photo["detect"].factor("detect", "who") == 2
    assert (photo["who"].factor("large", "eyes"), photo["who"].factor("small", "eyes")) == (2, 1)
    assert problem.model["faces"].items == 2
    large, small = problem.model["faces"].variants
    assert large.memory_mb == {"gpu": 500, "cpu": 500}
    assert (set(small.profiles), small.memory_mb) == ({"cpu"}, {"cpu": 100})
    assert problem.variant["eyes"].profiles["gpu"].table == [0.005, 0.006]
    gpu = problem.kind["gpu"]
    assert (gpu.min_workers, gpu.max_workers, gpu.price_per_hour, gpu.memory_mb) == (1, 2, 3, 900)
    assert problem.group_of == dict.fromkeys(("faces", "detect", "eyes"), "left")
    assert (problem.objective, problem.budget_per_hour) == ("cost", 7)


def test_the_policy_is_the_live_default():
    assert spec().policy.name == "auto"
    assert spec(pipelines={}, groups={}).policy.name == "auto"
    assert spec(policy={"name": "eager"}).policy.name == "eager"


PROFILE = {"alpha_ms": 5}


def one(**fields):
    """A model alone with these fields."""
    return {"pipelines": {}, "groups": {}, "models": {"m": {"latency_slo_ms": 100, **fields}}}


def two(**fields):
    """A pipeline whose second task is another model's, with these fields."""
    tasks = {"a": {"profile": PROFILE}, "b": {"parent": "a", "model": "m", **fields}}
    pipelines = {"p": {"latency_slo_ms": 900, "tasks": tasks}}
    return one(profile=PROFILE) | {"pipelines": pipelines}


def test_a_task_that_another_serves_has_factors_of_its_own():
    changes = two(factors={"c": 3})
    changes["pipelines"]["p"]["tasks"]["c"] = {"parent": "b", "profile": PROFILE}
    changes["workloads"] = {"p": {"arrivals": {"kind": "poisson", "rate": 5}}}
    tree = spec(**changes).problem(Path()).tree_of("p")
    assert tree["b"].factor("m", "c") == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (one(), "m: give either variants or a profile; neither is given"),
        (
            one(variants={"v": {"profile": PROFILE}}, profile=PROFILE),
            "m: give either variants or a profile; both are given",
        ),
        (one(variants={"v": {"profile": PROFILE}}, accuracy=90), "m.accuracy: every variant has"),
        (one(profile=PROFILE, factors={"x": 2}), "m.factors.x: no child .* these are none"),
        (two(factors={"a": 2}), "pipelines.p.tasks.b.factors.a: no child; its children are none"),
        (two(accuracy=90), "accuracy: the task is served by 'm'; say it there"),
        ({"models": {}, "pipelines": {}}, "must name what clients ask for"),
        ({"groups": {"who": "left"}}, "groups.who: no such model or pipeline"),
        (
            {"pipelines": {"faces": {"latency_slo_ms": 1, "tasks": {"a": {"model": "faces"}}}}},
            "pipelines.faces: a model has that name",
        ),
        (
            {"pipelines": {"p": {"latency_slo_ms": 1, "tasks": {"a": {"model": "b"}}}}},
            "pipelines.p.tasks.a.model: must be one of faces, got 'b'",
        ),
        (
            {"pipelines": {"p": {"latency_slo_ms": 1, "tasks": {"a": {}}}}},
            "a: give either variants or a profile",
        ),
        ({"planner": "loki"}, "planner"),
        (
            {"workloads": {"faces": {"arrivals": {"fces": {"kind": "poisson", "rate": 5}}}}},
            "workloads.faces.arrivals.fces: no such model",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(changes, message):
    with pytest.raises((ValueError, ValidationError), match=message):
        spec(**changes).problem(Path())


def test_a_message_names_the_place_of_the_mistake():
    unknown = {"memory_mb": {"tpu": 1, "xpu": 2}, "profile": PROFILE}
    for fields, place in (
        (unknown, "models.m.memory_mb.tpu"),
        ({"variants": {"v": unknown}}, "models.m.variants.v.memory_mb.tpu"),
    ):
        with pytest.raises(ValueError, match="no such kind of workers") as caught:
            spec(**one(**fields)).problem(Path())
        assert str(caught.value).startswith(f"{place}: ")


def kind(**fields):
    return {"workers": {"gpu": {"max_replicas": 2, **fields}, "cpu": {"max_replicas": 1}}}


@pytest.mark.parametrize(
    ("make", "field", "valid", "wrong"),
    [
        (lambda **v: one(profile=PROFILE, **v), "accuracy", (0, 100), (-0.1, 100.1)),
        (
            lambda **v: one(variants={"v": {"profile": PROFILE, **v}}),
            "accuracy",
            (0, 100),
            (-1, 101),
        ),
        (lambda **v: one(profile=PROFILE, **v), "memory_mb", (0,), (-1,)),
        (lambda **v: one(profile=PROFILE, **v), "items", (1, 1.5), (0.9,)),
        (kind, "min_replicas", (0, 1, 2), (-1, 3)),
        (kind, "max_replicas", (1, 100_000), (0, 100_001)),
        (kind, "price_per_hour", (0, 1e9), (-0.1, 1.01e9)),
        (kind, "memory_mb", (0.1,), (0,)),
        (kind, "interruptions_per_hour", (0, 3), (-1,)),
        (dict, "accuracy_floor", (0, 100), (-0.1, 100.1)),
        (dict, "budget_per_hour", (0, 9), (-1,)),
        (dict, "duration_s", (0.1,), (0, -1)),
        (dict, "interval_s", (0.1,), (0,)),
        (dict, "solve_s", (0,), (-1,)),
        (dict, "seed", (0,), (-1, 0.5)),
    ],
)
def test_bounds_of_numbers(make, field, valid, wrong):
    for value in valid:
        spec(**make(**{field: value}))
    for value in wrong:
        with pytest.raises(ValidationError, match=field):
            spec(**make(**{field: value}))


def test_what_is_left_out():
    found = spec(**one(profile=PROFILE), workers={"gpu": {"max_replicas": 2}})
    model = found.models["m"]
    assert (model.accuracy, model.memory_mb, model.items) == (100, 0, 1)
    gpu = found.workers["gpu"]
    assert (gpu.min_replicas, gpu.price_per_hour, gpu.interruptions_per_hour) == (1, 0, 0)
    assert found.interval_s == 10
    assert (found.solve_s, found.load_s, found.start_s, found.preempt_delay_s) == (0, 0, 0, 0)
    assert (found.latency_noise, found.seed, found.accuracy_floor) == (0, 0, 0)
    variant = spec(**one(variants={"v": {"profile": PROFILE}})).models["m"].variants["v"]
    assert (variant.accuracy, variant.memory_mb) == (100, 0)


@pytest.mark.slow
def test_runs():
    data = read_yaml(CONFIG) | {"duration_s": 5}
    report = ApplicationSpec.model_validate(data).run(CONFIG.parent)
    assert report.meta["streams"] == ["faces", "faces@gold", "photo"]
    assert report.bad_rate() < 0.1
