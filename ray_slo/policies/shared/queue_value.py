"""The values of a place in the queue and of a worker-second: `solve(...) -> QueueValue`.

The fluid limit (`shared/fluid.py`) gives one price of a worker-second per load. With random
arrivals, the price must follow the queue: high when the queue is long, low when it is short. The
prices are the solution of a small dynamic problem, whose only state is the length of the queue:

* K workers that share a queue are one server that is K times as fast. A batch that takes a worker ℓ
  seconds takes the server ℓ/K seconds. In this time, λℓ/K requests arrive on average.
* With q waiting requests, the oldest one has waited for about q/λ seconds, and its batch has the
  rest of the SLO. When no time is left, the request must be given up.
* A batch may be larger than the queue. Then its worker waits for the missing requests, and no other
  worker does. These requests are *owed* to it, so the next worker sees a negative queue. An idle
  worker is one that is owed requests.
* A batch earns b times its variant's accuracy. A request that is given up costs `violation_cost`.

This is a semi-Markov decision process with about λ·SLO states. Policy iteration solves it for the
average reward g per second and the value h(q) of a queue. Its values are used, not its policy. A
host that sees the true slack of its oldest request takes the column (variant, b) with the largest

    b·accuracy − g·ℓ/K + E h(q − b + arrivals in ℓ/K),

so a worker-second costs (g − λ·h′(q))/K, and a place in the queue is worth h′(q). These are the
duals of the fluid problem as functions of the queue. If the fluid optimum mixes two columns, the
queue decides between them: one is used above a certain length, the other below it.

Worked example: one worker, SLO 2 s, one request per second on average. A variant of accuracy 80
takes 0.9 s, one of accuracy 60 takes 0.1 s. With up to two requests in the queue, the better
variant is used:

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
"""Cost of a latency of one SLO, in points of accuracy. Of equally accurate columns, the faster one
is chosen. The cost is too small to outweigh accuracy."""

# h is computed at certain queue lengths (nodes), and is linear between them. The relative distance
# of long nodes is this.
_NODE_GROWTH = 0.08
_MAX_OWED = 32  # largest number of owed requests; with more, time costs nothing
_MAX_ITERATIONS = 50


class Columns:
    """The batches that a worker may run, one column per (variant, batch size). All arrays have the
    shape (columns,).

    Args:
        size: number of requests in the batch.
        accuracy: accuracy of the variant, in percent.
        time_s: time from the start of the batch until it is answered, with a safety margin, in
            seconds.
        latency_s: time for which the worker is busy, in seconds.
        weight: share of the worker in the pool's speed: 1 / K for K equal workers.
    """

    _ORDER = ("size", "accuracy", "time_s", "latency_s", "weight")
    __slots__ = _ORDER

    def __init__(
        self,
        size: Sequence[int] | Array,
        accuracy: Sequence[float] | Array,
        time_s: Sequence[float] | Array,
        latency_s: Sequence[float] | Array,
        weight: Array | float,
    ) -> None:
        self.size = np.asarray(size, dtype=np.int64)
        self.accuracy = np.asarray(accuracy, dtype=float)
        self.time_s = np.asarray(time_s, dtype=float)
        self.latency_s = np.asarray(latency_s, dtype=float)
        self.weight = np.broadcast_to(np.asarray(weight, dtype=float), self.size.shape)

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def together(cls, parts: Sequence[Columns]) -> Columns:
        """Return the columns of all parts."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls._ORDER))


class QueueValue:
    """The value of a queue at one load.

    Attributes:
        rate: requests per second.
        gain: g, mean reward per second.
        h: value of a queue of −owed … limit requests relative to an empty one, in points of
            accuracy, shape (owed + limit + 1,).
        owed: largest number of requests that idle workers may wait for.
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
        self.owed = owed
        self.h = np.zeros(owed + limit + 1)
        self._dispersion = dispersion
        self.violation_cost = violation_cost
        self._held = HOLDING_COST / deadline_s

    def columns(self, columns: Columns, queue: int, counts: Array | None = None) -> Array:
        """Return the value of every column, shape (columns,), with `queue` waiting requests. If
        `queue` is negative, −`queue` requests are owed to other idle workers.

        A column of more than `queue` requests waits for the rest. The caller must check the slack.

        Args:
            counts: the result of `arrivals` for these columns, if it is known.
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
        """Return the value of giving up the oldest request."""
        return float(self.at(np.array(queue - 1)) - self.violation_cost)

    def at(self, queue: Array) -> Array:
        """Return h at these queue lengths. Requests beyond the limit are given up."""
        limit = len(self.h) - 1 - self.owed
        return np.asarray(
            self.h[np.clip(queue, -self.owed, limit) + self.owed]
            - self.violation_cost * np.maximum(queue - limit, 0)
        )

    def arrivals(self, columns: Columns) -> Array:
        """Return the probabilities of 0, 1, … arrivals during each column, shape (columns,
        counts)."""
        return arrivals(self.rate * columns.latency_s * columns.weight, self._dispersion)

    def run(self, columns: Columns, queue: Array) -> tuple[Array, Array]:
        """Return the remaining queue without the arrivals during the batch, and the reward minus
        g·t. Both have the shape (queue, columns).

        While a worker waits for the rest of its batch, the other workers continue.
        """
        missing = np.maximum(columns.size - queue[:, None], 0)
        after = queue[:, None] - columns.size + missing * columns.weight
        left = np.maximum(queue[:, None] - columns.size, 0)
        work_s = columns.weight * (columns.latency_s + missing / self.rate)
        held = columns.size * columns.time_s + (left + 0.5 * self.rate * work_s) * work_s
        reward = columns.size * columns.accuracy - self._held * held
        return after, reward - self.gain * work_s


