"""The autoscaling policy, with an actor that answers as slowly as a test wants."""

from types import SimpleNamespace

import pytest

from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner import autoscaling as plan_autoscaling
from ray_slo.serve.planner.autoscaling import PlanAutoscaling, autoscaling
from tests.waiting import until


class Ray:
    """Calls, the last of which is answered when a test says so."""

    def __init__(self):
        self.asked, self.answers, self.looked_up = [], {}, []
        self.alive = True

    @property
    def target(self):
        return SimpleNamespace(remote=lambda *args: self.asked.append(args) or len(self.asked))

    def find(self, app_key):
        self.looked_up.append(app_key)
        if not self.alive:
            raise ValueError("no such actor")
        return self

    def wait(self, refs, timeout):
        assert timeout == 0
        return [r for r in refs if r in self.answers], [r for r in refs if r not in self.answers]

    def get(self, ref):
        if isinstance(self.answers[ref], Exception):
            raise self.answers[ref]
        return self.answers[ref]

    def answer(self, value):
        self.answers[len(self.asked)] = value


@pytest.fixture
def fake(monkeypatch):
    fake = Ray()
    monkeypatch.setattr(plan_autoscaling, "ray", SimpleNamespace(wait=fake.wait, get=fake.get))
    monkeypatch.setattr(plan_autoscaling, "find_planner", fake.find)
    monkeypatch.setattr(plan_autoscaling, "_ASK_EVERY_S", 0.0)
    return fake


def context(target=2, least=1, most=4, deployment="pipeline-worker"):
    return SimpleNamespace(
        app_name="app",
        deployment_name=deployment,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


def asked(policy, fake, count, **seen):
    """Call the policy until it has asked so often; the lookup is done aside."""
    until(lambda: policy(context(**seen)) and len(fake.asked) == count)


def test_it_follows_the_plan_with_one_call_under_way(fake):
    policy = PlanAutoscaling("pipeline", "default")
    asked(policy, fake, 1)
    assert fake.looked_up == ["app#pipeline"]
    assert [policy(context())[0] for _ in range(3)] == [2, 2, 2]  # what there is
    assert fake.asked == [("default", 4)]
    fake.answer(3)
    assert policy(context()) == (3, {})
    assert len(fake.asked) == 2
    assert policy(context(target=3))[0] == 3


def test_bounds_hold(fake):
    policy = PlanAutoscaling("pipeline", "default")
    asked(policy, fake, 1)
    fake.answer(9)
    assert policy(context(most=4))[0] == 4
    fake.answer(0)
    assert policy(context(least=1))[0] == 1


def test_without_a_plan_yet_and_without_an_actor_the_last_target_holds(fake):
    policy = PlanAutoscaling("pipeline", "default")
    asked(policy, fake, 1)
    fake.answer(None)
    assert policy(context(target=2))[0] == 2
    fake.answer(4)
    assert policy(context(target=2))[0] == 4
    fake.answer(ConnectionError("the actor died"))
    assert policy(context(target=4))[0] == 4
    fake.alive = False

    def looked_up_again():
        assert policy(context(target=4))[0] == 4
        return len(fake.looked_up) > 2

    until(looked_up_again)
    fake.alive = True
    asked(policy, fake, 4)
    fake.answer(2)
    assert policy(context(target=4))[0] == 2


def test_an_actor_that_never_answers_is_looked_up_anew(fake, monkeypatch):
    policy = PlanAutoscaling("pipeline", "default")
    asked(policy, fake, 1)
    monkeypatch.setattr(plan_autoscaling, "_ANSWER_S", 0.0)
    asked(policy, fake, 2)
    assert len(fake.looked_up) == 2


def test_deployments_that_serve_has_numbered_belong_together(fake):
    policy = PlanAutoscaling("pipeline", "gpu")
    asked(policy, fake, 1, deployment="pipeline-gpu-worker_1")
    assert fake.looked_up == ["app#pipeline_1"]


def test_what_serve_is_told():
    worker = {"min_replicas": 1, "num_replicas": 2, "max_replicas": 5}
    spec = parse_spec(
        {
            "pipeline": {
                "latency_slo_ms": 100,
                "tasks": {"only": {"callable": "apps:Tasks"}},
            },
            "workers": {"default": worker},
            "planner": {"name": "loki", "interval_s": 7},
        }
    )
    config = autoscaling(spec, "default")
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)  # the brain waits
    made = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert isinstance(made, PlanAutoscaling)
