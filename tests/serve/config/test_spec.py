"""Application specs: which are accepted, and the messages for all others."""

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import serve

import ray_slo
from ray_slo.core import LatencyProfile
from ray_slo.core.profiles import save_profiles
from ray_slo.models import vision
from ray_slo.serve.app.build import build_app_from_spec
from ray_slo.serve.config.app import AppConfig
from ray_slo.serve.config.files import profiles_of_files
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.config.workers import WorkerConfig


class Model:
    def __call__(self, items):
        return items


class InstancePreprocess(Model):
    def preprocess(self, item):
        return item


class Tall:
    def __init__(self, height, width=1):
        pass

    def __call__(self, items):
        return items


class Generator:
    def __call__(self, items):
        yield from items


class TakesNothing:
    def __call__(self):
        return []


class Multiplexed(Model):
    @serve.multiplexed(max_num_models_per_replica=2)
    async def get_model(self, model_id):
        return model_id


class ReconfigureTakesNothing(Model):
    def reconfigure(self):
        pass


class RankFirst(Model):
    def reconfigure(self, config, rank, more):
        pass


class SizedExample(Model):
    @staticmethod
    def example_input(size):
        return size


class NoSize(Model):
    @staticmethod
    def size(item):
        return item

    @staticmethod
    def example_input():
        return 1


class HealthOfWhat(Model):
    def check_health(self, what):
        pass


class Chooses:
    def __call__(self, network, items):
        return items


def load(layers=1):
    return None


def args(**changes):
    return {"models": {"m": {"callable": Model, "latency_slo_ms": 100}}, **changes}


DEEP = {"load": "tests.serve.config.test_spec:load", "accuracy": 80}


def variants(**changes):
    return model(callable=Chooses, variants={"deep": {**DEEP, **changes}})


def model(**changes):
    return args(models={"m": {"callable": Model, "latency_slo_ms": 100, **changes}})


def test_defaults():
    spec = parse_spec(args())
    assert (spec.policy.name, spec.embedded, spec.deployment_name) == ("auto", True, "m")
    assert spec.workers["default"].num_replicas == 1
    assert not parse_spec(args(num_frontends=2)).embedded
    assert not parse_spec(args(scheduler="actor")).embedded
    assert parse_spec(args(policy="eager")).policy.name == "eager"
    assert parse_spec(args(models={"a": Model_, "b": Model_})).deployment_name == "models"


