"""What a place in the queue and a worker's second are worth: `solve(...) -> QueueValue`.

The fluid limit (`planning/fluid.py`) gives one price of a worker-second per load. With random
arrivals the price must move with the queue: dear when it is long, cheap when it is short. How far
is no parameter but the solution of a small dynamic problem, in the queue's length alone:

* K workers that share a queue are one server K times as quick: a batch that takes a worker ℓ
  seconds takes the server ℓ/K, in which λℓ/K requests arrive on average;
* with q requests waiting, the oldest has waited for about q/λ, and its batch has the rest of the
  SLO. When it has none left, it must be given up;
* a batch may be larger than the queue: its worker waits for the missing requests, and only it. They
  are owed to it, so the next worker finds a negative queue. Idle workers are what is owed;
* a batch earns b times its variant's accuracy, a request given up costs `violation_cost`.

This is a semi-Markov decision process of about λ·SLO states. Policy iteration solves it for the
average reward g per second and the value h(q) of a queue. What is to be used of it is not its
policy but its values: a host that sees the true slack of its oldest request takes the column
(variant, b) with the largest

    b·accuracy − g·ℓ/K + E h(q − b + arrivals in ℓ/K),

so a worker-second costs (g − λ·h′(q))/K and a place in the queue is worth h′(q): the duals of the
fluid problem, as functions of the queue. Where the fluid optimum mixes two columns, the queue
breaks the tie: above some length one, below it the other.

Worked example: one worker, SLO 2 s, one request per second on average; a variant of accuracy 80
takes 0.9 s, one of 60 takes 0.1 s. Up to two requests in the queue get the better one:

    >>> columns = Columns([1, 1], [80.0, 60.0], [0.9, 0.1], [0.9, 0.1], 1.0)
    >>> value = solve(columns, rate=1.0, deadline_s=2.0)
    >>> [[80, 60][value.columns(columns, queue).argmax()] for queue in (1, 2, 3)]
    [80, 80, 60]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HOLDING_COST = 0.1
"""Points of accuracy that a whole SLO of waiting and running costs a request: among equals, the
quicker. Too little to ever outweigh accuracy."""

_NODE_GROWTH = 0.08  # h is held at lengths so far apart, relatively, and is linear in between
_MAX_OWED = 32  # requests that idle workers wait for; with more, time costs nothing anyway
_MAX_ITERATIONS = 50


class Columns:
    """What a worker may run: arrays of one length, a column per (variant, batch size).

    Args:
        size: requests in the batch.
        accuracy: percent.
        time_s: from the start of the batch until it is answered, with what is kept in hand.
        latency_s: that the worker is busy.
        weight: of the worker in the pool: 1 / K for K equal ones.
        cost: points that the batch costs besides.
    """

    _ORDER = ("size", "accuracy", "time_s", "latency_s", "weight", "cost")
    __slots__ = _ORDER

    def __init__(
        self,
        size: Sequence[int] | Array,
        accuracy: Sequence[float] | Array,
        time_s: Sequence[float] | Array,
        latency_s: Sequence[float] | Array,
        weight: Array | float,
        cost: Array | float = 0.0,
    ) -> None:
        self.size = np.asarray(size, dtype=np.int64)
        self.accuracy = np.asarray(accuracy, dtype=float)
        self.time_s = np.asarray(time_s, dtype=float)
        self.latency_s = np.asarray(latency_s, dtype=float)
        self.weight = np.broadcast_to(np.asarray(weight, dtype=float), self.size.shape)
        self.cost = np.broadcast_to(np.asarray(cost, dtype=float), self.size.shape)
        if not len(self.size):
            raise ValueError("columns: there must be at least one")

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def together(cls, parts: Sequence[Columns]) -> Columns:
        """The columns of all parts."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls._ORDER))


