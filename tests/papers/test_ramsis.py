"""The solver against enumeration of policies, against sums of Eq. 2, and against simulation."""

import math
from itertools import product

import numpy as np
import pytest

from ray_slo.core.profiles import LatencyProfile
from ray_slo.papers.ramsis import Gamma, pareto_front, profile_hash, solve, solver
from ray_slo.papers.ramsis.kernel import EMPTY, Kernel, Partial
from ray_slo.papers.ramsis.solver import SPAN
from tests.planning.examples.ramsis import FAST, MIDDLE, SLOW, VARIANTS, problem


def simulate(table, p, requests=40_000, seed=1):
    """(accuracy over requests in time, violation rate) of one worker that gets every K-th."""
    rng = np.random.default_rng(seed)
    shape = p.num_workers * p.arrivals.shape
    arrivals = np.cumsum(rng.gamma(shape, 1 / (p.rate * p.arrivals.shape), requests)).tolist()
    profiles = {name: (accuracy, profile) for name, accuracy, profile in p.variants}
    taken = queued = in_time = 0
    now = right = 0.0
    while taken < requests:
        now = max(now, arrivals[taken])
        while queued < requests and arrivals[queued] <= now:
            queued += 1
        variant, size = table.lookup(queued - taken, arrivals[taken] + p.slo_s - now)
        assert 1 <= size <= queued - taken
        if variant:
            accuracy, profile = profiles[variant]
            now += profile.latency(size)
            met = sum(arrivals[i] + p.slo_s >= now - 1e-9 for i in range(taken, taken + size))
            in_time += met
            right += met * accuracy
        taken += size
    return right / in_time, 1 - in_time / requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({}, 0.15),
        ({"num_workers": 1, "rate": 40}, 0.3),
        ({"num_workers": 40, "rate": 1600}, 0.15),
        ({"objective": "per_batch"}, 0.15),
        ({"batching": "variable"}, 0.3),
        ({"late": "drop", "rate": 200}, 0.3),
        ({"discretization": "model_based"}, 0.5),
        ({"arrivals": Gamma(0.3), "num_workers": 8, "rate": 320}, 0.5),
    ],
)
def test_expected_accuracy_is_what_simulation_shows(fields, tolerance):
    p = problem(num_slacks=60, **fields)
    table = solve(p)
    accuracy, violations = simulate(table, p)
    assert accuracy == pytest.approx(table.expected_accuracy, abs=tolerance)
    # An upper bound (§5.1), up to the noise of 40,000 requests.
    assert violations <= table.violation_rate + 0.002
    assert table.span <= SPAN


@pytest.mark.parametrize("rate", [0.5, 1, 5, 20, 200])
def test_expected_accuracy_is_never_beyond_that_of_the_variants(rate):
    table = solve(problem(variants=[("only", 90.0, SLOW[2])], rate=rate, num_slacks=30))
    assert table.expected_accuracy == 90.0  # exactly: whoever compares it makes no allowance


def test_in_overload_what_does_not_fit_is_violated():
    p = problem(rate=2 * problem().capacity)
    table = solve(p)
    assert table.violation_rate > 0.5
    assert table.occupancy[-1] > 0.5  # the full-queue state
    assert table.variant_mix == pytest.approx({"fast": 1.0}, abs=1e-3)


# Kernel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rate": 5},
        {"rate": 2000},
        {"balancing": "shortest_queue", "num_workers": 4},
        {"discretization": "model_based"},
        {"arrivals": Gamma(0.3)},
        {"num_workers": 1},
    ],
)
def test_probabilities_sum_to_one(fields):
    k = Kernel(problem(num_slacks=30, **fields))
    assert k.phases.sum(2) == pytest.approx(1)
    assert k.first.sum(1) == pytest.approx(1)
    assert k.first.min() > -1e-12
    assert k.after.sum(1) == pytest.approx(1)
    everything = k.outcomes_of(np.repeat(k.late_choice[:, None], k.J, axis=1)) @ k.after
    assert everything.sum(1) == pytest.approx(1)


