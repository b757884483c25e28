"""One application of several models and pipelines, which may share models; SLO classes; what
workers cost and hold."""

import pickle

import pytest

import ray_slo
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.policies.price import Price
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.kairos import Kairos


def load():
    return "net"


def put_together(result, joined):
    return result


class Plain:
    def __call__(self, items):
        return items


class Nets:
    def __call__(self, net, items):
        return items


class Joins(Nets):
    @staticmethod
    def join(result, outputs):
        return "joined"


class Own(Price):
    serves_tasks = True


HERE = __name__
NET = {"load": f"{HERE}:load", "accuracy": 80}
READ = {
    "callable": Nets,
    "latency_slo_ms": 100,
    "slo_classes": {"gold": 50, "bulk": 2000},
    "variants": {"small": {**NET, "factors": {"check": 3}}, "big": NET},
}
PLAIN = {"callable": Nets, "latency_slo_ms": 100, "variants": {"small": NET, "big": NET}}
PAGES = {
    "latency_slo_ms": 500,
    "slo_classes": {"gold": 300},
    "tasks": {
        "find": {"callable": Plain, "factors": {"lines": 4}},
        "lines": {"model": "read", "parent": "find", "factors": {"check": 2}},
        "check": {"callable": Plain, "parent": "lines"},
    },
    "path_accuracies": {"find/big/check": 70},
}
SIGNS = {
    "latency_slo_ms": 200,
    "tasks": {"spot": {"callable": Plain}, "signs-read": {"model": "read", "parent": "spot"}},
}


def args(**app):
    shape = {"models": {"read": READ}, "pipelines": {"pages": PAGES, "signs": SIGNS}}
    return {**shape, "policy": f"{HERE}:Own", "planner": None, **app}


def pages(task=None, **changes):
    tasks = {**PAGES["tasks"], **(task or {})}
    return args(pipelines={"pages": {**PAGES, "tasks": tasks, **changes}})


def test_every_model_and_every_pipeline_is_a_tree():
    spec = parse_spec(args())
    assert list(spec.models) == ["read", "find", "check", "spot"]
    assert spec.deployment_name == "models"
    assert spec.trees["read"] == Tree(
        "read", (TreeTask("read", "read"),), {"": 0.1, "gold": 0.05, "bulk": 2.0}
    )
    factors = {"small": {"check": 3.0}, "big": {"check": 2.0}}
    assert spec.trees["pages"] == Tree(
        "pages",
        (
            TreeTask("find", "find", None, {"find": {"lines": 4.0}}),
            TreeTask("lines", "read", "find", factors),
            TreeTask("check", "check", "lines", {"check": {}}),
        ),
        {"": 0.5, "gold": 0.3},
        {("find", "big", "check"): 70},
    )
    assert spec.trees["signs"].models == ("spot", "read")
    assert spec.fields["find"] == "pipelines.pages.tasks.find"
    assert (spec.fields["read"], spec.fields["signs"]) == ("models.read", "pipelines.signs")
    assert pickle.loads(pickle.dumps(spec.without_code())).trees == spec.trees


def test_the_slos_that_a_model_has_a_part_in():
    spec = parse_spec(args())
    assert spec.slos_ms("read") == (50, 2000)
    assert spec.slos_ms("find") == (300, 500)
    assert spec.slos_ms("spot") == (200, 200)


def test_variants_of_one_name_have_the_models_before_it():
    tasks = {"find": {"callable": Nets, "variants": {"big": NET}, "factors": {"lines": 2}}}
    measured = {"big/big/check": 60, "big/small/check": 50}
    spec = parse_spec(pages(tasks, path_accuracies=measured))
    tree = spec.trees["pages"]
    assert set(spec.variants()) == {"find/big", "read/big", "small", "check"}
    assert tree["find"].factors == {"find/big": {"lines": 2.0}}
    assert tree.path_accuracies == {
        ("find/big", "read/big", "check"): 60,
        ("find/big", "small", "check"): 50,
    }


def test_a_task_may_share_the_code_of_another_task():
    signs = {**SIGNS, "tasks": {**SIGNS["tasks"], "again": {"model": "check", "parent": "spot"}}}
    spec = parse_spec(args(pipelines={"pages": PAGES, "signs": signs}))
    assert spec.trees["signs"]["again"].model == "check"
    assert spec.slos_ms("check") == (200, 500)