Model_ = {"callable": Model, "latency_slo_ms": 100}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (args(polcy="eager"), "polcy: unknown key (did you mean 'policy'?); valid keys are "),
        (model(latency_slo=5), "models.m.latency_slo: unknown key (did you mean 'latency_slo_ms'"),
        (
            model(latency_slo_ms=0),
            "models.m.latency_slo_ms: must be above 0 and at most 86400000, got 0",
        ),
        (model(latency_slo_ms="fast"), "got 'fast'"),
        (args(models={"m": {"callable": Model}}), "models.m.latency_slo_ms: required"),
        (args(models={"m": {"latency_slo_ms": 5}}), "models.m.callable: required"),
        (args(models={}), "models: "),
        ({}, "models: required"),
        (args(models={"a/b": Model_}), "model name 'a/b': use ASCII letters, digits"),
        (args(models={"é": Model_}), "model name 'é': use ASCII letters, digits"),
        (args(scheduler="remote"), "scheduler: must be one of auto, actor, embedded, got"),
        (args(scheduler="embedded", num_frontends=2), "num_frontends is 2; choose 'actor' or"),
        (args(num_frontends=0), "num_frontends: must be from 1 to 100000, got 0"),
        (args(policy="defered"), "policy 'defered' is unknown; choose one of auto, deferred, "),
        (args(policy={"name": "eager", "kwargs": {"x": 1}}), "policy 'eager' has no argument x"),
        (args(policy={"nam": "eager"}), "policy.nam: unknown key (did you mean 'name'?)"),
        (args(workers={}), "workers: name at least one kind of worker"),
        (args(workers={"cpu": {"replicas": 2}}), "workers.cpu.replicas: unknown key"),
        (args(workers={"cpu": {"num_replicas": 0}}), "workers.cpu.num_replicas: must be from 1"),
        (model(accuracy=101), "models.m.accuracy: must be from 0 to 100"),
        (model(accuracy=-0.1), "models.m.accuracy: must be from 0 to 100"),
        (args(version=3), "version: replicas are replaced when code"),
        (
            variants(acuracy=3),
            "models.m.variants.deep.acuracy: unknown key (did you mean 'accuracy'?); valid keys "
            "are accuracy, args, factors, kwargs, load, profile",
        ),
        (variants(accuracy=101), "models.m.variants.deep.accuracy: must be from 0"),
        (model(variants={"deep": {"load": "x:y"}}), "models.m.variants.deep.accuracy: required"),
        (model(variants={"deep": {"accuracy": 1}}), "models.m.variants.deep.load: required"),
        (model(variants={"a b": DEEP}), "variant name 'a b': use ASCII letters, digits"),
        (model(variants=["deep"]), "a list of variants holds ray_slo.Variant(name, accuracy=…"),
        (model(variants={"deep": DEEP}, accuracy=5), "each variant has an accuracy of its own"),
        (
            args(policy={"kwargs": {"x": 1}}),
            "policy: policy 'auto' has no argument x; it takes candidates, fairness, preempt",
        ),
        (args(policy=7), "policy: must be one of auto, deferred, "),
        (args(num_frontends=10**9), "num_frontends: must be from 1 to 100000, got"),
        (args(retries=10**9), "retries: must be from 0 to 100, got"),
        (args(max_queued_requests=True), "max_queued_requests: must be a number, got True"),
        (args(workers={"cpu": {"num_replicas": True}}), "workers.cpu.num_replicas: must be a numb"),
        (
            args(response_margin_ms=1e9),
            "response_margin_ms must be less than models.m.latency_slo_ms, which is 100, got 1e+09",
        ),
        (args(models={"m" * 101: Model_}), "has 101 characters; use at most 100"),
        (args(models={5: Model_}), "models.5: the key must be a text, got 5; write it in quotes"),
        (args(name="a#b"), "name: deployment name 'a#b': use ASCII letters, digits"),
        (args(workers={"a#b": {}}), "workers: worker name 'a#b': use ASCII letters, digits"),
        (
            args(policy={"name": "ramsis", "kwargs": {"tables": "no/such.npz"}}),
            "policy: policy 'ramsis': no/such.npz: No such file or directory",
        ),
    ],
)
def test_mistakes_name_field_value_and_choices(wrong, says):
    with pytest.raises(ValueError) as error:
        parse_spec(wrong)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (model(profile="/nope.json"), "models.m.profile: /nope.json: no such file"),
        (model(profile=__file__), f"models.m.profile: {__file__}: not a latency-profile file"),
        (
            variants(profile="/nope.json"),
            "models.m.variants.deep.profile: /nope.json: no such file",
        ),
        (
            args(workers={"gpu": {"ray_actor_options": {"num_cpu": 1}}}),
            "workers.gpu.ray_actor_options: Specifying 'num_cpu'",
        ),
        (args(frontend_actor_options={"num_cpus": "x"}), "frontend_actor_options: The type of"),
    ],
)
def test_what_replicas_could_not_use_is_refused_here(wrong, says):
    with pytest.raises(ValueError) as error:
        build_app_from_spec(parse_spec(wrong))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("options", "timeout_s"),
    [
        ({}, 30),
        ({"latency_slo_ms": 200_000}, 200),
        ({"slo_classes": {"slow": 90_000}}, 90),
        ({"latency_slo_ms": 3_600_000}, 600),
        ({"latency_slo_ms": 200_000, "workers": {"cpu": {"health_check_timeout_s": 7}}}, 7),
    ],
)
def test_a_batch_within_its_slo_may_hold_the_interpreters_lock(options, timeout_s):
    """Serve's health checks of a worker get no answer meanwhile."""
    workers = {"workers": options.pop("workers")} if "workers" in options else {}
    built = build_app_from_spec(parse_spec({**model(**options), **workers}))
    (worker,) = built._bound_deployment.init_args[1].values()
    assert worker._bound_deployment._deployment_config.health_check_timeout_s == timeout_s


