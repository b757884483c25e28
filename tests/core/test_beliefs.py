"""What a belief may be at most: see also `tests/simulation/test_learning`."""

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.beliefs import Belief, Beliefs
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