def test_one_pipeline_has_a_short_form():
    short = {"pipeline": PAGES, "models": {"read": READ}, "policy": f"{HERE}:Own", "planner": None}
    spec = parse_spec(short)
    assert list(spec.trees) == ["read", "pipeline"]
    assert spec.fields["find"] == "pipeline.tasks.find"
    assert list(parse_spec({**short, "name": "doc"}).trees) == ["read", "doc"]
    long = parse_spec(args(models={"read": PLAIN}, pipelines={"p": SIGNS}))
    assert list(long.trees) == ["read", "p"]
    alone = {"tasks": {"spot": {"callable": Plain}}, "latency_slo_ms": 200}
    lone = parse_spec({"pipelines": {"p": alone}})
    assert (lone.deployment_name, lone.planner.name, lone.policy.name) == ("p", "auto", "auto")


def test_joins_are_by_task():
    read = {**READ, "callable": Joins}
    join = parse_spec(args(models={"read": read})).joins()
    assert set(join) == {"lines"}  # `signs-read` has nothing to join
    signs = {**SIGNS, "join": f"{HERE}:put_together"}
    plain = args(models={"read": PLAIN}, pipelines={"signs": signs})
    assert set(parse_spec(plain).joins()) == {"spot"}


def test_whatever_is_wrong_with_the_code_the_field_is_named():
    signs = {**SIGNS, "join": f"{HERE}:lod"}
    with pytest.raises(ValueError, match=r"pipelines.signs.join: cannot import"):
        build_app_from_spec(parse_spec(args(models={"read": PLAIN}, pipelines={"signs": signs})))
    tasks = {"spot": {"callable": Nets}}
    with pytest.raises(ValueError, match=r"pipelines.signs.tasks.spot.callable: Nets.__call__"):
        signs = {"signs": {**SIGNS, "tasks": tasks}}
        build_app_from_spec(parse_spec(args(models={"read": PLAIN}, pipelines=signs)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"policy": "eager", "planner": None}, "models: required (or a pipeline)"),
        (args(pipeline=SIGNS), "pipeline: the short form of one pipeline; name it under `pipel"),
        (args(pipelines={"read": SIGNS}), "pipelines.read: 'read' is models.read, too; models, pi"),
        (
            args(pipelines={"pages": PAGES, "find": SIGNS}),
            "pipelines.find: 'find' is pipelines.pages.tasks.find, too",
        ),
        (
            args(pipelines={"a": SIGNS, "b": SIGNS}),
            "pipelines.b.tasks.spot: 'spot' is pipelines.a.tasks.spot, too",
        ),
        (pages({"read": {"callable": Plain, "parent": "find"}}), "'read' is models.read, too"),
        (args(pipelines={"a@b": SIGNS}), "pipeline name 'a@b': use ASCII letters"),
        (
            pages({"lines": {"model": "raed", "parent": "find"}}),
            "pipelines.pages.tasks.lines.model: no model 'raed'; the models, and tasks with code "
            "of their own, are read, find, check",
        ),
        (
            pages({"more": {"model": "lines", "parent": "find"}}),
            "pipelines.pages.tasks.more.model: no model 'lines'",
        ),
        (
            pages({"lines": {"model": "read", "parent": "find", "max_batch_size": 3}}),
            "pipelines.pages.tasks.lines.max_batch_size: the model 'read' says that; leave it out",
        ),
        (
            pages({"lines": {"model": "read", "callable": Plain, "parent": "find"}}),
            "pipelines.pages.tasks.lines.callable: the model 'read' says that",
        ),
        (
            pages({"lines": {"parent": "find"}}),
            "pipelines.pages.tasks.lines.callable: required, or model: the name of a model",
        ),
        (
            pages(path_accuracies={"find/bigger/check": 3}),
            "pipelines.pages.path_accuracies.find/bigger/check: no path from the root",
        ),
        (
            pages({"check": {"callable": Plain, "parent": "find"}}, path_accuracies={}),
            "pipelines.pages.tasks.lines.factors: 'check' is no child of 'lines'",
        ),
        (
            args(pipelines={"signs": SIGNS}),
            "models.read.variants.small.factors: factors are for the tasks of a pipeline; 'check' "
            "is no child of a task that 'read' serves; these are none",
        ),
        (pages(slo_classes={"gold": 0}), "pipelines.pages.slo_classes.gold: must be above 0"),
        (pages(slo_classes={"a b": 9}), "SLO class name 'a b': use ASCII letters"),
        (
            args(response_margin_ms=50),
            "response_margin_ms must be less than models.read.slo_classes.gold, which is 50, got",
        ),
        (args(groups={"g": {"models": ["nobody"]}}), "groups.g.models: no model 'nobody'; the"),
        (
            args(groups={"g": {"models": ["read", "find", "spot"]}, "h": {"models": ["check"]}}),
            "pipelines.pages: its tasks are in the groups g, h",
        ),
        (args(planner="loki"), "planner.name: 'loki' plans one pipeline and nothing else"),
        (args(planner="herd"), "planner.name: 'herd' plans models, and cannot plan a pipeline"),
        (
            args(planner={"name": "kairos", "kwargs": {"budget_per_hour": 1}}),
            "planner.name: 'kairos' cannot plan a pipeline",
        ),
        (args(policy="pipeline"), "policy: 'pipeline' serves one pipeline and nothing else"),
    ],
)
def test_mistakes_name_field_value_and_choices(wrong, says):
    with pytest.raises(ValueError) as error:
        parse_spec(wrong)
    assert says in str(error.value)