def test_every_mistake_is_named_at_once():
    with pytest.raises(ValueError) as error:
        parse_spec({**model(latency_slo_ms=-1), "retries": -1, "polcy": 1})
    *mistakes, see = str(error.value).splitlines()
    assert len(mistakes) == 3
    assert see.startswith("See docs/reference/config.md#")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (InstancePreprocess, "preprocess must be a @staticmethod or @classmethod"),
        (Generator, "is a generator; a coordinated batch returns a list"),
        (TakesNothing, "takes no argument"),
        (Multiplexed, "Multiplexed.get_model: @serve.multiplexed needs the model id of each"),
        (Multiplexed, "or use @ray_slo.batch in a @serve.deployment"),
        (ReconfigureTakesNothing, "takes (self); it must be reconfigure(self, user_config) or"),
        (RankFirst, "takes (self, config, rank, more); it must be reconfigure(self, user_config"),
        (HealthOfWhat, "HealthOfWhat.check_health takes (self, what); it must be check_health(sel"),
        (SizedExample, "SizedExample.example_input takes (size); it must be example_input()"),
        (NoSize, "NoSize.example_input takes (); it must be example_input(size), as there is"),
        (object, "has no __call__"),
        (len, "is made from a class"),
        (Model(), "is made from a class"),
    ],
)
def test_a_class_that_cannot_work_is_refused_where_it_is_decorated(target, says):
    with pytest.raises(ValueError) as error:
        ray_slo.deployment(latency_slo_ms=100)(target)
    assert says in str(error.value)


def test_mistakes_in_the_decorator():
    with pytest.raises(ValueError, match="needs latency_slo_ms"):
        ray_slo.deployment(num_replicas=2)
    with pytest.raises(
        ValueError, match="latency_slo_ms: must be above 0 and at most 86400000, got -5"
    ):
        ray_slo.deployment(latency_slo_ms=-5)(Model)
    with pytest.raises(ValueError, match="num_replica: unknown key"):
        ray_slo.deployment(latency_slo_ms=50)(Model).options(num_replica=2)
    with pytest.raises(RuntimeError, match="is not constructed directly"):
        ray_slo.deployment(latency_slo_ms=50)(Model)()


def test_what_would_replace_other_arguments_of_the_call_is_refused():
    made = ray_slo.deployment(latency_slo_ms=50)(Model)
    gpu = {"workers": {"gpu": {"num_replicas": 2}}}
    with pytest.raises(ValueError, match="workers: num_replicas, ray_actor_options would be lost"):
        made.options(num_replicas=4, ray_actor_options={"num_gpus": 1}, **gpu).bind()
    with pytest.raises(ValueError, match="models: the model is the decorated class"):
        made.options(models={"m": Model_}).bind()
    tasks = [ray_slo.Task("a", Model)]
    with pytest.raises(ValueError, match="groups: num_replicas would be lost"):
        ray_slo.Pipeline(tasks, latency_slo_ms=50, num_replicas=2, groups={"g": {}})
    with pytest.raises(ValueError, match="pipeline: it is made of the tasks"):
        ray_slo.Pipeline(tasks, latency_slo_ms=50, pipeline={"tasks": {}})
    assert [*made.options(**gpu)._spec((), {}).workers] == ["gpu"]
    grouped = made.options(groups={"g": {"models": ["Model"]}})._spec((), {})
    assert [*grouped.groups] == ["g"]


def test_config_may_name_a_decorated_class():
    decorated = ray_slo.deployment(latency_slo_ms=50)(Model)
    assert parse_spec(model(callable=decorated)).models["m"].load() is Model


def test_spec_for_the_scheduler_has_no_user_code():
    bare = parse_spec(model(args=[1], kwargs={"a": 2}, user_config=3)).without_code()
    again = pickle.loads(pickle.dumps(bare))
    assert again.models["m"].callable == ""
    assert (again.models["m"].args, again.models["m"].kwargs) == ((), {})
    assert again.version == bare.version