class QueueValue:
    """The value of a queue at one load.

    Attributes:
        rate: requests per second.
        gain: g, mean reward per second.
        h: value of a queue of −owed … limit requests, points of accuracy, relative to an empty one.
        owed: how many requests idle workers may wait for at most.
        iterations: of the policy iteration.
    """

    def __init__(
        self,
        rate: float,
        deadline_s: float,
        dispersion: float,
        violation_cost: float,
        limit: int,
        owed: int,
    ) -> None:
        self.rate = rate
        self.gain = 0.0
        self.iterations = 0
        self.owed = owed
        self.h = np.zeros(owed + limit + 1)
        self._dispersion = dispersion
        self.violation_cost = violation_cost
        self._held = HOLDING_COST / deadline_s

    def columns(self, columns: Columns, queue: int, counts: Array | None = None) -> Array:
        """Value of every column with `queue` waiting, or −`queue` owed to other idle workers.

        A column of more than `queue` requests waits for the rest. Slack is the caller's to look
        after.

        Args:
            counts: `arrivals` during the columns, if they are at hand.
        """
        if counts is None:
            counts = self.arrivals(columns)
        queue = max(queue, columns.size.max() - self.owed)
        after, reward = self.run(columns, np.array([queue]))
        low = np.floor(after[0]).astype(np.int64)
        h = self.at(low[:, None] + np.arange(counts.shape[1] + 1))
        share = after[0] - low
        expected = ((1 - share)[:, None] * h[:, :-1] + share[:, None] * h[:, 1:]) * counts
        return np.asarray(expected.sum(axis=1) + reward[0])

    def shed(self, queue: int) -> float:
        """Value of giving the oldest request up."""
        return float(self.at(np.array(queue - 1)) - self.violation_cost)

    def at(self, queue: Array) -> Array:
        """h, beyond the limit with those given up who are beyond it."""
        limit = len(self.h) - 1 - self.owed
        return np.asarray(
            self.h[np.clip(queue, -self.owed, limit) + self.owed]
            - self.violation_cost * np.maximum(queue - limit, 0)
        )

    def arrivals(self, columns: Columns) -> Array:
        """Probabilities of 0, 1, … arrivals during each column, shape (columns, counts)."""
        return arrivals(self.rate * columns.latency_s * columns.weight, self._dispersion)

    def run(self, columns: Columns, queue: Array) -> tuple[Array, Array]:
        """(queue left but for arrivals during the batch, reward less g·t), shape (queue, columns).

        While the worker waits for the rest of its batch, the others go on.
        """
        missing = np.maximum(columns.size - queue[:, None], 0)
        after = queue[:, None] - columns.size + missing * columns.weight
        left = np.maximum(queue[:, None] - columns.size, 0)
        work_s = columns.weight * (columns.latency_s + missing / self.rate)
        held = columns.size * columns.time_s + (left + 0.5 * self.rate * work_s) * work_s
        reward = columns.size * columns.accuracy - columns.cost - self._held * held
        return after, reward - self.gain * work_s


def solve(
    columns: Columns,
    rate: float,
    deadline_s: float,
    *,
    dispersion: float = 1.0,
    violation_cost: float = 1000.0,
) -> QueueValue:
    """Policy iteration (Howard) for the largest average reward.

    Args:
        rate: λ, requests per second.
        deadline_s: the SLO, less what passes before a batch starts.
        dispersion: variance over mean of the arrivals in a short time, at least 1: Poisson;
            above 1 counts are negative binomial.
        violation_cost: points of accuracy that a request given up costs.

    Raises:
        ValueError: a rate, deadline or dispersion out of range.
    """
    for name, amount, least in (
        ("rate", rate, 0.0),
        ("deadline_s", deadline_s, 0.0),
        ("dispersion", dispersion, 1.0),
    ):
        if not (math.isfinite(amount) and amount >= least and amount > 0):
            raise ValueError(f"{name} must be finite, positive and at least {least}, got {amount}")
    largest = int(columns.size.max())
    work_s = columns.weight * columns.latency_s
    # At twice the load that can be served, decisions are those of any higher load.
    rate = min(rate, 2 * float((columns.size / work_s).max()))
    # A queue of q has been waiting for q/λ; short ones may have come in a clump.
    mean = rate * deadline_s
    limit = 1 + math.ceil(mean + math.sqrt(dispersion * mean))
    owed = largest + min(math.ceil(1 / columns.weight.min()), _MAX_OWED)
    value = QueueValue(rate, deadline_s, dispersion, violation_cost, limit, owed)
    iteration = _Iteration(columns, value, deadline_s, limit)
    policy = iteration.first()
    for value.iterations in range(1, _MAX_ITERATIONS + 1):
        iteration.evaluate(policy)
        better = iteration.improved(policy)
        if (better == policy).all():
            break
        policy = better
    return value


