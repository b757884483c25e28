"""Specifications of pipelines, in Python and as a config file has them: nothing wrong gets through,
and every mistake is named."""

import pickle
from functools import partial

import pytest

import ray_slo
from ray_slo.policies.price import Price
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.frontend.answer import path_accuracy


def load(name="net"):
    return name


def join(result, outputs):
    return result, outputs


class Find:
    def __init__(self, level=0):
        pass

    def __call__(self, net, texts):
        return texts


class Spell:
    def __call__(self, net, words):
        return words


class Plain:
    def __call__(self, items):
        return items


class Wrong(Plain):
    def join(self, result, outputs):
        return result


class Joins(Plain):
    @staticmethod
    def join(result, outputs):
        return "joined"


class Own(Price):
    serves_tasks = True


HERE = __name__
NET = {"load": f"{HERE}:load", "accuracy": 80}
FIND = {"callable": Find, "variants": {"f0": NET, "f1": {**NET, "accuracy": 90}}}
SPELL = {"callable": Spell, "parent": "find", "variants": {"s0": NET}}
FIXED = {"policy": f"{HERE}:Own", "planner": None}


def args(tasks=None, pipeline=None, **app):
    # A child before its parent: the order does not matter.
    tasks = {"spell": SPELL, "find": FIND, **(tasks or {})}
    return {"pipeline": {"tasks": tasks, "latency_slo_ms": 900, **(pipeline or {})}, **app}


def task(**changes):
    return args({"more": {"callable": Plain, "parent": "find", **changes}})


def loki_args(worker=None, **planner):
    return args(planner={"name": "loki", **planner}, workers={"default": worker or {}})


def test_tasks_are_models_to_everybody_below():
    spec = parse_spec(args({"find": {**FIND, "user_config": 3}}))
    assert list(spec.models) == ["spell", "find"]
    assert {m.latency_slo_ms for m in spec.models.values()} == {900}
    assert spec.models["find"].load() is Find
    assert spec.models["find"].user_config == 3
    assert set(spec.variants()) == {"f0", "f1", "s0"}
    assert spec.deployment_name == "pipeline"
    assert (spec.grouped, spec.planned, spec.embedded) == (False, True, True)
    assert list(spec.pipelines["pipeline"].parents.items()) == [("find", None), ("spell", "find")]


def test_the_default_planner_and_its_policy_are_auto():
    spec = parse_spec(args())
    assert (spec.planner.name, spec.planner.interval_s) == ("auto", 10)
    assert (spec.policy.name, spec.policy.kwargs) == ("auto", {})


ROUTES = {
    "parents": {"find": None, "spell": "find"},
    "factors": {"f0": {"spell": 1.0}, "f1": {"spell": 1.0}, "s0": {}},
}


@pytest.mark.parametrize(
    "given", [{"planner": "loki"}, {"policy": "pipeline"}], ids=["loki", "auto"]
)
def test_the_policy_pipeline_knows_the_tree_whatever_plans_it(given):
    spec = parse_spec(args(**given))
    assert (spec.policy.name, spec.policy.kwargs) == ("pipeline", ROUTES)


def test_arguments_of_loki_and_its_policy():
    spec = parse_spec(
        args(
            planner={"name": "loki", "kwargs": {"communication_s": 0.003, "batch_sizes": [1, 2]}},
            policy={"kwargs": {"drop": "none"}},
        )
    )
    assert spec.policy.kwargs["communication_s"] == 0.003
    assert spec.policy.kwargs["drop"] == "none"
    assert spec.planner.kwargs["batch_sizes"] == (1, 2)
    assert parse_spec(args(planner="loki")).planner.name == "loki"


def test_without_a_planner_another_policy_chooses():
    spec = parse_spec(args(**FIXED))
    assert (spec.planned, spec.policy.name, spec.policy.kwargs) == (False, f"{HERE}:Own", {})
    one = args({"find": {"callable": Plain}}, policy="eager", planner=None)
    assert parse_spec(one).policy.name == "eager"


def test_factors_of_variants_tasks_and_none():
    find = {**FIND, "factors": {"spell": 4}, "variants": {"f0": NET, "f1": NET}}
    find["variants"]["f1"] = {**NET, "factors": {"spell": 8}}
    tasks = {"find": find, "more": {"callable": Plain, "parent": "find", "accuracy": 50}}
    pipeline = parse_spec(args(tasks)).pipelines["pipeline"]
    assert pipeline.factors == {
        "f0": {"spell": 4.0, "more": 1.0},
        "f1": {"spell": 8.0, "more": 1.0},
        "s0": {},
        "more": {},
    }