def test_partial_batches_sum_to_one():
    k = Kernel(problem(num_slacks=30))
    everywhere = np.ones(k.J, dtype=bool)
    partial = Partial(k, [(5, 2, 0, everywhere), (5, 1, -1, everywhere), (1, 1, -1, everywhere)])
    for group in range(3):
        rows = partial.transitions([(group, 0, np.arange(k.J))])[0].toarray()
        n = partial.groups[group].n
        assert rows[1 + (n - 1) * k.J : 1 + n * k.J].sum(1) == pytest.approx(1)
    # One of one dropped: nothing is left.
    assert rows[1 : 1 + k.J, 0] == pytest.approx(1)


def test_transitions_are_those_of_equation_2():
    """Given the phase: sums over arrivals at the central queue in intervals B, C and D."""
    p = problem(num_slacks=10, rate=90, num_workers=3, max_queue=4)
    k = Kernel(p)
    every = p.num_workers

    def pf(count, span):
        mean = p.rate * max(span, 0.0)
        return math.exp(-mean) * mean**count / math.factorial(count)

    variant, n = 1, 2
    latency = k.latency[variant, n - 1]
    first = k.first[k.latency_index[variant, n - 1]]
    got = first.T @ k.after
    for phase, next_n, slot in product(range(every), (1, 2, 3), range(k.J - 1)):
        low, high = k.slacks_s[slot], k.slacks_s[slot + 1]
        b = max(latency + low - p.slo_s, 0.0)
        c = max(latency + high - p.slo_s, 0.0) - b
        d = latency - b - c
        wanted = 0.0
        for k_b in range(every - phase):
            for k_c in range(every - phase - k_b, (next_n + 1) * every - phase - k_b):
                before = phase + k_b + k_c
                for k_d in range(max(0, next_n * every - before), (next_n + 1) * every - before):
                    wanted += pf(k_b, b) * pf(k_c, c) * pf(k_d, d)
        state = 1 + (next_n - 1) * k.J + slot
        assert got[phase, state] == pytest.approx(wanted, abs=2e-3), (phase, next_n, slot)
    for phase in range(every):
        nothing = sum(pf(i, latency) for i in range(every - phase))
        assert first[EMPTY, phase] == pytest.approx(nothing)


def test_shortest_queue_is_appendix_i():
    k = Kernel(problem(balancing="shortest_queue", rate=60, num_workers=4))
    # 15/s per worker: "slow" keeps up within SLO / 2 at no size, "middle" with batches of 1.
    service = 1 / MIDDLE[2].latency(1)
    often, seldom = k.streams
    assert often.rate == pytest.approx(15)
    assert seldom.rate == pytest.approx((15 / service) ** 4 * service)
    assert k.phases[1, 0].tolist() == [1, 0]  # n = 2
    assert k.phases[2, 0].tolist() == [0, 1]  # n = 3


# Optimality -------------------------------------------------------------------------------------


def _best_by_enumeration(p):
    """The largest ratio of reward to cost over all policies, each evaluated on a dense chain."""
    k = Kernel(p)
    options = []  # per state (n, slot): (row, reward, cost, worth of excess)
    every = np.ones(k.J, dtype=bool)
    for n, slot in product(range(1, k.N + 1), range(k.J)):
        here = []
        fitting = [m for m in range(len(k.variants)) if k.fits[n - 1, slot, m]]
        for m in fitting or [int(k.late_choice[n - 1])]:
            choice = np.full((k.N, k.J), -1)
            choice[n - 1, slot] = m
            outcomes = k.outcomes_of(choice)[1 + (n - 1) * k.J + slot]
            here.append((outcomes @ k.after, n, m if fitting else None, outcomes @ k.excess))
        if p.batching == "variable":
            for size, m in product(range(1, n), range(len(k.variants))):
                if k.latency[m, size - 1] <= k.slacks_s[slot] + 1e-9:
                    rows, excess = Partial(k, [(n, size, m, every)]).transitions(
                        [(0, 0, np.array([slot]))]
                    )
                    at = 1 + (n - 1) * k.J + slot
                    here.append((rows.toarray()[at], size, m, excess[at]))
        options.append(here)
    accuracy = k.accuracy
    best = -math.inf
    per_query = p.objective == "per_query"
    penalty = p.late_penalty if per_query else 0.0
    policies = 0
    for chosen in product(*options):
        policies += 1
        chain = np.zeros((k.num_states, k.num_states))
        reward, cost = np.zeros(k.num_states), np.ones(k.num_states)
        chain[0, 1 + k.J - 1] = 1.0
        cost[0] = 0.0 if per_query else 1.0
        full = (*options[(k.N - 1) * k.J][0][:2], None, options[(k.N - 1) * k.J][0][3])
        for state, (row, size, m, excess) in enumerate((*chosen, full), start=1):
            chain[state] = row
            weight = size if per_query else 1
            reward[state] = weight * (accuracy[m] if m is not None else -penalty)
            cost[state] = weight
            if per_query:
                reward[state] -= penalty * excess
                cost[state] += excess
        system = np.vstack([chain.T - np.eye(len(chain)), np.ones(len(chain))])
        share = np.linalg.lstsq(system, np.append(np.zeros(len(chain)), 1.0), rcond=None)[0]
        best = max(best, share @ reward / (share @ cost))
    return best, policies


