"""Functions that `composition` and `autoscale-day` use."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.own.applications import FEATURES, GROUPS, PIPELINE, SEVERAL, SIZES, application
from benchmarks.own.serve_rule import Ongoing, Rule, ServeRule
from benchmarks.own.split import Hand, pools
from ray_slo.core.decisions import Decision
from ray_slo.core.requests import Request
from ray_slo.core.trees import Tree
from ray_slo.planning import auto
from ray_slo.planning.brains.brain import Counts, Seen, WorkerSays


@pytest.mark.parametrize("features", list(itertools.combinations(FEATURES, 2)))
def test_every_pair_is_an_application(features):
    case = application(features, 5.0, 0)
    assert set(case.workloads) == set(case.problem.streams)
    assert all(w.arrivals.times_s for w in case.workloads.values())
    assert (GROUPS in features) == all(kind.group for kind in case.problem.kinds)
    assert all((w.sizes is not None) == (SIZES in features) for w in case.workloads.values())


def test_a_split_gives_every_part_the_workers_that_do_best():
    case = application((SEVERAL, PIPELINE), 1.0, 0)
    hand = Hand(case, 0)
    worth = {
        ("vision",): [0, 1, 5, 5, 5],
        ("speech",): [0, 4, 4, 4, 4],
        ("photo",): [0, 1, 2, 2, 2],
    }

    def best_of(part, workers):
        if len(part) > 1:
            return 0.0
        return worth[part][min(dict(workers).get("fast", 0), 4)]

    hand._best_of = best_of
    total = sum(len(w.arrivals.times_s) for w in case.workloads.values())
    assert hand.best({"fast": 5}) * total == pytest.approx(5 + 4 + 2)


def test_what_scales_is_compared_with_its_mean():
    case = application((SEVERAL, "autoscaling"), 1.0, 0)
    assert pools(case, {"fast": 6.3}) == [{"fast": 7}]
    assert pools(application((SEVERAL, "budget"), 1.0, 0), None) == [{"fast": 8}]


class Idle:
    """Does nothing."""

    serves_late = False

    def requests_arrived(self, now, requests):
        pass

    requests_cancelled = requests_arrived

    def decide(self, now):
        return Decision()


def rule_of(rule, workers=10):
    case = application((), 1.0, 0)
    kind = replace(case.problem.kinds[0], min_workers=1, max_workers=workers)
    ongoing = Ongoing(Idle())
    return ServeRule(replace(case.problem, kinds=(kind,)), rule, {"vision": 2}, ongoing), ongoing


def test_serve_scales_after_its_delays():
    brain, ongoing = rule_of(
        Rule(2.0, upscale_delay_s=3.0, downscale_delay_s=10.0, look_back_s=1.0)
    )
    requests = [Request(i, "vision", 0.0, 1.0) for i in range(12)]
    ongoing.requests_arrived(0.0, requests)
    targets = []
    for now in range(1, 6):
        brain.counted(float(now), 1.0, Counts())
        targets.append(brain.target("fast"))
    assert targets == [2, 2, 2, 6, 6]  # 12 requests over 2, wanted from 1 s on
    ongoing.requests_cancelled(5.0, requests[:10])
    targets = []
    for now in range(6, 20):
        brain.counted(float(now), 1.0, Counts())
        targets.append(brain.target("fast"))
    assert targets.index(1) in (10, 11)  # the mean over a second is below from 6 or 7 s on
    assert set(targets) == {6, 1}


def test_serve_gives_each_worker_one_model():
    brain, _ = rule_of(Rule())
    seen = Seen({w: WorkerSays(w, "fast") for w in ("a", "b", "c")})
    told = brain.wanted(0.0, seen, hopeless=False)
    assert [told[w].keep for w in "abc"] == [("vision-l",), ("vision-l",), ()]
    assert isinstance(brain.problem(0.0, seen), dict)


def test_a_tree_of_one_has_the_classes_that_it_is_asked_for():
    case = application(("SLO classes", "sizes"), 1.0, 0)
    (tree,) = case.problem.trees
    assert isinstance(tree, Tree) and isinstance(case.problem, auto.Problem)
    assert tree.slos_s["gold"] < tree.slos_s[""]