class _Iteration:
    """Policy iteration over the queue lengths at which `value.h` is held, its nodes.

    A policy says for each node which column to run; `len(columns)`: give the oldest request up;
    one more: wait.
    """

    def __init__(self, columns: Columns, value: QueueValue, deadline_s: float, limit: int) -> None:
        self.columns, self.value, self.limit = columns, value, limit
        owed, largest = value.owed, int(columns.size.max())
        self.counts = value.arrivals(columns)
        self.nodes = nodes = np.concatenate([np.arange(-owed, 0), _nodes(limit, min(largest, 12))])
        self.states = np.arange(len(nodes))
        # A queue of q lies between nodes `below[q + owed]` and the next, `share[…]` of the way.
        self.lengths = np.arange(-owed, limit + 1)
        self.below = np.minimum(
            np.searchsorted(nodes, self.lengths, side="right") - 1, len(nodes) - 2
        )
        self.share = (self.lengths - nodes[self.below]) / (
            nodes[self.below + 1] - nodes[self.below]
        )
        self.steps = np.arange(self.counts.shape[1] + 1)
        waited = deadline_s * (np.maximum(nodes[:, None], columns.size) - 1) / limit
        allowed = columns.time_s <= deadline_s - waited + 1e-12
        allowed |= (columns.size == 1) & (columns.time_s <= deadline_s) & (nodes[:, None] <= 1)
        allowed &= nodes[:, None] - columns.size >= -owed
        self.allowed = allowed
        after, _ = value.run(columns, nodes)
        self.low = np.maximum(np.floor(after).astype(np.int64), -owed)
        self.part = after - self.low
        # E h(q + arrivals) for every column and q at once, as a correlation. Long queues have few
        # nodes, so only the lengths that can follow from a node are in it: with an SLO of hours,
        # there are a million others.
        self.needed = _union(self.low.min(axis=1), self.low.max(axis=1) + len(self.steps))
        self.place = np.searchsorted(self.needed, self.low)
        self.width = 1 << (len(self.needed) - 1).bit_length()  # such an FFT is fast
        self.spectrum = np.conj(np.fft.rfft(self.counts, self.width))
        self.sheddable = (nodes > largest) | (~allowed.any(axis=1) & (nodes > 0))
        self.idles = ~allowed.any(axis=1) & (nodes <= 0)

    def first(self) -> Array:
        """The most efficient batch; where the slack allows none any more, give up."""
        columns, allowed = self.columns, self.allowed
        work_s = columns.weight * columns.latency_s
        throughput = np.where(allowed, columns.size / work_s, 0.0)
        policy = throughput.argmax(axis=1)
        inefficient = throughput.max(axis=1) < 0.9 * throughput.max()
        policy[self.sheddable & (inefficient | ~allowed.any(axis=1))] = len(columns)
        policy[self.idles] = len(columns) + 1
        return np.asarray(policy)

    def evaluate(self, policy: Array) -> None:
        """Set h and the gain to those of a policy: h = r − g·t + P·h with h(0) = 0."""
        columns, value, nodes, counts = self.columns, self.value, self.nodes, self.counts
        n, count, origin = len(nodes), len(columns), value.owed
        value.gain = 0.0
        _, reward = value.run(columns, nodes)
        r, t = np.full(n, -value.violation_cost), np.zeros(n)
        shape = (n, len(self.steps))
        to, chance = np.tile(nodes[:, None] - 1, (1, len(self.steps))), np.zeros(shape)
        chance[:, 0] = 1.0
        run = np.flatnonzero(policy < count)
        chosen = policy[run]
        to[run] = self.low[run, chosen][:, None] + self.steps
        up = self.part[run, chosen][:, None]
        chance[run, :-1] = (1 - up) * counts[chosen]
        chance[run, -1] = 0.0
        chance[run, 1:] += up * counts[chosen]
        missing = np.maximum(columns.size[chosen] - nodes[run], 0)
        t[run] = columns.weight[chosen] * (columns.latency_s[chosen] + missing / value.rate)
        r[run] = reward[run, chosen]
        waits = policy == count + 1
        to[waits] += 2
        r[waits], t[waits] = 0.0, 1 / value.rate
        r -= value.violation_cost * (chance * np.maximum(to - self.limit, 0)).sum(axis=1)
        # With a tiny probability the queue becomes empty, so that the chain has one recurrent
        # class.
        system = np.eye(n) - (1 - 1e-9) * self._transitions(to, chance)
        system[:, origin] = t
        solution = np.linalg.solve(system, r)
        value.gain, solution[origin] = float(solution[origin]), 0.0
        value.h = np.interp(self.lengths, nodes, solution)

    def _transitions(self, queue: Array, probability: Array) -> Array:
        """Matrix over the nodes; `queue` and `probability` have shape (nodes, …)."""
        n = len(self.nodes)
        at = np.minimum(queue, self.limit) + self.value.owed
        start = (self.states[:, None] * n + self.below[at]).ravel()
        p = np.bincount(start, (probability * (1 - self.share[at])).ravel(), n * n)
        p += np.bincount(start + 1, (probability * self.share[at]).ravel(), n * n + 1)[:-1]
        return np.asarray(p.reshape(n, n))

    def improved(self, policy: Array) -> Array:
        """The best policy by h, the same where another is no better."""
        columns, value, nodes = self.columns, self.value, self.nodes
        count, place, part = len(columns), self.place, self.part
        ahead = np.fft.rfft(value.at(self.needed), self.width)
        expected = np.fft.irfft(ahead * self.spectrum, self.width)
        _, reward = value.run(columns, nodes)
        columns_of = np.arange(count)
        options = np.full((len(nodes), count + 2), -np.inf)
        best = (1 - part) * expected[columns_of, place]
        best += part * expected[columns_of, place + 1] + reward
        options[:, :count] = np.where(self.allowed, best, -np.inf)
        shed, idle = self.sheddable, self.idles
        options[shed, count] = value.at(nodes[shed] - 1) - value.violation_cost
        options[idle, count + 1] = value.at(nodes[idle] + 1) - value.gain / value.rate
        better, now = options.argmax(axis=1), options[self.states, policy]
        keep = options[self.states, better] <= now + 1e-7 * (1 + np.abs(now))
        better[keep] = policy[keep]
        return np.asarray(better)