def test_accuracies_of_paths():
    spec = parse_spec(args(pipeline={"path_accuracies": {"f1/s0": 71}}))
    pipeline = spec.pipelines["pipeline"]
    assert pipeline.paths == (
        (("find", "f0"), ("spell", "s0")),
        (("find", "f1"), ("spell", "s0")),
    )
    own = {key: ref.accuracy for key, ref in spec.variants().items()}
    accuracy = partial(path_accuracy, spec.trees["pipeline"], own)
    assert accuracy(("f1", "s0")) == 71
    assert accuracy(("f0", "s0")) == pytest.approx(64)
    assert accuracy(("f1",)) == pytest.approx(90)  # nothing came of it
    assert accuracy(("of", "another", "release")) is None


def test_for_the_scheduler_there_is_no_user_code():
    spec = parse_spec(args({"find": {**FIND, "args": [1]}}, {"join": join}))
    bare = pickle.loads(pickle.dumps(spec.without_code()))
    assert bare.pipelines["pipeline"].join is None
    assert bare.models["find"].args == ()
    assert bare.pipelines["pipeline"].factors == spec.pipelines["pipeline"].factors
    assert {t.callable for t in bare.pipelines["pipeline"].tasks.values()} == {""}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (args({"find": {**FIND, "parent": "spell"}}), "spell, find are in a cycle or below one; a"),
        (args({"more": {"callable": Plain}}), "find, more have no parent; a pipeline is a tree"),
        (task(parent="more"), "tasks: more are in a cycle"),
        (
            task(parent=["find", "spell"]),
            "pipeline.tasks.more.parent: a pipeline is a tree: a task",
        ),
        (task(parent="fnd"), "tasks.more.parent: no task 'fnd'; the tasks are spell, find, more"),
        (task(prent="find"), "pipeline.tasks.more.prent: unknown key (did you mean 'parent'?)"),
        (task(factors={"spell": 1}), "tasks.more.factors: 'spell' is no child of 'more'; its chi"),
        (
            args({"find": {**FIND, "factors": {"spell": -1}}}),
            "tasks.find.factors.spell: must be at least 0, got -1",
        ),
        (
            task(variants={"v": {**NET, "factors": {"find": 1}}}),
            "tasks.more.variants.v.factors: 'find' is no child of 'more'; its children are none",
        ),
        (
            task(variants={"v": {**NET, "factrs": {}}}),
            "pipeline.tasks.more.variants.v.factrs: unknown key (did you mean 'factors'?)",
        ),
        (task(variants={"s0": NET}), "'s0' is a variant of 'spell', too; variants of a pipeline"),
        (task(variants={"find": NET, "more": NET}, accuracy=3), "each variant has an accuracy of"),
        (task(latency_slo_ms=3), "pipeline.tasks.more.latency_slo_ms: unknown key; valid keys are"),
        (args(pipeline={"tasks": {}}), "pipeline.tasks: "),
        (args(pipeline={"latency_slo_ms": 0}), "pipeline.latency_slo_ms: must be above 0"),
        (args(pipeline={"jion": 0}), "pipeline.jion: unknown key (did you mean 'join'?)"),
        (
            args(pipeline={"path_accuracies": {"f0/s1": 9}}),
            "path_accuracies.f0/s1: no path from the root to a last task; they are f0/s0, f1/s0",
        ),
        (
            args(pipeline={"path_accuracies": {"f0": 9}}),
            "path_accuracies.f0: no path from the root to a last task",
        ),
        (
            args(pipeline={"path_accuracies": {"f0/s0": 101}}),
            "path_accuracies.f0/s0: must be from 0 to 100 (percent), got 101",
        ),
        (args({"a/b": SPELL}), "task name 'a/b': use ASCII letters"),
        (
            args(name="find"),
            "name: 'find' is pipeline.tasks.find, too; models, pip",
        ),
        (
            args(models={"m": {"callable": Plain, "latency_slo_ms": 9}}, planner="loki"),
            "'loki' plans one pipeline and nothing else, and each task must have its own code; "
            "there are m, pipeline",
        ),
        (args(groups={"g": {}}, planner="loki"), "groups: 'loki' plans `workers`; leave groups"),
        (args(**FIXED, groups={"g": {}}), "groups: no group lists 'find', and there is no planner"),
        (
            args(**FIXED, groups={"g": {"models": ["find"]}, "h": {"models": ["spell"]}}),
            "pipeline: its tasks are in the groups g, h; a group's scheduler does not know the lat",
        ),
        (args(planner="herd"), "planner.name: 'herd' plans models, and cannot plan a pipeline"),
        (
            args(policy="pipeline", planner=None),
            "policy: 'pipeline' needs the routes of a planner, and there is none",
        ),
        (args(policy={"kwargs": {"x": 1}}), "policy 'auto' has no argument x"),
        (args(planner="loki", policy={"kwargs": {"x": 1}}), "policy 'pipeline' has no argument x"),
        (
            args(policy={"name": "pipeline", "kwargs": {"parents": {}}}),
            "policy.kwargs.parents: follows from the pipe",
        ),
        (
            args(models={"m": {"callable": Plain, "latency_slo_ms": 9}}, policy="pipeline"),
            "policy: 'pipeline' serves one pipeline and nothing else, on `workers`",
        ),
        (
            args(groups={"g": {}}, policy="pipeline"),
            "policy: 'pipeline' serves one pipeline and nothing else, on `workers`",
        ),
        (
            args(
                policy={"kwargs": {"communication_s": 0.002}},
                planner={"name": "loki", "kwargs": {"communication_s": 0.003}},
            ),
            "policy.kwargs.communication_s: follows from the arguments of the planner; leave",
        ),
        (
            args(planner="loki", workers={"a": {}, "b": {}}),
            "plans for one kind of worker, but there are a, b",
        ),
        (
            loki_args(kwargs={"quantile": 1}),
            "planner.kwargs.quantile: unknown key (did you mean ",
        ),
        (loki_args(kwargs={"slo_s": 1}), "planner.kwargs.slo_s: unknown key; valid keys are "),
        (loki_args(kwargs={"waiting_factor": 3}), "planner.kwargs.waiting_factor: unknown key"),
        (
            loki_args(kwargs={"headroom_quantile": 1.5}),
            "planner.kwargs.headroom_quantile must be above 0 and below 1, got 1.5",
        ),
        (loki_args(kwargs={"max_swaps": "x"}), "planner.kwargs.max_swaps: must be a whole number"),
        (loki_args(min_gain=1), "planner.min_gain: not for the planner 'loki'"),
        (loki_args(demand="mean"), "planner.demand: must be one of ewma, peak, holt, got"),
        (loki_args(rates={"spell": 1}), "planner.rates: 'spell' is not a model or pipeline; there"),
        (loki_args(rates={"find": 0}), "planner.rates.find must be positive, got 0"),
        (loki_args({"max_replicas": 0}), "workers.default.max_replicas: must be from 1"),
        (
            loki_args({"max_replicas": 3, "num_replicas": 4}),
            "num_replicas: must be from min_replicas 1 to max_replicas 3, got 4",
        ),
        (loki_args({"min_replicas": 2}), "min_replicas: give max_replicas, too, got 2 alone"),
        (
            args(**FIXED, workers={"default": {"max_replicas": 2}}),
            "workers.default.max_replicas: no planner decides how many there are",
        ),
    ],
)
def test_mistakes_name_field_value_and_choices(wrong, says):
    with pytest.raises(ValueError) as error:
        parse_spec(wrong)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"planner": "loki"}, "planner.name: 'loki' plans a pipeline, and there is none"),
        ({"policy": "pipeline"}, "policy: 'pipeline' is for a pipeline, and there is none"),
        (
            {"planner": None, "workers": {"w": {"max_replicas": 3}}},
            "workers.w.max_replicas: no planner decides how many there are; leave `planner` out, "
            "or choose one of loki, kairos, kairos_plus, auto",
        ),
        (
            {"planner": {"name": "partition", "demand": "ewma"}},
            "planner.demand: not for the planner 'partition'",
        ),
        (
            {"models": {"m": {**FIND, "latency_slo_ms": 9, "variants": {"v": {**NET}}}}},
            None,
        ),
        (
            {
                "models": {
                    "m": {
                        **FIND,
                        "latency_slo_ms": 9,
                        "variants": {"v": {**NET, "factors": {"m": 1}}},
                    }
                }
            },
            "models.m.variants.v.factors: factors are for the tasks of a pipeline; 'm' is no",
        ),
    ],
)
def test_what_is_for_pipelines_only(changes, says):
    data = {"models": {"m": {"callable": Plain, "latency_slo_ms": 9}}, **changes}
    if says is None:
        assert parse_spec(data).pipelines == {}
        return
    with pytest.raises(ValueError) as error:
        parse_spec(data)
    assert says in str(error.value)