def version(**changes):
    built = build_app_from_spec(parse_spec({**args(), **changes}))
    return built._bound_deployment.version


@pytest.mark.parametrize(
    ("worker", "room_mb"),
    [
        ({}, None),
        ({"memory_mb": 900}, 900),
        ({"instance_type": {"price_per_hour": 1, "memory_gb": 16}}, 16_000),
        ({"instance_type": {"price_per_hour": 1, "memory_gb": 16}, "memory_mb": 900}, 900),
        ({"instance_type": {"price_per_hour": 1}}, None),
    ],
)
def test_room_is_that_of_the_worker_or_of_its_type(worker, room_mb):
    assert WorkerConfig(**worker).room_mb == room_mb


def saved(path, **profiles):
    save_profiles(path, profiles)
    return str(path)


def test_profiles_are_read_from_files_that_this_process_can_read(tmp_path):
    """An only entry counts under any name, if the file is for one network."""
    one, two, three = (LatencyProfile([t, t, t]) for t in (0.1, 0.2, 0.3))
    own = saved(tmp_path / "own.json", anything=one)
    several = saved(tmp_path / "several.json", deep=two, wide=three)
    only = saved(tmp_path / "only.json", wide=three)
    few = {"max_batch_size": 2}
    networks = {"deep": DEEP, "wide": {**DEEP, "accuracy": 70}}
    with_own = {**networks, "deep": {**DEEP, "profile": own}}

    def found(**changes):
        return {k: p.table for k, p in profiles_of_files(parse_spec(model(**changes))).items()}

    chooses = {**few, "callable": Chooses}
    assert found(**few, profile=own) == {"m": [0.1, 0.1]}
    assert found(**few, profile=several) == {}
    assert found(**chooses, variants=networks, profile=several) == {
        "deep": [0.2, 0.2],
        "wide": [0.3, 0.3],
    }
    assert found(**chooses, variants=networks, profile=only) == {"wide": [0.3, 0.3]}
    assert found(**chooses, variants=with_own, profile=only) == {
        "deep": [0.1, 0.1],
        "wide": [0.3, 0.3],
    }
    assert found(**few, profile=str(tmp_path / "none.json")) == {}
    assert found(**few) == {}


def test_only_what_a_replica_must_know_of_changes_the_version():
    replicas = {"default": {"num_replicas": 7}}
    configured = model(user_config={"a": 1})
    assert version() == version(workers=replicas) == version(**configured)
    assert version(scheduler="actor") == version(scheduler="actor", num_frontends=3)
    others = [
        version(policy="eager"),
        version(retries=5),
        version(scheduler="actor"),
        version(**model(callable=Tall, args=[1])),
        version(**model(callable=Tall, args=[2])),
        version(**model(latency_slo_ms=101)),
        *(version(workers={"default": {"max_replicas": most}}) for most in (3, 4)),
        version(workers={"default": {"max_replicas": 3, "min_replicas": 2}}),
        version(workers={"default": {"memory_mb": 900}}),
    ]
    assert len({version(), *others}) == 1 + len(others)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
fields = st.sampled_from([*AppConfig.model_fields, "callable", "latency_slo_ms", "name", "x"])
nearly = st.dictionaries(fields, json | st.dictionaries(fields, json, max_size=3), max_size=4)


@given(nearly | json)
def test_whatever_comes_nothing_but_a_value_error(data):
    try:
        assert isinstance(parse_spec(data), AppSpec)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("policy", "preempts"),
    [
        ("flex", True),
        ({"name": "flex", "kwargs": {"preemption": False}}, False),
        ("deferred_flex", True),
        ("deferred", False),
        ("auto", True),  # as the model has exit points
        ({"name": "auto", "kwargs": {"preempt": False}}, False),
    ],
)
def test_policies_that_preempt_are_known(policy, preempts):
    model = {"callable": "builtins:dict", "latency_slo_ms": 9, "exit_points": 4}
    assert parse_spec({"models": {"m": model}, "policy": policy}).policy.preempts is preempts


