"""The metrics and their sums."""

import math
from types import SimpleNamespace

import pytest

from ray_slo.core.policy import Expected
from ray_slo.planning.brains.brain import Plans
from ray_slo.serve.watch import metrics


class Kept:
    """A counter or gauge that remembers."""

    values: dict

    def __init__(self, name, description, boundaries=(), *, tag_keys):
        self.name = name

    def inc(self, by, tags):
        assert by > 0
        key = (self.name, *tags.values())
        Kept.values[key] = Kept.values.get(key, 0) + by

    def observe(self, value, tags):
        """Histograms are of no concern here."""

    def set(self, value, tags=None):
        Kept.values[(self.name, *(tags or {}).values())] = value


@pytest.fixture
def kept(monkeypatch):
    Kept.values = {}
    monkeypatch.setattr(
        metrics, "metrics", SimpleNamespace(Counter=Kept, Gauge=Kept, Histogram=Kept)
    )
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


def test_the_share_of_bad_requests_over_the_last_minute(kept, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    share = metrics.FrontendMetrics()
    assert share.bad_rate() == {}
    for model, outcome, number in (("m", "refused", 3), ("n", "failed", 1), ("n", "cancelled", 5)):
        share.unanswered(model, outcome, "why", number)
    now += 30.5
    for met in (True, True, False, True, True, True, True):
        share.answered(answer(met))
    share.unanswered("m", "invalid", "bad_input")
    assert share.bad_rate() == {"m": 0.4, "n": 1.0}
    now += 30.0
    assert share.bad_rate() == {"m": pytest.approx(1 / 7)}
    share.refresh(0)
    assert kept["serve_slo_bad_rate", "m"] == pytest.approx(1 / 7)
    now += 61.0
    assert share.bad_rate() == {}


def test_requests_are_counted_by_class(kept):
    counts = metrics.FrontendMetrics()
    counts.unanswered("m@gold", "refused", "shed", 2)
    counts.unanswered("m", "refused", "shed")
    counts.answered(SimpleNamespace(**{**vars(answer(True)), "slo_class": "gold"}))
    assert not kept  # sums are told about once a second
    counts.refresh(0)
    name = "serve_slo_requests_total"
    assert kept[name, "m", "gold", "refused", "shed"] == 2
    assert kept[name, "m", "", "refused", "shed"] == 1
    assert kept[name, "m", "gold", "ok", ""] == 1


def answer(met):
    return SimpleNamespace(
        model="m",
        variant="v",
        deadline_met=met,
        latency_ms=1.0,
        latency_slo_ms=2.0,
        queue_ms=0.5,
        accuracy=90.0,
        slo_class="",
        stages=(),
        batch_size=2,
        exec_ms=0.5,
    )


def test_what_is_expected_no_more_is_no_number(kept):
    share = metrics.FrontendMetrics()
    share.refresh(0, {"m": Expected(90.0, 0.01), "n": Expected(None, 0.5)})
    accuracy, bad_rate = "serve_slo_expected_accuracy", "serve_slo_expected_bad_rate"
    assert (kept[accuracy, "m"], kept[bad_rate, "m"], kept[bad_rate, "n"]) == (90.0, 0.01, 0.5)
    assert math.isnan(kept[accuracy, "n"])
    share.refresh(0, {"n": Expected(80.0, 0.25)})
    assert math.isnan(kept[accuracy, "m"]) and math.isnan(kept[bad_rate, "m"])
    assert (kept[accuracy, "n"], kept[bad_rate, "n"]) == (80.0, 0.25)
    kept.clear()
    share.refresh(0, {"n": Expected(80.0, 0.25)})
    assert (accuracy, "m") not in kept
