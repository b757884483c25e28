"""Groups with a policy of their own."""

import asyncio

import pytest

from ray_slo.planning.brains.brain import NotYet, Seen
from ray_slo.policies.price import Price
from ray_slo.serve.app.build import build_app
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.auto import Auto
from ray_slo.serve.planner.plugin import make_brain
from ray_slo.serve.worker.models import Models

DEEP = {"load": "tests.serve.config.test_spec:load", "accuracy": 80}
PLAIN = {"callable": "tests.serve.config.test_spec:Model", "latency_slo_ms": 100}
PLAIN_TASK = {"callable": PLAIN["callable"]}
CHOOSES = {
    "callable": "tests.serve.config.test_spec:Chooses",
    "latency_slo_ms": 100,
    "variants": {"deep": DEEP, "flat": {**DEEP, "accuracy": 70}},
}


class Own(Price):
    serves_tasks = True


class Sized:
    """A model whose requests have sizes."""

    @staticmethod
    def size(item):
        return len(item)

    def __call__(self, items):
        return items


SIZED = {"callable": Sized, "latency_slo_ms": 100}


def app(models, groups, **rest):
    return {"models": models, "groups": groups, **rest}


def two_groups(a=None, b=None, **rest):
    """The plain model in a, the one with variants in b."""
    groups = {
        "a": {"models": ["plain"], **({"policy": a} if a else {})},
        "b": {"models": ["chooses"], **({"policy": b} if b else {})},
    }
    return app({"plain": PLAIN, "chooses": CHOOSES}, groups, **rest)


def names(spec):
    return {group: spec.policy_of(group).name for group in spec.groups}


def test_a_group_has_a_policy_of_its_own_or_that_of_the_application():
    spec = parse_spec(two_groups("flex", {"name": "price"}))
    assert names(spec) == {"a": "flex", "b": "price"}
    assert spec.policy_of("a").preempts and not spec.policy_of("b").preempts
    assert spec.in_group("a").policy.name == "flex"
    assert spec.in_group("a").fingerprint == spec.fingerprint
    spec = parse_spec(two_groups("eager", policy={"name": "ramsis", "kwargs": {"headroom": 1.2}}))
    assert names(spec) == {"a": "eager", "b": "ramsis"}
    assert spec.policy_of("b").kwargs == {"headroom": 1.2}
    assert spec.policy_of(None).name == "ramsis"


def test_the_default_policy_is_one_whatever_a_group_serves():
    spec = parse_spec(two_groups({"name": None}, {"name": None}))
    assert names(spec) == {"a": "auto", "b": "auto"}
    assert names(parse_spec(two_groups("flex"))) == {"a": "flex", "b": "auto"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (two_groups(a="nonsense"), "groups.a.policy: policy 'nonsense' is unknown"),
        (two_groups(a={"name": "eager", "kwargs": {"x": 1}}), "groups.a.policy: policy 'eager'"),
        (two_groups(a={"nam": "eager"}), "groups.a.policy"),
        (two_groups("eager", "price", policy="flex"), "policy: every group names one of its own"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_the_group(config, said):
    with pytest.raises(ValueError, match=said):
        parse_spec(config)


def sized(a, b, **rest):
    groups = {
        "a": {"models": ["sized"], "policy": a},
        "b": {"models": ["plain"], "policy": b},
    }
    return app({"sized": SIZED, "plain": PLAIN}, groups, **rest)


def test_only_the_group_of_a_sized_model_needs_a_policy_for_sizes():
    assert build_app(sized("kairos", "ramsis"))
    with pytest.raises(ValueError, match=r"Sized\.size: policy 'ramsis' counts requests"):
        build_app(sized("ramsis", "kairos"))
    # A planner may move it.
    with pytest.raises(ValueError, match=r"Sized\.size: policy 'ramsis' counts requests"):
        build_app(sized("kairos", "ramsis", planner="partition"))


def test_nobody_moves_a_model_to_a_group_whose_policy_cannot_serve_it():
    spec = parse_spec(sized("kairos", "ramsis")).model_copy(update={"sized": frozenset({"sized"})})
    brain = make_brain(spec)
    with pytest.raises(NotYet):  # allowed, but nothing is laid out yet
        brain.move("plain", "a")
    brain.begin(0.0, Seen({}))
    with pytest.raises(ValueError, match="'sized' cannot be in 'b': policy 'ramsis' counts"):
        brain.move("sized", "b")
    assert brain.move("plain", "a") == "plain was moved to a by hand"


def test_the_tasks_of_a_pipeline_stay_in_one_group():
    tasks = {"find": PLAIN_TASK, "read": {"model": "plain", "parent": "find"}}
    groups = {"a": {"models": ["plain", "find"]}, "b": {"models": ["other"]}}
    spec = parse_spec(
        {
            "models": {"plain": PLAIN, "other": PLAIN},
            "pipelines": {"pages": {"latency_slo_ms": 200, "tasks": tasks}},
            "groups": groups,
            "policy": f"{__name__}:Own",
            "planner": None,
        }
    )
    assert spec.grouped and not spec.embedded
    brain = make_brain(spec)
    brain.begin(0.0, Seen({}))
    for model in ("plain", "find"):
        with pytest.raises(ValueError, match="it serves 'pages', whose tasks stay together"):
            brain.move(model, "b")
    assert brain.move("other", "a") == "other was moved to a by hand"


def test_workers_stop_batches_where_their_groups_policy_does():
    spec = parse_spec(two_groups("flex", "price"))

    async def preempts(kind):
        models = Models(spec, kind, lambda *_: None)
        models.close()
        return models.preempts

    assert [asyncio.run(preempts(kind)) for kind in spec.workers] == [True, False]


def test_groups_have_models_kinds_and_a_choice_of_their_own():
    groups = {
        "a": {
            "workers": {"cpu": {"max_replicas": 3}, "gpu": {}},
            "models": ["m"],
            "policy": "flex",
        },
        "b": {"workers": {"cpu": {"max_replicas": 2}}, "models": ["n"]},
    }
    models = {"m": CHOOSES, "n": {**CHOOSES, "variants": {"x": DEEP, "y": DEEP}}}
    spec = parse_spec({"models": models, "groups": groups})
    assert (spec.planner.name, spec.grouped, spec.planned) == ("auto", True, True)
    setting = Auto.setting(spec)
    assert setting.problem.group_of == {"m": "a", "n": "b"}
    assert {k.name: (k.group, k.max_workers) for k in setting.problem.kinds} == {
        "a-cpu": ("a", 3),
        "a-gpu": ("a", 1),
        "b-cpu": ("b", 2),
    }
    assert setting.choosing == {"b-cpu"}  # `auto` chooses itself
