"""`solve(problem) -> Table`: policy iteration on the decision process of `kernel`.

It maximises a ratio of long-run averages: the accuracy of requests answered in time, over the
number of requests ("per_query") or of decisions ("per_batch"). Every decision has a reward r and a
cost c (requests, or 1). The best ratio θ and the relative values h of states solve

    h(s) = max over actions of r − θ·c + E[h(next state)].

The paper iterates values. This solver iterates policies (Howard), because policies stop changing
after a few improvements, and the exact evaluation of a policy is cheap. The sequence of outcomes
(nothing arrived, or a first arrival in some cell) is a chain of one or two hundred outcomes, for
any N and any number of variants. θ and h are solved for directly. The iteration stops by the span
test: no action would improve any state by more than `SPAN`.

With several workers in turn, a worker's arrivals are regular. Then a chain may have two classes
that it almost never leaves. In one, the queue becomes empty. In the other, a backlog is served
exactly as fast as it comes, for example if batches of several sizes take equally long. No single θ
solves that. Such problems are solved with a *restart*: after every decision, the queue becomes
empty with the probability `RESTART`. So about `1 / RESTART` decisions count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lu_solve
from scipy.linalg.lapack import dgetrf
from scipy.sparse import csr_array

from ray_slo.papers.ramsis.kernel import EMPTY, NEVER, Kernel, Partial
from ray_slo.papers.ramsis.problem import Problem
from ray_slo.papers.ramsis.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SPAN = 1e-6  # tolerance in percentage points of accuracy, per decision
RESTART = 1e-6
_LARGEST = 1e8  # larger values mean that the chain almost never leaves a class
_ROUNDING, _COARSEST = 1e-14, 1e-4  # relative tolerance for large values, and its upper bound
_MAX_IMPROVEMENTS = 100


def solve(problem: Problem) -> Table:
    """Return the best policy of one worker at one load, with its predictions.

    Returns:
        The table. Its `expected_accuracy` and `violation_rate` are those of RAMSIS §5.1.

    Raises:
        ArithmeticError: policies do not stop changing, even with restarts. This was never observed.
    """
    process = _Process(problem)
    full = None
    if process.partial is not None:
        full = _Process(replace(problem, batching="maximal", late="serve"))
    try:
        return _solve(process, full)
    except ArithmeticError:
        for one in (process, full):
            if one is not None:
                one.stays = 1 - RESTART
        return _solve(process, full)


def _solve(process: _Process, full: _Process | None) -> Table:
    """Return the table of a process. The search starts from the best policy of full batches."""
    policy = process.most_accurate()
    if full is not None:
        # Problems of full batches are solved quickly, and most decisions are full batches.
        start = _iterate(full, full.most_accurate())[0].variant
        policy.variant = np.where(policy.variant >= 0, start, policy.variant)
    policy, found, improvements, span = _iterate(process, policy)
    return process.table(policy, found, improvements, span)


def _iterate(process: _Process, policy: _Policy) -> tuple[_Policy, _Evaluation, int, float]:
    """Iterate policies. Return the best policy, its evaluation, the number of improvements, and the
    largest gain of a further one."""
    for improvements in range(1, _MAX_IMPROVEMENTS + 1):
        found = process.evaluate(policy)
        better, span = process.improve(policy, found)
        largest = float(np.abs(found.values).max())
        if not largest < math.inf or (process.stays == 1 and largest > _LARGEST):
            raise ArithmeticError("the chain has several classes")
        if span <= SPAN + min(_ROUNDING * largest, _COARSEST):
            return policy, found, improvements, span
        policy = better
    raise ArithmeticError(f"no policy is best to {SPAN} after {_MAX_IMPROVEMENTS} improvements")


@dataclass(frozen=True)
class _Evaluation:
    ratio: float  # θ
    values: Floats  # (states,): h
    outcome_values: Floats  # (outcomes,)
    occupancy: Floats  # (states,): share of the decisions in each state
    excess: float  # number of requests beyond N, per decision


class _Process:
    """The decision process. On the last axis, actions are full batches by variant, and then partial
    batches.

    Attributes:
        stays: probability that there is no restart after a decision. It is 1 without restarts.
    """

    def __init__(self, problem: Problem) -> None:
        self.stays = 1.0
        self.problem = problem
        self.kernel = k = Kernel(problem)
        self.variants = len(k.variants)
        self.per_query = problem.objective == "per_query"
        self.penalty = problem.late_penalty if self.per_query else 0.0
        full = k.fits.copy()
        unable = ~full.any(2)
        if problem.late == "serve":
            for n in range(k.N):
                full[n, unable[n], k.late_choice[n]] = True
        self.full_allowed: NDArray[np.bool_] = full
        self.partial = self._partial(unable)

    def _partial(self, unable: NDArray[np.bool_]) -> Partial | None:
        """Return the batches that leave requests in the queue. With variable batching, these are
        all. If late requests are dropped, they are the largest batch in time, and the drop of the
        most urgent request."""
        k, p = self.kernel, self.problem
        drop = p.late == "drop"
        if not drop and p.batching == "maximal":
            return None
        wanted: list[tuple[int, int, int, NDArray[np.bool_]]] = []
        for n in range(1, k.N + 1):
            for size in range(1, n):
                for m in range(self.variants):
                    allowed = k.latency[m, size - 1] <= k.slacks_s + 1e-9
                    if p.batching == "maximal":
                        allowed &= unable[n - 1] & (k.latency[m, size] > k.slacks_s + 1e-9)
                    wanted.append((n, size, m, allowed))
            if drop:
                wanted.append((n, 1, -1, unable[n - 1]))
        return Partial(k, wanted)

    def _reward(
        self, accuracy: Floats | float, size: Floats | int, met: NDArray[np.bool_]
    ) -> Floats:
        return np.asarray(met * accuracy * (size if self.per_query else 1))

    def most_accurate(self) -> _Policy:
        """Return the policy with the most accurate variant that takes all queued requests in time.
        If none does, it takes the largest batch."""
        k = self.kernel
        best = self.variants - 1 - np.argmax(self.full_allowed[:, :, ::-1], axis=2)
        policy = _Policy(
            np.where(self.full_allowed.any(2), best, -1),
            np.full((k.N, k.J), -1),
            np.zeros((k.N, k.J), dtype=np.int64),
        )
        if self.partial is not None:
            for number, group in reversed([*enumerate(self.partial.groups)]):
                for v in range(len(group.variants)):
                    at = group.slots[group.allowed[:, v]]
                    at = at[policy.variant[group.n - 1, at] < 0]
                    policy.group[group.n - 1, at] = number
                    policy.index[group.n - 1, at] = v
        return policy

    def sizes_and_variants(self, policy: _Policy) -> tuple[Ints, Ints]:
        """Return the batch size and the variant (−1: drop) in every (n, slot)."""
        k = self.kernel
        size = np.repeat(np.arange(1, k.N + 1)[:, None], k.J, axis=1)
        variant = policy.variant.copy()
        if self.partial is not None:
            for n, slot in np.argwhere(policy.variant < 0):
                group = self.partial.groups[policy.group[n, slot]]
                size[n, slot] = group.size
                variant[n, slot] = group.variants[policy.index[n, slot]]
        return size, variant

    def outcome(self, policy: _Policy) -> tuple[Floats, Floats, Floats, Floats]:
        """Return four arrays of shape (states,): reward, cost, requests taken, and the accuracy
        times the requests answered in time."""
        k = self.kernel
        size, variant = self.sizes_and_variants(policy)
        latency = np.where(variant >= 0, k.latency[variant, size - 1], np.inf)
        met = latency <= k.slacks_s[None, :] + 1e-9
        worth = np.where(met, k.accuracy[variant], -self.penalty)
        none, most = np.zeros(1), size[-1:, 0]  # a full queue is late by definition (§4.2.3)
        taken = np.concatenate([none, size.ravel(), most])
        in_time = np.concatenate([none, (size * met).ravel(), none])
        right = np.concatenate([none, (size * met * k.accuracy[variant]).ravel(), none])
        cost = taken.astype(float) if self.per_query else np.ones(k.num_states)
        weight = np.minimum(taken, cost)
        reward = weight * np.concatenate([none, worth.ravel(), [-self.penalty]])
        return reward, cost, in_time, right

    def evaluate(self, policy: _Policy) -> _Evaluation:
        """Solve for θ, h and the occupancy on the chain of *nodes*: the outcomes of full batches,
        and the states that partial batches lead to."""
        k = self.kernel
        reward, cost, _, _ = self.outcome(policy)
        rows = k.outcomes_of(policy.variant)
        if self.partial is not None and (chosen := policy.partial_actions()):
            leading, excess = self.partial.transitions(chosen)
        else:
            leading, excess = csr_array((k.num_states, k.num_states)), np.zeros(k.num_states)
        states = np.unique(leading.indices)
        leading = leading[:, states]
        chain = np.block(
            [
                [k.after @ rows, (k.after @ leading).toarray()],
                [rows[states], leading[states].toarray()],
            ]
        )
        chain *= self.stays
        counted = float(self.per_query)
        reward -= counted * self.penalty * excess
        cost += counted * excess
        ratio, node_values, share = _average(
            chain,
            np.append(k.after @ reward - counted * self.penalty * k.excess, reward[states]),
            np.append(k.after @ cost + counted * k.excess, cost[states]),
            EMPTY,
        )
        outcomes = k.num_outcomes
        of_outcomes, of_states = node_values[:outcomes], node_values[outcomes:]
        occupancy = np.asarray(share[:outcomes] @ k.after)
        occupancy[states] += share[outcomes:]
        return _Evaluation(
            ratio,
            reward - ratio * cost + self.stays * (rows @ of_outcomes + leading @ of_states),
            of_outcomes,
            occupancy,
            float(share[:outcomes] @ k.excess + occupancy @ excess),
        )

    def improve(self, policy: _Policy, found: _Evaluation) -> tuple[_Policy, float]:
        """Return the greedy policy for these values, and its largest improvement of a state."""
        k = self.kernel
        loss = found.ratio + self.penalty if self.per_query else 0.0
        q = k.expect(self.stays * found.outcome_values)
        sizes = np.arange(1, k.N + 1)[:, None, None]
        worth = np.where(k.fits, k.accuracy, -self.penalty)
        q += (worth - found.ratio) * (sizes if self.per_query else 1)
        q[~self.full_allowed] = -np.inf
        new = policy.copy()
        current = found.values[1 : k.full].reshape(k.N, k.J)
        best = current + SPAN / 2  # an action is kept unless another one is clearly better
        found_better = np.argmax(q, axis=2)
        value = np.take_along_axis(q, found_better[..., None], axis=2)[..., 0]
        better = value > best
        span = float((value - current).max())
        new.variant[better] = found_better[better]
        best = np.where(better, value, best)
        if self.partial is not None:
            expected = self.partial.expect(self.stays * found.values, loss)
            for number, (group, next_value) in enumerate(
                zip(self.partial.groups, expected, strict=True)
            ):
                worth = np.where(group.variants >= 0, k.accuracy[group.variants], -self.penalty)
                gain = (worth - found.ratio) * (group.size if self.per_query else 1) + next_value
                gain[~group.allowed] = -np.inf
                v = np.argmax(gain, axis=1)
                gain = gain[np.arange(len(v)), v]
                at = group.slots
                span = max(span, float((gain - current[group.n - 1, at]).max()))
                higher = gain > best[group.n - 1, at]
                at = at[higher]
                best[group.n - 1, at] = gain[higher]
                new.variant[group.n - 1, at] = -1
                new.group[group.n - 1, at] = number
                new.index[group.n - 1, at] = v[higher]
        return new, max(span, 0.0)

    def table(self, policy: _Policy, found: _Evaluation, improvements: int, span: float) -> Table:
        k, p = self.kernel, self.problem
        size, variant = self.sizes_and_variants(policy)
        _, _, in_time, right = self.outcome(policy)
        taken = np.concatenate([[0], size.ravel(), size[-1:, 0]])
        answered = float(found.occupancy @ in_time)
        total = float(found.occupancy @ taken) + found.excess
        mean = float(found.occupancy @ right) / answered if answered > 0 else 0.0
        if answered > 0:  # clip, because rounding may leave the range of a weighted mean
            mean = min(max(mean, float(k.accuracy.min())), float(k.accuracy.max()))
        return Table(
            names=tuple(name for name, _, _ in k.variants),
            accuracies=tuple(float(a) for a in k.accuracy),
            slacks_s=k.slacks_s,
            variant=variant.astype(np.int16),
            batch=size.astype(np.int16),
            occupancy=found.occupancy,
            expected_accuracy=mean,
            violation_rate=1 - answered / total,
            rate=p.rate,
            profile_hash=p.profile_hash,
            options=p.options(),
            improvements=improvements,
            span=span,
        )


@dataclass
class _Policy:
    """A policy: the variant that takes all n requests in (n − 1, slot), or −1 and an action of
    `Partial`."""

    variant: Ints
    group: Ints
    index: Ints

    def copy(self) -> _Policy:
        return _Policy(self.variant.copy(), self.group.copy(), self.index.copy())

    def partial_actions(self) -> list[tuple[int, int, Ints]]:
        """Return the partial actions: (group, index in the group, slots of the group's n)."""
        found = []
        for n in range(self.variant.shape[0]):
            slots = np.flatnonzero(self.variant[n] < 0)
            pairs = np.stack([self.group[n, slots], self.index[n, slots]], axis=1)
            for number, v in np.unique(pairs, axis=0):
                at = (pairs[:, 0] == number) & (pairs[:, 1] == v)
                found.append((int(number), int(v), slots[at]))
        return found


def _average(
    chain: Floats, reward: Floats, cost: Floats, reference: int
) -> tuple[float, Floats, Floats]:
    """Return θ, the relative values (0 at `reference`) and the stationary distribution of a chain
    with one recurrent class. If a row of `chain` sums to less than 1, the rest leads to
    `reference`.

    h = r − θ·c + P·h with h[reference] = 0 is linear in θ and the other h. Its matrix has c as the
    column `reference`. The transposed matrix gives the distribution, scaled to μ·c = 1. So one
    factorisation serves both. States that no state leads to have only a value, which follows from
    those of the others.

    Raises:
        ArithmeticError: the chain has several recurrent classes.
    """
    reached = chain.max(axis=0) > NEVER
    reached[reference] = True
    kept = np.flatnonzero(reached)
    at = int(np.searchsorted(kept, reference))
    matrix = -chain[np.ix_(kept, kept)]
    matrix[np.diag_indices_from(matrix)] += 1.0
    matrix[:, at] = cost[kept]
    lu, pivots, failed = dgetrf(matrix, overwrite_a=True)
    if failed:
        raise ArithmeticError("the chain has several classes")
    factors = lu, pivots
    inner = lu_solve(factors, reward[kept])
    ratio = float(inner[at])
    inner[at] = 0.0
    values = reward - ratio * cost + chain[:, kept] @ inner
    values[kept] = inner
    share = np.zeros(len(chain))
    share[kept] = np.maximum(lu_solve(factors, np.eye(len(kept))[at], trans=1), 0.0)
    return ratio, values, share / share.sum()