def test_replicas_between_bounds():
    worker = parse_spec(loki_args({"min_replicas": 2, "max_replicas": 5})).workers["default"]
    assert (worker.num_replicas, worker.replica_bounds) == (2, (2, 5))
    worker = parse_spec(args()).workers["default"]
    assert (worker.num_replicas, worker.replica_bounds) == (1, None)


@pytest.mark.parametrize(
    ("tasks", "pipeline", "says"),
    [
        ({"find": {**FIND, "callable": Plain}}, {}, "pipeline.tasks.find.callable: Plain.__call__"),
        (
            {"spell": {**SPELL, "variants": {"s": {**NET, "load": f"{HERE}:lod"}}}},
            {},
            "pipeline.tasks.spell.variants.s.load: cannot import",
        ),
        ({}, {"join": f"{HERE}:jion"}, "pipeline.join: cannot import"),
        ({}, {"join": f"{HERE}:NET"}, "pipeline.join must be a function, got {"),
        (
            {"find": {"callable": Wrong}},
            {},
            "pipeline.tasks.find.callable: Wrong.join must be a @staticmethod or @classmethod",
        ),
    ],
)
def test_code_that_cannot_work_is_said_before_anything_is_deployed(tasks, pipeline, says):
    with pytest.raises(ValueError) as error:
        build_app_from_spec(parse_spec(args(tasks, pipeline)))
    assert says in str(error.value)


