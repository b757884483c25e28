"""What the metrics add up to."""

from types import SimpleNamespace

import pytest

from ray_slo.planning.brains.brain import Plans
from ray_slo.serve.watch import metrics


class Kept:
    """A counter or gauge that remembers."""

    values: dict

    def __init__(self, name, description, tag_keys):
        self.name = name

    def inc(self, by, tags):
        assert by > 0
        key = (self.name, *tags.values())
        Kept.values[key] = Kept.values.get(key, 0) + by

    def set(self, value, tags=None):
        Kept.values[(self.name, *(tags or {}).values())] = value


@pytest.fixture
def kept(monkeypatch):
    Kept.values = {}
    monkeypatch.setattr(metrics, "metrics", SimpleNamespace(Counter=Kept, Gauge=Kept))
    return Kept.values


def test_plans_are_counted_on_when_the_planner_is_a_new_one(kept):
    plan = metrics.PlanMetrics()
    plan.planned(Plans())  # an actor that has just begun
    assert kept == {}
    for plans in (
        Plans("a", 2, 0, 0.25),
        Plans("a", 2, 1, 0.25),
        Plans("a", 3, 1, 0.5),
        Plans("b", 1, 2),
        Plans("b", 1, 2),
    ):
        plan.planned(plans)
    assert kept == {
        ("serve_slo_plans_total", "planned"): 4,
        ("serve_slo_plans_total", "failed"): 3,
        ("serve_slo_planning_s",): 0.5,
    }


@pytest.mark.parametrize("app_key", ["app#m", "app#m#group"])
def test_a_scheduler_that_serve_does_not_know_says_whose_it_is(kept, app_key):
    metrics.SchedulerMetrics(app_key).unclaimed()
    assert kept == {("serve_slo_unclaimed_batches_total", "app", "m"): 1}


def test_a_scheduler_in_a_frontend_is_tagged_by_serve(kept):
    metrics.SchedulerMetrics().unclaimed()
    assert kept == {("serve_slo_unclaimed_batches_total",): 1}
