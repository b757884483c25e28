"""The floor per model: which requests are refused, and that the floor is reached."""

import pytest

from ray_slo.core import BatchOutcome, Cluster, LatencyProfile, Model, Request, Variant
from ray_slo.policies import make_policy
from ray_slo.policies.auto_floor import Floor
from ray_slo.simulation import Workload, simulate

SECONDS = {"light": 0.004, "medium": 0.010, "heavy": 0.020}
TENTHS = {"light": 10, "medium": 10, "heavy": 4}  # in time


def second(floor, at, tenths=TENTHS, first=0):
    """Ten requests of each model in a second; those that stayed, by model."""
    stayed = dict.fromkeys(SECONDS, 0)
    for i in range(10):
        now = at + i / 10
        for k, (model, took_s) in enumerate(SECONDS.items()):
            r = Request(first + 3 * i + k, model, now, now + 0.1)
            if floor.admitted(now, [r]):
                stayed[model] += 1
                end = now + (took_s if i * tenths[model] % 10 < tenths[model] else 0.2)
                floor.ran(BatchOutcome(r.id, [r], end - took_s, end))
    return stayed


def seconds(floor, count, tenths=TENTHS, at=0):
    stayed = [second(floor, at + n, tenths, 1000 * (at + n)) for n in range(count)]
    return {model: sum(one[model] for one in stayed) for model in SECONDS}


def test_the_costliest_model_above_the_floor_gives_up_requests():
    floor = Floor(0.6)
    stayed = seconds(floor, 20)
    assert stayed["light"] == stayed["heavy"] == 200
    assert 100 < stayed["medium"] < 190
    refused = floor.refused()
    assert {r.model for r in refused} == {"medium"}
    assert len(refused) == 200 - stayed["medium"]
    assert floor.refused() == []


def test_the_next_one_follows_if_that_does_not_do():
    stayed = seconds(Floor(1.0), 60)
    assert stayed["heavy"] > 570
    assert stayed["medium"] < stayed["light"] < 450


def test_when_the_overload_is_over_all_stay_again():
    floor = Floor(0.9)
    assert seconds(floor, 20)["medium"] < 200
    well = dict.fromkeys(SECONDS, 10)
    seconds(floor, 30, well, at=20)
    assert seconds(floor, 10, well, at=50) == dict.fromkeys(SECONDS, 100)


@pytest.mark.parametrize(
    ("shares", "caps", "after"),
    [
        # The mean is 0.8 and the aim 0.56. The share of medium counts, or its cap if that is lower.
        ((1.0, 1.0, 0.4), {}, {"medium": 0.97}),
        ((1.0, 0.9, 0.5), {}, {"medium": 0.97 * 0.9}),
        ((1.0, 0.9, 0.5), {"medium": 0.8}, {"medium": 0.97 * 0.8}),
        # Medium is above the aim of 0.442, but 97 % of its share are not.
        ((1.0, 0.455, 0.44), {}, {"light": 0.97}),
        # The worst has a cap itself, which rises.
        ((1.0, 0.3, 0.9), {"light": 0.4, "medium": 0.6}, {"light": 0.4, "medium": 0.6 / 0.97}),
        # All is well: the cap of the least work rises, and ends at 1.
        ((1.0, 0.9, 0.8), {"light": 0.8, "medium": 0.6}, {"light": 0.8 / 0.97, "medium": 0.6}),
        ((1.0, 0.9, 0.8), {"light": 0.97, "medium": 0.6}, {"medium": 0.6}),
        ((1.0, 0.9, 0.8), {"medium": 0.98}, {}),
        ((1.0, 0.9, 0.8), {}, {}),
        # The worst is less than 1 % above the aim of 0.609.
        ((1.0, 1.0, 0.61), {"light": 0.8}, {"light": 0.8}),
    ],
)
def test_a_cap_falls_or_rises_by_three_percent(shares, caps, after):
    floor = Floor(0.7)
    for i, (model, took_s) in enumerate(SECONDS.items()):
        two = [Request(2 * i + k, model, 0.0, 1.0) for k in range(2)]
        floor.ran(BatchOutcome(i, two, 0.5, 0.5 + 2 * took_s))
        assert floor._work_s(model) == pytest.approx(took_s)
    floor._shares, floor._caps = dict(zip(SECONDS, shares, strict=True)), dict(caps)
    floor._set_caps()
    assert floor._caps == pytest.approx(after)


def test_what_stayed_stays_when_it_comes_again():
    floor = Floor(1.0)
    early = Request(-1, "medium", 0.0, 100.0)
    assert floor.admitted(0.0, [early]) == [early]
    seconds(floor, 20)
    late = Request(-2, "medium", 20.0, 20.1)
    assert floor.admitted(20.0, [early, late]) == [early]
    assert floor.cancelled([early, late]) == [early]
    assert late not in floor.refused()


def test_requests_that_never_end_are_forgotten():
    floor = Floor(0.5)
    for i in range(1000):
        floor.admitted(i / 10, [Request(i, "m", i / 10, i / 10 + 0.1)])
    assert len(floor._present) < 50


def test_one_model_has_no_floor():
    floor = Floor(1.0)
    for i in range(100):
        r = Request(i, "m", i / 10, i / 10 + 0.1)
        assert floor.admitted(r.arrival, [r]) == [r]
        floor.ended([r])


@pytest.mark.slow
def test_it_is_reached_in_overload():
    """Without it, the heavy model has less than half of the mean."""
    models = {
        "light": LatencyProfile.linear(0.001, 0.004),
        "heavy": LatencyProfile.linear(0.006, 0.020),
    }
    cluster = Cluster.uniform(
        [Model(name, 0.1, (Variant(name, {"default": p}),)) for name, p in models.items()], 2
    )
    found = {}
    for floor in (0.0, 0.9):
        policy = make_policy("auto", {"fairness": floor})
        report = simulate(policy, cluster, Workload.poisson(1100.0), duration_s=9.0, warmup_s=4.0)
        shares = [1 - report.bad_rate(name) for name in models]
        found[floor] = min(shares) / (sum(shares) / 2)
    assert found.pop(0.0) < 0.5
    assert found == {floor: pytest.approx(floor, abs=0.05) for floor in found}
