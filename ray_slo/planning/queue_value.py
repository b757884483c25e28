"""What a place in the queue and a worker's second are worth: `solve(...) -> QueueValue`.

The fluid limit (`planning/fluid.py`) gives one price of a worker-second per load. With random
arrivals the price must move with the queue: dear when it is long, cheap when it is short. How far
is no parameter but the solution of a small dynamic problem, in the queue's length alone:

* K workers that share a queue are one server K times as quick: a batch of b requests that takes a
  worker ℓ seconds takes the server ℓ/K, in which about λℓ/K requests arrive;
* with q requests waiting the oldest has waited for q/λ, so a batch may take at most SLO − q/λ and
  hold at most q requests. Or one waits for the next request, or gives the oldest up;
* a batch earns b times its variant's accuracy, a request given up costs `violation_cost`.

This is a semi-Markov decision process of about λ·SLO states. Policy iteration solves it for the
average reward g per second and the value h(q) of a queue. What is to be used of it is not its
policy but its values: a host that sees the true slack of its oldest request takes the column with
the largest

    b·accuracy − g·ℓ/K + E h(q − b + arrivals in ℓ/K),

so a worker-second costs (g − λ·h′(q))/K and a place in the queue is worth h′(q): the duals of the
fluid problem, as functions of the queue. Where the fluid optimum mixes two columns, the queue
breaks the tie: above some length one, below it the other.

Worked example: one worker, SLO 1 s, one variant that takes 0.5 s for one request or two, one
request per second. Waiting for a second one could save half the work, but the worker is quick
enough without, so a request goes alone and at once:

    >>> columns = Columns([1, 2], [80.0, 80.0], [0.5, 0.5], [0.5, 0.5])
    >>> value = solve(columns, rate=1.0, deadline_s=1.0)
    >>> bool(value.columns(columns, 1)[0] > value.wait(1))
    True
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
_MAX_ITERATIONS = 50


class Columns:
    """What a worker may run: arrays of one length, a column per (variant, batch size).

    Args:
        size: requests in the batch.
        accuracy: percent.
        time_s: from the start of the batch until it is answered.
        work_s: time of the whole pool that it takes: ℓ(b) / K for K equal workers.
        cost: points that the batch costs besides.
    """

    _ORDER = ("size", "accuracy", "time_s", "work_s", "cost")
    __slots__ = _ORDER

    def __init__(
        self,
        size: Sequence[int] | Array,
        accuracy: Sequence[float] | Array,
        time_s: Sequence[float] | Array,
        work_s: Sequence[float] | Array,
        cost: Sequence[float] | Array | float = 0.0,
    ) -> None:
        self.size = np.asarray(size, dtype=np.int64)
        self.accuracy = np.asarray(accuracy, dtype=float)
        self.time_s = np.asarray(time_s, dtype=float)
        self.work_s = np.asarray(work_s, dtype=float)
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
        h: value of a queue of 0 … limit requests, in points of accuracy, relative to an empty one.
        iterations: of the policy iteration.
    """

    def __init__(
        self, rate: float, deadline_s: float, dispersion: float, violation_cost: float, limit: int
    ) -> None:
        self.rate = rate
        self.gain = 0.0
        self.iterations = 0
        self.h = np.zeros(limit + 1)
        self._dispersion = dispersion
        self._cost = violation_cost
        self._held = HOLDING_COST / deadline_s

    def columns(self, columns: Columns, queue: int, counts: Array | None = None) -> Array:
        """Value of every column with `queue` waiting; −inf where the batch is larger than that.

        Slack is the caller's to look after.

        Args:
            counts: `arrivals` during the columns, if they are at hand.
        """
        if counts is None:
            counts = self.arrivals(columns)
        left = np.maximum(queue - columns.size, 0)
        h = self._at(left[:, None] + np.arange(counts.shape[1]))
        value = (h * counts).sum(axis=1) + self.earned(columns)
        value -= (self.gain + self._held * left) * columns.work_s
        value[columns.size > queue] = -np.inf
        return np.asarray(value)

    def wait(self, queue: int) -> float:
        """Value of waiting for the next request."""
        return float(self._at(np.array(queue + 1)) - (self.gain + self._held * queue) / self.rate)

    def shed(self, queue: int) -> float:
        """Value of giving the oldest request up."""
        return float(self._at(np.array(queue - 1)) - self._cost)

    def arrivals(self, columns: Columns) -> Array:
        """Probabilities of 0, 1, … arrivals during each column, shape (columns, counts)."""
        return arrivals(self.rate * columns.work_s, self._dispersion)

    def earned(self, columns: Columns) -> Array:
        """Reward of a column with nothing left in the queue."""
        held = columns.size * columns.time_s + 0.5 * self.rate * columns.work_s**2
        return np.asarray(columns.size * columns.accuracy - columns.cost - self._held * held)

    def _at(self, queue: Array) -> Array:
        """h, beyond the limit with those given up who are beyond it."""
        limit = len(self.h) - 1
        return np.asarray(
            self.h[np.minimum(queue, limit)] - self._cost * np.maximum(queue - limit, 0)
        )


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
    # At twice the load that can be served, decisions are those of any higher load.
    rate = min(rate, 2 * float((columns.size / columns.work_s).max()))
    limit = max(2, math.ceil(rate * deadline_s))
    value = QueueValue(rate, deadline_s, dispersion, violation_cost, limit)
    counts = value.arrivals(columns)
    earned = value.earned(columns)
    steps, count = np.arange(counts.shape[1]), len(columns)
    nodes = _nodes(limit, min(largest, 12))
    n, states = len(nodes), np.arange(len(nodes))
    # A queue of q lies between nodes `below[q]` and the next, `share[q]` of the way.
    lengths = np.arange(limit + 1)
    below = np.minimum(np.searchsorted(nodes, lengths, side="right") - 1, n - 2)
    share = (lengths - nodes[below]) / (nodes[below + 1] - nodes[below])
    # E h(q + arrivals) for every column and q at once, as a correlation.
    width = limit + 1 + len(steps)
    spectrum = np.conj(np.fft.rfft(counts, width))

    def transitions(rows: Array, queue: Array, probability: Array) -> Array:
        """Matrix over the nodes; `queue` and `probability` have shape (len(rows), …)."""
        queue = np.minimum(queue, limit)
        start = rows[:, None] * n + below[queue]
        p = np.bincount(start.ravel(), (probability * (1 - share[queue])).ravel(), n * n)
        p += np.bincount(start.ravel() + 1, (probability * share[queue]).ravel(), n * n + 1)[:-1]
        return p.reshape(n, n)

    waited = np.maximum(nodes - 1, 0) / rate
    allowed = columns.size <= nodes[:, None]
    allowed &= columns.time_s <= deadline_s - waited[:, None] + 1e-12
    left = np.maximum(nodes[:, None] - columns.size, 0)
    sheddable = (nodes > largest) | ~allowed.any(axis=1)
    sheddable[0] = False

    # To begin with, the most efficient batch; where the slack allows none any more, give up.
    throughput = np.where(allowed, columns.size / columns.work_s, 0.0)
    policy = throughput.argmax(axis=1)
    inefficient = throughput.max(axis=1) < 0.9 * throughput.max()
    policy[sheddable & inefficient] = count + 1
    policy[0] = count
    for iteration in range(1, _MAX_ITERATIONS + 1):
        value.iterations = iteration
        # Evaluate: h = r − g·t + P·h with h(0) = 0.
        r, t = np.full(n, -violation_cost), np.zeros(n)
        to, chance = np.tile(nodes[:, None] - 1, (1, len(steps))), np.zeros((n, len(steps)))
        chance[:, 0] = 1.0
        waits = policy == count
        to[waits] += 2
        t[waits] = 1 / rate
        r[waits] = -value._held * nodes[waits] / rate
        run = np.flatnonzero(policy < count)
        chosen = policy[run]
        to[run] = left[run, chosen][:, None] + steps
        chance[run] = counts[chosen]
        t[run] = columns.work_s[chosen]
        r[run] = earned[chosen] - value._held * left[run, chosen] * t[run]
        r -= violation_cost * (chance * np.maximum(to - limit, 0)).sum(axis=1)
        # Now and then the queue empties by a miracle, lest the chain fall apart.
        system = np.eye(n) - (1 - 1e-9) * transitions(states, to, chance)
        system[:, 0] = t
        solution = np.linalg.solve(system, r)
        value.gain, solution[0] = float(solution[0]), 0.0
        value.h = np.interp(lengths, nodes, solution)
        # Improve.
        ahead = np.fft.rfft(value._at(np.arange(width)), width)
        expected = np.fft.irfft(ahead * spectrum, width)[:, : limit + 1]
        options = np.full((n, count + 2), -np.inf)
        run_now = expected[np.arange(count), left] + earned
        run_now -= (value.gain + value._held * left) * columns.work_s
        options[:, :count] = np.where(allowed, run_now, -np.inf)
        options[:, count] = value._at(nodes + 1) - (value.gain + value._held * nodes) / rate
        options[sheddable, count + 1] = value._at(nodes[sheddable] - 1) - violation_cost
        better, now = options.argmax(axis=1), options[states, policy]
        keep = options[states, better] <= now + 1e-7 * (1 + np.abs(now))
        better[keep] = policy[keep]
        if (better == policy).all():
            break
        policy = better
    return value


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


def _nodes(limit: int, largest: int) -> Array:
    """Queue lengths at which h is held: the short ones, then some."""
    nodes = list(range(min(limit, 2 * largest) + 1))
    while nodes[-1] < limit:
        nodes.append(min(limit, nodes[-1] + max(1, int(_NODE_GROWTH * nodes[-1]))))
    return np.array(nodes)