def solve(
    columns: Columns,
    rate: float,
    deadline_s: float,
    *,
    dispersion: float = 1.0,
    violation_cost: float = 1000.0,
) -> QueueValue:
    """Find the values with the largest average reward, by policy iteration (Howard).

    Args:
        columns: the batches that a worker may run.
        rate: λ, requests per second.
        deadline_s: the SLO minus the time before a batch can start, in seconds.
        dispersion: variance of the number of arrivals in a short time, over its mean. It is at
            least 1. At 1, the number is Poisson distributed; above, negative binomial.
        violation_cost: cost of a request that is given up, in points of accuracy.
    """
    largest = int(columns.size.max())
    work_s = columns.weight * columns.latency_s
    # From twice the load that can be served, higher loads have the same decisions.
    rate = min(rate, 2 * float((columns.size / work_s).max()))
    # The oldest of q requests has waited for about q/λ. A short queue may have arrived at once.
    mean = rate * deadline_s
    limit = 1 + math.ceil(mean + math.sqrt(dispersion * mean))
    owed = largest + min(math.ceil(1 / columns.weight.min()), _MAX_OWED)
    value = QueueValue(rate, deadline_s, dispersion, violation_cost, limit, owed)
    iteration = _Iteration(columns, value, deadline_s, limit)
    policy = iteration.first()
    for _ in range(_MAX_ITERATIONS):
        iteration.evaluate(policy)
        better = iteration.improved(policy)
        if (better == policy).all():
            break
        policy = better
    return value


class _Iteration:
    """Policy iteration over the nodes, which are the queue lengths at which h is computed.

    A policy gives each node the index of the column to run. `len(columns)` means to give up the
    oldest request, and `len(columns) + 1` means to wait.
    """

    def __init__(self, columns: Columns, value: QueueValue, deadline_s: float, limit: int) -> None:
        self.columns, self.value, self.limit = columns, value, limit
        owed, largest = value.owed, int(columns.size.max())
        self.counts = value.arrivals(columns)
        self.nodes = nodes = np.concatenate([np.arange(-owed, 0), _nodes(limit, min(largest, 12))])
        self.states = np.arange(len(nodes))
        # A queue of q is between the node `below[q + owed]` and the next one. `share[q + owed]` is
        # its relative distance from the former.
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
        # E h(q + arrivals) is computed for all columns and q at once, as a correlation. Long queues
        # have few nodes, so the correlation contains only lengths that can follow from a node. With
        # an SLO of hours, there are a million other lengths.
        self.needed = _union(self.low.min(axis=1), self.low.max(axis=1) + len(self.steps))
        self.place = np.searchsorted(self.needed, self.low)
        self.width = 1 << (len(self.needed) - 1).bit_length()  # an FFT of a power of 2 is fast
        self.spectrum = np.conj(np.fft.rfft(self.counts, self.width))
        self.sheddable = (nodes > largest) | (~allowed.any(axis=1) & (nodes > 0))
        self.idles = ~allowed.any(axis=1) & (nodes <= 0)

    def first(self) -> Array:
        """Return the first policy: run the most efficient batch, or give up if no batch is in
        time."""
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
        # The queue becomes empty with a tiny probability. So the chain has only one recurrent
        # class.
        system = np.eye(n) - (1 - 1e-9) * self._transitions(to, chance)
        system[:, origin] = t
        solution = np.linalg.solve(system, r)
        value.gain, solution[origin] = float(solution[origin]), 0.0
        value.h = np.interp(self.lengths, nodes, solution)

    def _transitions(self, queue: Array, probability: Array) -> Array:
        """Return the transition matrix between nodes, for next queue lengths and their
        probabilities, both of shape (nodes, …)."""
        n = len(self.nodes)
        at = np.minimum(queue, self.limit) + self.value.owed
        start = (self.states[:, None] * n + self.below[at]).ravel()
        p = np.bincount(start, (probability * (1 - self.share[at])).ravel(), n * n)
        p += np.bincount(start + 1, (probability * self.share[at]).ravel(), n * n + 1)[:-1]
        return np.asarray(p.reshape(n, n))

    def improved(self, policy: Array) -> Array:
        """Return the best policy for h. Nodes where no other decision is better keep theirs."""
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
    """Return the probabilities of 0, 1, … arrivals, shape (len(mean), counts). The distribution is
    Poisson, or negative binomial with the variance `dispersion` · mean. The far tail is cut
    off."""
    top, extra = float(mean.max()), dispersion - 1
    length = 8 + math.ceil(top + 6 * math.sqrt(top * dispersion) + 4 * extra)
    k = np.arange(length - 1)
    ratio = (mean[:, None] + extra * k) / (dispersion * (k + 1))
    log_p = np.zeros((len(mean), length))
    np.cumsum(np.log(ratio), axis=1, out=log_p[:, 1:])
    p = np.exp(log_p - log_p.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def _union(begins: Array, ends: Array) -> Array:
    """Return all whole numbers in the intervals [begin, end), in order."""
    first = begins.min()
    edges = np.zeros(ends.max() - first + 1, dtype=np.int64)
    np.add.at(edges, begins - first, 1)
    np.add.at(edges, ends - first, -1)
    return np.asarray(first + np.flatnonzero(np.cumsum(edges)))


def _nodes(limit: int, largest: int) -> Array:
    """Return the queue lengths at which h is computed: all short ones, and some long ones."""
    nodes = list(range(min(limit, 2 * largest) + 1))
    while nodes[-1] < limit:
        nodes.append(min(limit, nodes[-1] + max(1, int(_NODE_GROWTH * nodes[-1]))))
    return np.array(nodes)
