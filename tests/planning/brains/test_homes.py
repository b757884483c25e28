"""Groups that a planner finds and keeps."""

import pytest

from ray_slo.core import LatencyProfile
from ray_slo.core.trees import Tree
from ray_slo.planning.auto import Demand, Kind, Model, Problem, Variant
from ray_slo.planning.brains.auto import AutoBrain, AutoSetting
from ray_slo.planning.brains.brain import NotYet, Seen, Wanted, WorkerSays
from ray_slo.planning.brains.homes import Homes

KINDS = {"a-cpu": "a", "a-gpu": "a", "b": "b"}
MODELS = {"l": "a", "m": "b"}
VARIANTS = {"l-deep": "l", "l-flat": "l", "m": "m"}


def says(worker, kind, group, *loaded):
    return WorkerSays(worker, kind, frozenset(loaded), group=group)


def seen(*workers):
    return Seen({w.worker: w for w in workers})


def test_workers_are_sent_to_the_group_of_their_kind():
    homes = Homes(KINDS, MODELS, VARIANTS)
    there = seen(says("u", "a-gpu", None), says("v", "b", "b"))
    sent = homes.send_home({"u": Wanted((), ("l-deep",)), "v": Wanted((), ("m",))}, there)
    assert sent == {
        "u": Wanted((), ("l-deep",), group="a"),
        "v": Wanted((), ("m",), group="b"),
    }


def test_requests_may_come_when_every_model_is_served_in_its_group():
    homes = Homes(KINDS, MODELS, VARIANTS)
    first = homes.routing
    assert (first.routes, first.groups, first.complete) == (MODELS, ("a", "b"), False)
    homes.look(seen(says("u", "a-gpu", "a", "l-flat"), says("v", "b", None, "m")))
    assert homes.routing == first  # v has not told its group's scheduler yet
    homes.look(seen(says("u", "a-gpu", "a", "l-flat"), says("v", "b", "b", "m")))
    assert homes.routing.complete
    assert homes.routing.number > first.number
    homes.look(seen())
    assert homes.routing.complete


def test_without_groups_there_is_nothing_to_say():
    homes = Homes({}, {}, VARIANTS)
    homes.look(seen(says("u", "cpu", None, "m")))
    assert homes.routing is None
    sent = homes.send_home({"u": Wanted((), ("m",))}, seen(says("u", "cpu", None)))
    assert sent == {"u": Wanted((), ("m",))}


def grouped(assigns):
    """Two models, each in a group of its own; the one has two kinds of workers."""
    models = tuple(
        Model(m, tuple(Variant(v, 90.0, {}) for v, of in VARIANTS.items() if of == m))
        for m in MODELS
    )
    trees = tuple(Tree.of_model(m, {"": 0.5}) for m in MODELS)
    kinds = tuple(Kind(name, 1, 4, 1.0, group=group) for name, group in KINDS.items())
    demand = dict.fromkeys(MODELS, Demand(20.0))
    problem = Problem(models, trees, demand, kinds, budget_per_hour=8.0, group_of=MODELS)
    first = dict.fromkeys(KINDS, 1)
    return AutoBrain(AutoSetting(problem, first, scales=frozenset(KINDS), assigns=assigns))


FAST = LatencyProfile.linear(0.01, 0.02, 8)
PROFILES = {
    (variant, kind): FAST
    for variant, model in VARIANTS.items()
    for kind, group in KINDS.items()
    if MODELS[model] == group
}


@pytest.mark.parametrize("assigns", [True, False])
def test_auto_measures_and_serves_each_groups_models_on_its_own_workers(assigns):
    brain = grouped(assigns)
    empty = seen(*(says(f"w-{kind}", kind, None) for kind in KINDS))
    with pytest.raises(NotYet, match="l-deep, l-flat, m not measured yet"):
        brain.problem(0.0, empty)
    first = brain.wanted(0.0, empty, False)
    assert {w: order.group for w, order in first.items()} == {
        f"w-{kind}": group for kind, group in KINDS.items()
    }
    for worker, order in first.items():
        mine = {v for v, m in VARIANTS.items() if MODELS[m] == order.group}
        assert order.keep and set(order.keep) <= mine, worker
    loaded = [says(f"w-{k}", k, g, *first[f"w-{k}"].keep) for k, g in KINDS.items()]
    there = Seen({w.worker: w for w in loaded}, PROFILES)
    job = brain.problem(1.0, there)
    verdict = brain.adopt(job, brain.solve(job))
    assert verdict.shortfall is None
    for worker, order in brain.wanted(1.0, there, False).items():
        kind = worker.removeprefix("w-")
        assert order.group == KINDS[kind]
        assert {MODELS[VARIANTS[v]] for v in order.keep} <= {KINDS[kind]}
    assert brain.routing.routes == MODELS
    assert brain.routing.complete
    with pytest.raises(ValueError, match="'auto' leaves models in their groups; deploy again"):
        brain.move("l", "b")