def test_from_python():
    tasks = [
        ray_slo.Task("find", Plain, factors={"lines": 4}),
        ray_slo.Task("lines", model="read", parent="find"),
    ]
    read = {
        "callable": Nets,
        "latency_slo_ms": 100,
        "slo_classes": {"gold": 50},
        "variants": [ray_slo.Variant("small", accuracy=80, load=load)],
    }
    app = ray_slo.application(
        models={"read": read},
        pipelines={"pages": {"latency_slo_ms": 500, "tasks": tasks}},
        workers={"cpu": {"num_replicas": 3}},
        policy=f"{HERE}:Own",
        planner=None,
        name="all",
    )
    bound = app._bound_deployment
    spec, workers = bound.init_args
    assert (bound.name, list(spec.trees), list(workers)) == ("all", ["read", "pages"], ["cpu"])
    assert spec.trees["pages"]["lines"].model == "read"
    assert spec.trees["read"].slos_s == {"": 0.1, "gold": 0.05}
    with pytest.raises(ValueError, match="two tasks are named 'find'"):
        ray_slo.application(pipelines={"p": {"latency_slo_ms": 9, "tasks": tasks[:1] * 2}})
    with pytest.raises(ValueError, match="models: required"):
        ray_slo.application()
    with pytest.raises(ValueError, match=r"lines.*callable: the model 'read' says that"):
        wrong = [tasks[0], ray_slo.Task("lines", Plain, parent="find", model="read")]
        ray_slo.application(
            models={"read": read}, pipelines={"p": {"latency_slo_ms": 9, "tasks": wrong}}
        )


def test_a_pipeline_from_python_has_classes():
    made = ray_slo.Pipeline(
        [ray_slo.Task("find", Plain)], latency_slo_ms=100, slo_classes={"bulk": 900}, planner=None
    )
    assert made.spec().trees["pipeline"].slos_s == {"": 0.1, "bulk": 0.9}
    planned = ray_slo.Pipeline(
        [ray_slo.Task("find", Plain)], latency_slo_ms=100, slo_classes={"bulk": 900}
    )
    assert planned.spec().planner.name == "auto"


def test_planners_for_one_slo_refuse_classes():
    pages = {"latency_slo_ms": 100, "tasks": {"find": {"callable": Plain}}}
    assert parse_spec({"pipelines": {"pages": pages}, "planner": "loki"}).trees
    app = {"pipelines": {"pages": {**pages, "slo_classes": {"gold": 50}}}, "planner": "loki"}
    says = r"pipelines.pages.slo_classes: the planner 'loki' plans for one"
    with pytest.raises(ValueError, match=says):
        parse_spec(app)


def test_what_workers_cost_and_hold():
    model = {"callable": Plain, "latency_slo_ms": 100}
    kairos = {"name": "kairos", "kwargs": {"budget_per_hour": 2}}
    workers = {
        "own": {"price_per_hour": 0.5},
        "type": {"instance_type": "g4dn.xlarge"},
        "both": {"instance_type": "g4dn.xlarge", "price_per_hour": 0.25},
    }
    spec = parse_spec({"models": {"m": model}, "planner": kairos, "workers": workers})
    prices = {kind: worker.price_per_hour for kind, worker in spec.workers.items()}
    listed = spec.workers["type"].instance_type.price_per_hour
    assert prices == {"own": 0.5, "type": listed, "both": 0.25}
    assert spec.workers["both"].ray_actor_options == spec.workers["type"].ray_actor_options
    setting = Kairos.setting(spec)
    assert {kind.name: kind.price_per_hour for kind in setting.problem.kinds} == prices


@pytest.mark.parametrize(
    ("planner", "field"),
    [
        (None, "price_per_hour"),
    ],
)
def test_what_no_planner_reads_is_refused(planner, field):
    app = {
        "models": {"m": {"callable": Plain, "latency_slo_ms": 100}},
        "planner": planner,
        "workers": {"w": {field: 3.0, **({} if planner is None else {"price_per_hour": 1.0})}},
    }
    with pytest.raises(ValueError, match=f"workers.w.{field}: no planner reads it here; leave it"):
        parse_spec(app)