def test_auto_stops_nothing_without_exit_points():
    model = {"callable": "builtins:dict", "latency_slo_ms": 9}
    assert not parse_spec({"models": {"m": model}, "policy": "auto"}).policy.preempts


@pytest.mark.parametrize("policy", ["auto", None])
def test_auto_stops_at_the_exit_points_of_profile_files(tmp_path, policy):
    profile = LatencyProfile([0.01])

    def saved(name, **points):
        file = tmp_path / name
        found = {
            variant: {"points": [], "chosen": len(its), "exit_points": its, "reason": ""}
            for variant, its in points.items()
        }
        save_profiles(file, dict.fromkeys(points, profile), preemption=found)
        return str(file)

    def preempts(**said):
        model = {"callable": "builtins:dict", "latency_slo_ms": 9, **said}
        return parse_spec({"models": {"m": model}, "policy": policy}).policy.preempts

    load = {"load": "builtins:dict", "accuracy": 70}
    own, none = saved("own.json", x=["3", "7"]), saved("none.json", deep=[])
    both = saved("both.json", deep=[], wide=["3"])
    assert preempts(profile=own)
    assert not preempts(profile=own, exit_points=0)
    assert not preempts(profile=none)
    assert not preempts(profile=str(tmp_path / "later.json"))  # `build_app` reports it
    assert preempts(variants={"deep": load, "wide": load}, profile=both)
    assert not preempts(variants={"deep": load, "long": load}, profile=both)
    assert preempts(variants={"deep": load, "long": {**load, "profile": own}})
    assert not preempts(variants={"deep": load, "long": load}, profile=own)


def test_damaged_exit_points_of_a_file_are_refused(tmp_path):
    file = tmp_path / "p.json"
    save_profiles(file, {"m": LatencyProfile([0.01])}, preemption={"m": {"chosen": 3}})
    model = {"callable": Model, "latency_slo_ms": 9, "profile": str(file)}
    spec = parse_spec({"models": {"m": model}})
    with pytest.raises(ValueError, match=r"models\.m\.profile: .*preemption\.m: not a preemption"):
        build_app_from_spec(spec)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"trees": [{"x": 1}]}, "policy 'auto': trees follow from the application"),
        ({"planned": True}, "policy 'auto': planned follow from the application"),
        ({"candidates": ["ramsis"]}, r"candidates\[0\]: policy 'ramsis' cannot take over"),
    ],
)
def test_arguments_of_auto_that_are_not_the_users_are_refused(kwargs, says):
    model = {"callable": "builtins:dict", "latency_slo_ms": 9}
    with pytest.raises(ValueError, match=says):
        parse_spec({"models": {"m": model}, "policy": {"name": "auto", "kwargs": kwargs}})


def test_variants_by_list_or_by_name_are_the_same():
    listed = [ray_slo.Variant("deep", accuracy=80, load="tests.serve.config.test_spec:load")]
    (one,) = parse_spec(model(callable=Chooses, variants=listed)).models["m"].variants.values()
    (other,) = parse_spec(variants()).models["m"].variants.values()
    assert one == other
    assert one.loader()() is None
    with pytest.raises(ValueError, match="two variants are named 'deep'"):
        parse_spec(model(callable=Chooses, variants=listed * 2))


@pytest.mark.parametrize("accuracy", [0, 0.5, 100])
def test_any_percentage_is_an_accuracy(accuracy):
    assert parse_spec(model(accuracy=accuracy)).models["m"].accuracy == accuracy
    (variant,) = parse_spec(variants(accuracy=accuracy)).models["m"].variants.values()
    assert variant.accuracy == accuracy


def test_variant_names_are_unique_in_an_application():
    both = {"callable": Chooses, "latency_slo_ms": 9, "variants": {"deep": DEEP, "m": DEEP}}
    found = parse_spec(args(models={"a": both, "m": Model_, "b": both})).variants()
    assert set(found) == {"a/deep", "b/deep", "a/m", "b/m", "m/m"}
    assert (found["b/deep"].model, found["b/deep"].name, found["b/deep"].accuracy) == (
        *("b", "deep", 80),
    )
    assert set(parse_spec(args(models={"a": both})).variants()) == {"deep", "m"}
    assert parse_spec(args()).variants()["m"].spec is None


