"""What the Markov chains of `ramsis` and of `queue_value` consist of is what it was when recorded.

The accuracy of a table hardly depends on a single transition. So these tests compare transitions,
rewards and values of a given policy, in which no decision is a tie.
"""

import numpy as np
import pytest

from ray_slo.planning.queue_value import Columns, _Iteration, _nodes, _union, solve
from ray_slo.planning.ramsis import Empirical, Gamma, pareto_front
from ray_slo.planning.ramsis.arrivals import POISSON, arrivals_of, label
from ray_slo.planning.ramsis.kernel import Kernel
from ray_slo.planning.ramsis.policy_set import _between
from ray_slo.planning.ramsis.solver import _Process
from ray_slo.planning.ramsis.solver import solve as solve_table
from ray_slo.planning.ramsis.table import PolicySet
from tests.kept import condensed, kept
from tests.planning.examples import queue_value as queue_value_examples
from tests.planning.examples import ramsis as ramsis_examples

FILE = "planning/chains"


def measured():
    gaps = np.random.default_rng(1).gamma(0.5, 0.02, 300)
    return Empirical(np.cumsum(gaps), points=200)


@pytest.mark.parametrize("name", ["poisson", "gamma", "measured"])
def test_counts_of_arrivals(name):
    process = {"poisson": POISSON, "gamma": Gamma(0.25), "measured": measured()}[name]
    units = np.array([0.0, 0.125, 1.0, 3.5, 9.0])
    found = [process.shape, process.to_json(), label(process.to_json())]
    for after in (True, False):
        found.append(process.at_least(np.arange(-1, 8), units[:, None], after_arrival=after))
        found.append(process.pmf(6, units, after_arrival=after))
    if name == "gamma":
        found.append(arrivals_of({"kind": "gamma", "shape": 0.25}) == process)
    kept(FILE, f"counts {name}", condensed(found))


def problem(**changes):
    given = {"rate": 150.0, "num_slacks": 6, "max_queue": 5}
    return ramsis_examples.problem(**{**given, **changes})