def arrivals(mean: Array, dispersion: float) -> Array:
    """Probabilities of 0, 1, … arrivals, shape (len(mean), counts): Poisson, or negative binomial
    of variance `dispersion` · mean. The far tail is cut off."""
    top, extra = float(mean.max()), dispersion - 1
    length = 8 + math.ceil(top + 6 * math.sqrt(top * dispersion) + 4 * extra)
    k = np.arange(length - 1)
    ratio = (mean[:, None] + extra * k) / (dispersion * (k + 1))
    log_p = np.zeros((len(mean), length))
    np.cumsum(np.log(ratio), axis=1, out=log_p[:, 1:])
    p = np.exp(log_p - log_p.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def _union(begins: Array, ends: Array) -> Array:
    """The whole numbers in the intervals [begin, end), in order."""
    first = begins.min()
    edges = np.zeros(ends.max() - first + 1, dtype=np.int64)
    np.add.at(edges, begins - first, 1)
    np.add.at(edges, ends - first, -1)
    return np.asarray(first + np.flatnonzero(np.cumsum(edges)))


def _nodes(limit: int, largest: int) -> Array:
    """Queue lengths at which h is held: the short ones, then some."""
    nodes = list(range(min(limit, 2 * largest) + 1))
    while nodes[-1] < limit:
        nodes.append(min(limit, nodes[-1] + max(1, int(_NODE_GROWTH * nodes[-1]))))
    return np.array(nodes)