def test_one_policy_is_the_default_for_all():
    assert parse_spec(args()).policy.name == "auto"
    assert parse_spec(variants()).policy.name == "auto"
    assert parse_spec({**variants(), "policy": "ramsis"}).policy.name == "ramsis"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"accuracy": 120, "load": load}, "Variant 'v': accuracy: must be from 0 to 100, got 120"),
        ({"accuracy": 10, "load": 7}, "Variant 'v': load: must be a text or a function or"),
    ],
)
def test_mistakes_in_a_variant(wrong, says):
    with pytest.raises(ValueError) as error:
        ray_slo.Variant("v", **wrong)
    assert says in str(error.value)


def test_batch_method_must_fit_the_variants():
    one = [ray_slo.Variant("v", accuracy=1, load=load)]
    with pytest.raises(
        ValueError, match=r"with variants it must be __call__\(self, network, items"
    ):
        ray_slo.deployment(latency_slo_ms=50, variants=one)(Model)
    with pytest.raises(ValueError, match=r"takes \(network, items\); without variants it must be"):
        ray_slo.deployment(latency_slo_ms=50)(Chooses)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.serve.config.test_spec:lod", "cannot import"),
        ("tests.serve.config.test_spec:DEEP", "is a mapping"),
    ],
)
def test_loader_that_cannot_work_is_said_before_anything_is_deployed(name, says):
    with pytest.raises(ValueError, match=rf"models\.m\.variants\.deep\.load: .*{says}"):
        build_app_from_spec(parse_spec(variants(load=name)))


def test_variants_for_the_scheduler_have_no_user_code():
    bare = parse_spec(variants(args=[1], kwargs={"a": 2})).without_code().models["m"]
    assert bare.variants["deep"].load == ""
    assert (bare.variants["deep"].args, bare.variants["deep"].kwargs) == ((), {})
    assert bare.variants["deep"].accuracy == 80


def test_variants_change_the_version():
    versions = [version(**variants(**c)) for c in ({}, {}, {"accuracy": 81}, {"args": [1]})]
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            variants(args=["base", 2]),
            "models.m.variants.deep: args and kwargs do not fit load: too many positional "
            "arguments; it takes layers",
        ),
        (
            model(callable=Tall, kwargs={"hight": 1}),
            "models.m: args and kwargs do not fit Tall: missing a required argument: 'height'; it "
            "takes height, width",
        ),
        (
            variants(load="ray_slo.models.text:load", kwargs={"name": "bert-huge"}),
            "models.m.variants.deep: name: got 'bert-huge', wanted one of bert-tiny, bert-mini,",
        ),
        *(
            (
                variants(load=load, kwargs={"name": name, "weights": "default"}),
                "models.m.variants.deep: weights: got 'default', wanted 'none' (random), 'local' (",
            )
            for load, name in (
                ("ray_slo.models.text:load", "bert-tiny"),
                ("ray_slo.models.vision:load", "resnet18"),
                ("deployments.traffic.detection:load", "ssdlite320_mobilenet_v3_large"),
            )
        ),
        (
            variants(load="deployments.ocr:load_detector", args=["det1"]),
            "models.m.variants.deep: variant: got 'det1', wanted one of det320,",
        ),
        (
            variants(load="ray_slo.demo.digits:load_variant", args=["digits-xxl"]),
            "models.m.variants.deep: ",
        ),
    ],
)
def test_arguments_that_no_worker_could_load_are_refused_here(config, says):
    with pytest.raises(ValueError) as error:
        build_app_from_spec(parse_spec(config))
    assert says in str(error.value)


def test_published_networks_are_checked_without_torchvision_where_it_is_missing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        vision.load.check("resnet50", weights="none")
        vision.load.check("no such network")  # a worker says so