PROBLEMS = {
    "usual": {},
    "gamma": {"arrivals": Gamma(0.5)},
    "shortest queue": {"balancing": "shortest_queue"},
    "busy shortest queue": {"balancing": "shortest_queue", "rate": 500.0},
    "variable": {"batching": "variable"},
    "variable, shortest queue": {"batching": "variable", "balancing": "shortest_queue"},
    "drop": {"late": "drop"},
    "drop, variable": {"late": "drop", "batching": "variable", "objective": "per_batch"},
    "decisions": {"objective": "per_batch"},
    "exact slacks": {"discretization": "model_based"},
    "penalty": {"late_penalty": 20.0, "rate": 300.0},
    "many workers": {"num_workers": 11, "rate": 400.0, "batching": "variable"},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_chain_of_ramsis(name):
    asked = problem(**PROBLEMS[name])
    process = _Process(asked)
    k = process.kernel
    found = {
        "problem": [asked.capacity, asked.longest_queue, asked.options()],
        "grid": [k.latency, k.accuracy, k.slacks_s, k.fits, k.edges, k.cell_slot, k.cell_wait],
        "streams": [[s.rate, s.every, s.most(0.25)] for s in k.streams],
        "after": [k.after.toarray(), k.excess],
        "histories": [k.phases, k.waits],
        "first": [k.used_latencies, k.latency_index, k.late_choice, k.first],
        "slots": k.slot_of(np.linspace(-0.05, 0.2, 40)),
    }
    policy = process.most_accurate()
    found["policy"] = [policy.variant, policy.group, policy.index]
    found["sizes"] = list(process.sizes_and_variants(policy))
    found["outcome"] = list(process.outcome(policy))
    found["outcomes"] = k.outcomes_of(policy.variant)
    found["expected"] = k.expect(np.linspace(0.0, 5.0, k.num_outcomes))
    if process.partial is not None:
        values = np.linspace(-1.0, 4.0, k.num_states)
        found["partial"] = [process.partial.weights, process.partial.expect(values, 7.0)]
        found["groups"] = [
            [g.n, g.size, g.variants, g.slots, g.allowed, g.next_slot, g.arriving, g.beyond]
            for g in process.partial.groups
        ]
        if chosen := policy.partial_actions():
            leading, excess = process.partial.transitions(chosen)
            found["leading"] = [leading.toarray(), excess]
    value = process.evaluate(policy)
    found["value"] = [value.ratio, value.values, value.occupancy, value.excess]
    table = process.table(policy, value, 3, 0.0)
    found["table"] = [table.expected_accuracy, table.violation_rate, table.variant_mix]
    found["table"] += [table.satisfied_accuracy_bound, table.max_queue]
    found["table"] += [list(table.lookup(n, s / 64)) for n in (1, 3, 9) for s in range(-1, 11)]
    kept(FILE, f"ramsis {name}", {key: condensed(one) for key, one in found.items()})


def test_sets_of_tables():
    tables = tuple(solve_table(problem(rate=rate)) for rate in (60.0, 150.0, 400.0))
    made = PolicySet(tables)
    found = [made.rates, made.slo_s, made.num_workers, len(made)]
    found += [made.covering(rate).rate for rate in (1.0, 60.0, 61.0, 150.0, 151.0, 900.0)]
    found += [made.covers(rate) for rate in (1.0, 400.0, 401.0)]
    by_rate = {t.rate: t for t in tables}
    found += [_between(by_rate, (60.0, 400.0), step, 0.01) for step in (0.5, 2.0, 50.0)]
    found += [_between(by_rate, (100.0, 400.0), 0.5, least) for least in (0.01, 0.9)]
    found.append([v[0] for v in pareto_front(ramsis_examples.VARIANTS, 0.02)])
    kept(FILE, "sets", condensed(found))


def test_a_kernel_counts_every_request():
    """What follows an outcome is a distribution, up to what is lost beyond the longest queue."""
    kernel = Kernel(problem())
    rows = kernel.after.toarray().sum(axis=1)
    assert rows == pytest.approx(np.ones(kernel.num_outcomes))
    assert kernel.first.sum(axis=1) == pytest.approx(np.ones(kernel.first[:, 0].shape))
    assert kernel.phases.sum(axis=2) == pytest.approx(np.ones(kernel.phases.shape[:2]))


def test_nodes_and_unions():
    found = [_nodes(limit, largest) for limit in (1, 3, 9, 40, 900) for largest in (1, 4, 12)]
    rng = np.random.default_rng(2)
    for _ in range(20):
        begins = rng.integers(-5, 40, 4)
        ends = begins + rng.integers(1, 9, 4)
        found.append(_union(begins, ends))
        whole = sorted({n for b, e in zip(begins, ends, strict=True) for n in range(b, e)})
        assert found[-1].tolist() == whole
    kept(FILE, "nodes", condensed(found))


@pytest.mark.parametrize("dispersion", [1.0, 5.0])
@pytest.mark.parametrize(("rate", "slo_s"), [(60.0, 0.15), (420.0, 0.15), (300.0, 2.0)])
def test_the_chain_of_a_queue(rate, slo_s, dispersion):
    columns = Columns.together(
        [
            queue_value_examples.columns(4, 0.15, *queue_value_examples.VARIANTS),
            Columns([1, 3], [50.0, 50.0], [0.02, 0.04], [0.03, 0.05], [0.125, 0.125], [1.0, 2.5]),
        ]
    )
    value = solve(columns, rate, slo_s, dispersion=dispersion, violation_cost=200.0)
    limit = len(value.h) - 1 - value.owed
    one = _Iteration(columns, value, slo_s, limit)
    found = {
        "size": [limit, value.owed, value.rate],
        "nodes": [one.nodes, one.below, one.share, one.counts],
        "allowed": [one.allowed, one.sheddable, one.idles, one.low, one.part],
        "needed": [one.needed, one.width],
    }
    policy = one.first()
    one.evaluate(policy)
    lengths = np.array([-3, -1, 0, 1, 2, 5, 9, limit, limit + 4])
    found["first"] = [policy, value.gain, value.at(lengths)]
    found["columns"] = [value.columns(columns, int(n)) for n in lengths[:-1]]
    found["shed"] = [value.shed(int(n)) for n in lengths]
    kept(FILE, f"queue {rate}, {slo_s}, {dispersion}", {k: condensed(v) for k, v in found.items()})