def test_joins_are_the_classes_or_the_pipelines():
    own = {"find": {"callable": Joins}, "spell": {"callable": Joins, "parent": "find"}}
    assert parse_spec(args(own)).joins()["find"](1, {}) == "joined"
    assert set(parse_spec(args(own)).joins()) == {"find"}  # the last task has nothing to join
    assert parse_spec(args(own, {"join": f"{HERE}:join"})).joins() == {"find": join}
    assert parse_spec(args()).joins() == {}


def version(**changes):
    return build_app_from_spec(parse_spec({**args(**FIXED), **changes}))._bound_deployment.version


def test_only_what_a_replica_must_know_of_changes_the_version():
    configured = args({"find": {**FIND, "user_config": 1}}, **FIXED)
    assert version() == version(workers={"default": {"num_replicas": 3}}) == version(**configured)
    others = [
        version(**args({"find": {**FIND, "args": (1,)}}, **FIXED)),
        version(**args(pipeline={"join": join}, **FIXED)),
        version(**args(pipeline={"path_accuracies": {"f0/s0": 3}}, **FIXED)),
        version(**args({"find": {**FIND, "factors": {"spell": 3}}}, **FIXED)),
    ]
    assert len({version(), *others}) == 5


def test_the_version_is_of_what_is_said_not_of_which_objects_say_it():
    def other(text):
        return "".join(list(text))  # equal, and another object

    name = other("words")
    one, two = version(name=name), version(name=other("words"))
    same = {"default": {"ray_actor_options": {"resources": {name: 1}}}}
    alike = {"default": {"ray_actor_options": {"resources": {other("words"): 1}}}}
    assert one == two
    assert version(name=name, workers=same) == version(name=name, workers=alike) != one


def python(**options):
    net = ray_slo.Variant("s0", accuracy=80, load=load)
    tasks = [
        ray_slo.Task("find", Plain, factors={"spell": 3}, options={"max_batch_size": 4}),
        ray_slo.Task("spell", Spell, parent="find", variants=[net]),
    ]
    return ray_slo.Pipeline(tasks, latency_slo_ms=900, name="words", **options)


def test_from_python():
    spec = python(max_replicas=4, num_replicas=2, join=join, retries=7).spec()
    assert (spec.deployment_name, spec.retries, spec.planner.name) == ("words", 7, "auto")
    assert spec.models["find"].max_batch_size == 4
    assert spec.pipelines["words"].factors == {"find": {"spell": 3.0}, "s0": {}}
    assert spec.pipelines["words"].join is join
    worker = spec.workers["default"]
    assert (worker.num_replicas, worker.most_replicas) == (2, 4)
    assert python(**FIXED).spec().planner is None
    assert python(planner={"name": "loki", "interval_s": 3}).spec().planner.interval_s == 3
    assert python().name == "words"


def test_from_python_it_becomes_an_application():
    bound = python(max_replicas=4).bind()._bound_deployment
    assert bound.name == "words"
    (workers,) = bound.init_args[1].values()
    config = workers._bound_deployment._deployment_config
    assert workers._bound_deployment.name == "words-worker"
    assert config.autoscaling_config.max_replicas == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_replicas": 0}, "workers.default.max_replicas"),
        ({"planner": "partition"}, "'partition' plans models, and cannot plan a pipeline"),
        ({"retry": 1}, "retry: unknown key (did you mean 'retries'?)"),
    ],
)
def test_mistakes_in_python(options, says):
    with pytest.raises(ValueError) as error:
        python(**options)
    assert says in str(error.value)


def test_two_tasks_of_one_name():
    with pytest.raises(ValueError, match="two tasks are named 'a'"):
        ray_slo.Pipeline([ray_slo.Task("a", Plain)] * 2, latency_slo_ms=1)
