"""Application specs: what is accepted, and what is said about the rest."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ray_slo
from ray_slo.serve.deployment import build_app_from_spec
from ray_slo.serve.spec import AppSpec, parse_spec


class Model:
    def __call__(self, items):
        return items


class InstancePreprocess(Model):
    def preprocess(self, item):
        return item


class Generator:
    def __call__(self, items):
        yield from items


class TakesNothing:
    def __call__(self):
        return []


def args(**changes):
    return {"models": {"m": {"callable": Model, "latency_slo_ms": 100}}, **changes}


def model(**changes):
    return args(models={"m": {"callable": Model, "latency_slo_ms": 100, **changes}})


def test_defaults():
    spec = parse_spec(args())
    assert (spec.policy.name, spec.embedded, spec.deployment_name) == ("deferred", True, "m")
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
        (model(latency_slo_ms=0), "models.m.latency_slo_ms: Input should be greater than 0, got 0"),
        (model(latency_slo_ms="fast"), "got 'fast'"),
        (args(models={"m": {"callable": Model}}), "models.m.latency_slo_ms: required"),
        (args(models={"m": {"latency_slo_ms": 5}}), "models.m.callable: required"),
        (args(models={}), "models: "),
        ({}, "models: required"),
        (args(models={"a/b": Model_}), "model name 'a/b': use ASCII letters, digits"),
        (args(models={"é": Model_}), "model name 'é': use ASCII letters, digits"),
        (args(scheduler="remote"), "scheduler: Input should be 'auto', 'actor' or 'embedded', got"),
        (args(scheduler="embedded", num_frontends=2), "num_frontends is 2; choose 'actor' or"),
        (args(num_frontends=0), "num_frontends: Input should be greater than or equal to 1, got 0"),
        (args(policy="defered"), "policy 'defered' is unknown; choose one of deferred, "),
        (args(policy={"name": "eager", "kwargs": {"x": 1}}), "policy 'eager' has no argument x"),
        (args(policy={"nam": "eager"}), "policy.nam: unknown key (did you mean 'name'?)"),
        (args(workers={}), "workers: name at least one kind of worker"),
        (args(workers={"cpu": {"replicas": 2}}), "workers.cpu.replicas: unknown key"),
        (args(workers={"cpu": {"num_replicas": 0}}), "workers.cpu.num_replicas: Input should be"),
        (model(accuracy=101), "models.m.accuracy: Input should be less than or equal to 100"),
        (args(version=3), "version: unknown key"),
    ],
)
def test_mistakes_name_field_value_and_choices(wrong, says):
    with pytest.raises(ValueError) as error:
        parse_spec(wrong)
    assert says in str(error.value)


def test_every_mistake_is_named_at_once():
    with pytest.raises(ValueError) as error:
        parse_spec({**model(latency_slo_ms=-1), "retries": -1, "polcy": 1})
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (InstancePreprocess, "preprocess must be a @staticmethod or @classmethod"),
        (Generator, "is a generator; a coordinated batch returns a list"),
        (TakesNothing, "takes no argument"),
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
    with pytest.raises(ValueError, match="latency_slo_ms: Input should be greater than 0, got -5"):
        ray_slo.deployment(latency_slo_ms=-5)(Model)
    with pytest.raises(ValueError, match="num_replica: unknown key"):
        ray_slo.deployment(latency_slo_ms=5)(Model).options(num_replica=2)
    with pytest.raises(RuntimeError, match="is not constructed directly"):
        ray_slo.deployment(latency_slo_ms=5)(Model)()


def test_config_may_name_a_decorated_class():
    decorated = ray_slo.deployment(latency_slo_ms=5)(Model)
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


def test_only_what_a_replica_must_know_of_changes_the_version():
    replicas = {"default": {"num_replicas": 7}}
    configured = model(user_config={"a": 1})
    assert version() == version(workers=replicas) == version(**configured)
    assert version(scheduler="actor") == version(scheduler="actor", num_frontends=3)
    others = [
        version(policy="eager"),
        version(retries=5),
        version(scheduler="actor"),
        version(**model(args=[1])),
        version(**model(latency_slo_ms=101)),
    ]
    assert len({version(), *others}) == 6


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
fields = st.sampled_from([*AppSpec.model_fields, "callable", "latency_slo_ms", "name", "x"])
nearly = st.dictionaries(fields, json | st.dictionaries(fields, json, max_size=3), max_size=4)


@given(nearly | json)
def test_whatever_comes_nothing_but_a_value_error(data):
    try:
        assert isinstance(parse_spec(data), AppSpec)
    except ValueError as error:
        assert str(error)


def test_a_policy_that_preempts_is_refused_live():
    for policy in ({"name": "flex"}, {"name": "deferred_flex"}):
        with pytest.raises(ValueError, match=r"policy.*preempts running batches"):
            parse_spec(
                {
                    "models": {"m": {"callable": "builtins:dict", "latency_slo_ms": 9}},
                    "policy": policy,
                }
            )
    calm = {"name": "flex", "kwargs": {"preemption": False}}
    spec = parse_spec(
        {"models": {"m": {"callable": "builtins:dict", "latency_slo_ms": 9}}, "policy": calm}
    )
    assert spec.policy.name == "flex"
