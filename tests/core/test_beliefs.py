"""What a belief may be at most: see also `tests/simulation/test_learning`."""

import math

import pytest

from ray_slo.core import LatencyProfile, Request
from ray_slo.core.beliefs import Belief, Beliefs, Caution
from ray_slo.core.trees import Tree, TreeTask

SCATTERED = [0.1, 0.12, 0.1, 0.3] * 4  # a quarter takes three times the typical time


def beliefs_of(trees, variants, quantile=0.95):
    found = Beliefs(variants, {tree.name: tree for tree in trees})
    for variant in variants:
        found[variant, "gpu"] = Belief(LatencyProfile([0.1]), quantile)
    return found


def after(beliefs, variant, seconds):
    for each in seconds:
        beliefs.ran(variant, "gpu", [(1, each)], 0.0)
    return beliefs[variant, "gpu"].profile.latency(1)


@pytest.mark.parametrize(
    "slo_s, quantile, seconds",
    [
        (1.0, 0.95, 0.3),  # half of the SLO is more
        (0.5, 0.95, 0.25),  # half of the SLO
        (0.2, 0.95, 0.11),  # the typical time and a tenth
        (0.2, 0.99, 0.3),  # who asks for more caution gets it
    ],
)
def test_a_belief_leaves_room_to_wait_for_a_batch(slo_s, quantile, seconds):
    beliefs = beliefs_of([Tree.of_model("m", {"": slo_s})], {"v": "m"}, quantile)
    assert after(beliefs, "v", SCATTERED) == pytest.approx(seconds)


def test_tasks_share_the_half_of_the_slo_and_the_fastest_variant_counts():
    tasks = (TreeTask("first", "a"), TreeTask("second", "b", "first"))
    variants = {"a": "a", "b-slow": "b", "b-quick": "b"}
    beliefs = beliefs_of([Tree("chain", tasks, {"": 0.8})], variants)
    after(beliefs, "b-slow", [0.4] * 16)
    after(beliefs, "b-quick", [0.1] * 16)
    assert after(beliefs, "a", SCATTERED) == pytest.approx(0.2)  # of 0.4 s for both tasks


def test_a_doubted_belief_keeps_its_bound():
    beliefs = beliefs_of([Tree.of_model("m", {"": 0.5})], {"v": "m"})
    after(beliefs, "v", SCATTERED)
    beliefs["v", "gpu"].forget()
    beliefs["v", "gpu"].observe([(1, each) for each in SCATTERED], 1.0)
    assert beliefs["v", "gpu"].profile.latency(1) == pytest.approx(0.25)


def test_a_rate_is_that_of_typical_batches_that_are_predicted_to_be_in_time():
    belief = Belief(LatencyProfile([0.1, 0.2, 0.3, 0.4], measured_to=0))
    assert belief.rate_within(0.5) == math.inf  # nothing was measured
    belief = Belief(LatencyProfile([0.1, 0.2, 0.3, 0.4]))
    assert belief.rate_within(0.5) == pytest.approx(10.0)
    assert belief.rate_within(0.5, most=2) == pytest.approx(10.0)
    belief.observe([(1, seconds) for seconds in SCATTERED], 0.0)
    assert belief.profile.max_batch_within(0.5) == 1
    assert belief.rate_within(0.5) == pytest.approx(1 / 0.1)


def test_caution_follows_the_share_of_late_answers():
    caution = Caution()
    assert not caution.answered(0, 5)
    assert caution.quantile == 0.95  # it cannot be more cautious
    assert caution.answered(300, 0)
    assert caution.quantile == pytest.approx(0.8)
    caution.answered(199, 1)
    assert caution.quantile == pytest.approx(0.8)  # one late answer in two hundred
    caution.answered(1000, 0)
    assert caution.quantile == 0.5
    caution.answered(0, 5)
    assert caution.quantile == 0.95


def answered(beliefs, task, in_time, late=0):
    requests = [Request(i, "?", 0.0, 1.0, task=task) for i in range(in_time + late)]
    beliefs.answered(requests[:in_time], 1.0)
    beliefs.answered(requests[in_time:], 1.1)


@pytest.mark.parametrize("quantile, seconds", [(0.95, 0.1), (0.99, 0.3)])
def test_answers_in_time_make_predictions_less_cautious_unless_that_is_not_wished(
    quantile, seconds
):
    beliefs = beliefs_of([Tree.of_model("m", {"": 9.0})], {"v": "m"}, quantile)
    assert after(beliefs, "v", SCATTERED) == pytest.approx(0.3)
    answered(beliefs, "m", 1000)
    assert beliefs["v", "gpu"].profile.latency(1) == pytest.approx(seconds, rel=0.01)
    answered(beliefs, "m", 0, late=5)
    assert beliefs["v", "gpu"].profile.latency(1) == pytest.approx(0.3)


def test_tasks_of_a_tree_are_equally_cautious_and_the_last_one_tells_who_is_in_time():
    tasks = (TreeTask("first", "a"), TreeTask("second", "b", "first"))
    trees = [Tree("chain", tasks, {"": 9.0}), Tree.of_model("b2", {"": 9.0})]
    beliefs = beliefs_of(trees, {"a": "a", "b": "b", "b2": "b2"})
    for variant in ("a", "b", "b2"):
        after(beliefs, variant, SCATTERED)

    def expected():
        return [beliefs[v, "gpu"].profile.latency(1) for v in ("a", "b", "b2")]

    answered(beliefs, "first", 1000)
    assert expected() == pytest.approx([0.3, 0.3, 0.3])
    answered(beliefs, "second", 1000)
    assert expected() == pytest.approx([0.1, 0.1, 0.3], rel=0.01)
    answered(beliefs, "first", 0, late=5)
    assert expected() == pytest.approx([0.3, 0.3, 0.3])