@pytest.mark.parametrize("objective", ["per_query", "per_batch"])
@pytest.mark.parametrize("rate", [20, 60, 140])
def test_no_policy_is_better(objective, rate):
    p = problem(
        num_slacks=3, max_queue=3, num_workers=2, rate=rate, objective=objective, late_penalty=20
    )
    best, policies = _best_by_enumeration(p)
    assert policies >= 24
    assert _ratio(p) == pytest.approx(best, abs=1e-7)


def test_no_policy_of_smaller_batches_is_better():
    p = problem(num_slacks=2, max_queue=3, num_workers=2, rate=60, batching="variable", slo_s=0.1)
    best, policies = _best_by_enumeration(p)
    assert policies >= 50
    assert _ratio(p) == pytest.approx(best, abs=1e-7)


def _ratio(p):
    """What the objective maximises, from a table's figures."""
    table = solve(p)
    if p.objective == "per_batch":
        met = np.array(
            [
                [
                    table.accuracies[v] * (p.candidates[v][2].latency(b) <= slack + 1e-9)
                    for v, b, slack in zip(variants, sizes, table.slacks_s, strict=True)
                ]
                for variants, sizes in zip(table.variant, table.batch, strict=True)
            ]
        )
        return float(table.occupancy[1:-1] @ met.ravel())
    in_time = 1 - table.violation_rate
    return table.expected_accuracy * in_time - p.late_penalty * table.violation_rate


@pytest.mark.slow
def test_smaller_batches_are_an_option_not_a_duty():
    for rate in (60, 150, 250):
        assert _ratio(problem(rate=rate, batching="variable", num_slacks=20)) >= (
            _ratio(problem(rate=rate, num_slacks=20)) - 0.02
        )


def test_a_price_on_late_requests_makes_fewer_of_them():
    free, dear = (solve(problem(rate=330, late_penalty=x)) for x in (0.0, 500.0))
    assert dear.violation_rate < 0.7 * free.violation_rate
    assert dear.expected_accuracy < free.expected_accuracy


def test_pruning_costs_nothing_and_keeps_what_is_better_in_large_batches():
    # As accurate as MIDDLE, slower alone, faster in batches; and one that is beaten throughout.
    bulky = ("bulky", 72.0, LatencyProfile.linear(0.008, 0.040, 16))
    beaten = ("beaten", 71.0, MIDDLE[2].scaled(1.1))
    given = (*VARIANTS, bulky, beaten)
    assert {v[0] for v in pareto_front(given, 0.15)} == {"fast", "middle", "slow", "bulky"}
    pruned, whole = (problem(variants=given, pareto=x, num_slacks=40) for x in (True, False))
    assert _ratio(pruned) == pytest.approx(_ratio(whole), abs=1e-6)
    assert _ratio(pruned) > _ratio(problem(num_slacks=40)) + 0.1


# Problems ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variants": ()}, "variants must hold"),
        ({"variants": (FAST, FAST)}, "different, non-empty names"),
        ({"variants": (("a", 0.7, FAST[2]), ("b", 170.0, FAST[2]))}, "accuracy of 'b'.*got 170"),
        ({"slo_s": 0}, "slo_s must be positive, got 0"),
        ({"slo_s": 0.01}, "no variant answers within 10 ms; the fastest takes 18 ms"),
        ({"rate": math.inf}, "rate must be a finite number, got inf"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"max_queue": 0}, "max_queue must be at least 1, got 0"),
        ({"batching": "all"}, "batching must be one of maximal, variable, got 'all'"),
        ({"late": "never"}, "late must be one of serve, drop"),
        ({"late_penalty": -1}, "late_penalty must be at least 0"),
    ],
)
def test_bad_problems_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        problem(**fields)


def test_profile_hash_is_of_what_the_variants_are():
    assert profile_hash(VARIANTS) == profile_hash(VARIANTS[::-1])
    assert profile_hash(VARIANTS) != profile_hash((FAST, MIDDLE, ("slow", 82.0, SLOW[2])))
    assert profile_hash(VARIANTS) != profile_hash((FAST, MIDDLE, ("slow", 81.0, FAST[2])))


def test_the_queue_told_apart_is_as_long_as_it_has_to_be():
    # "fast" takes 23 in 150 ms, but no more than 16 anyway.
    assert problem().longest_queue == 16
    wide = ("wide", 60.0, LatencyProfile.linear(0.002, 0.011, 128))  # 69 in 150 ms
    assert problem(variants=(wide,)).longest_queue == 72
    assert problem(variants=(SLOW,)).longest_queue == 6  # 3 in 150 ms
    assert problem(variants=(SLOW,), max_queue=9).longest_queue == 9
    # More than that changes nothing.
    short, long = (solve(problem(variants=(SLOW,), rate=30, max_queue=n)) for n in (None, 16))
    assert short.expected_accuracy == pytest.approx(long.expected_accuracy, abs=1e-6)
    assert short.violation_rate == pytest.approx(long.violation_rate, abs=1e-4)


def test_capacity_is_that_of_the_largest_batch_that_fits():
    # "fast" takes 16 in 108 ms.
    assert problem().capacity == pytest.approx(3 * 16 / 0.108)


# A profile as it is measured: batches of several sizes take equally long.
PLATEAUS = LatencyProfile([*[0.35] * 4, *[0.44] * 3, *[0.57] * 3, *[2.1] * 2, *[2.16] * 4])


def plateaus(load, **fields):
    """Of 57 workers in turn, whose arrivals are regular: a backlog of a few requests is served in
    batches that take as long as the same number takes to come."""
    factors = {75.0: 1, 72.0: 0.46, 60.0: 0.14}
    variants = tuple((f"v{a}", a, PLATEAUS.scaled(factor)) for a, factor in factors.items())
    how = {"batching": "variable", "discretization": "model_based", "late_penalty": 300.0}
    p = problem(**{"variants": variants, "slo_s": 0.3567, "num_workers": 57, **how, **fields})
    return p.at_rate(load * p.capacity)


@pytest.mark.parametrize(
    ("load", "arrivals"),
    [
        (0.75, Gamma(1)),
        (0.75, Gamma(0.125)),
        *((load, Gamma(0.25)) for load in (0.47, 0.75)),
    ],
)
def test_a_backlog_that_lasts_is_no_end(load, arrivals):
    p = plateaus(load, arrivals=arrivals)
    table = solve(p)
    assert table.violation_rate < 0.05
    accuracy, violations = simulate(table, p, requests=10_000)
    assert accuracy == pytest.approx(table.expected_accuracy, abs=0.7)
    assert violations <= table.violation_rate + 0.005


def test_restarts_are_taken_only_where_they_are_needed(monkeypatch):
    usual, lasting = problem(), plateaus(0.89, arrivals=Gamma(0.25))
    before = solve(usual)
    monkeypatch.setattr(solver, "RESTART", 0.5)  # half the decisions find the queue empty
    assert (solve(usual).variant == before.variant).all()
    assert solve(lasting).occupancy[EMPTY] > 0.5


def test_many_workers_that_are_never_idle_have_no_short_queues():
    p = problem(balancing="shortest_queue", num_workers=200, rate=1e6, max_queue=4)
    assert solve(p).violation_rate > 0.5
