"""States, actions and transitions of one worker's decision process (RAMSIS §4.2–4.4).

A state is (n, slot): there are n queued requests, and the slack of the most urgent one is at least
`slacks_s[slot]` and below the next. After taking all n with a latency of ℓ, the next state depends
only on ℓ and on the *phase*: the number of requests that went to other workers since this worker's
latest one. So the kernel is a product of three factors. None of them has states × actions × states
entries:

    state ──phases──▶ phase ──first(ℓ)──▶ outcome ──after──▶ next state

* `phases[n, slot, phase]`: probability of the phase, given that n requests came within SLO − slack
  (interval A).
* `first[ℓ, outcome, phase]`: probability that nothing arrives within ℓ, or that the worker's next
  request arrives in a certain *cell* of time before the next decision (intervals B and C).
* `after[outcome, state]`: probabilities of the number of further arrivals in the rest (interval D).

Slots are ranges of slack. Cells are ranges of waiting time that subdivide the slots. A policy
distinguishes slots. Cells only decide how finely probabilities are integrated.

A batch of b < n leaves requests in the queue. The most urgent of these has waited for the share β
of the head's waiting time. By the order statistics of arrivals, β has a Beta distribution. A few
quantiles of β and a few groups of phases approximate the distribution (`Partial`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import betaincinv

from ray_slo.papers.ramsis.arrivals import Arrivals
from ray_slo.papers.ramsis.problem import Problem, VariantProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEVER = 1e-14  # smaller probabilities are neglected
EMPTY, FRESH = 0, 1  # outcomes without a cell: nothing arrived; one request arrived just now
_BETA_QUANTILES = 8
_PHASE_GROUPS = 8


@dataclass(frozen=True)
class Stream:
    """The arrivals at one worker: every `every`-th request of a process of `rate` per second."""

    arrivals: Arrivals
    rate: float
    every: int

    def counts(self, spans_s: Floats, most: int) -> Floats:
        """Return P(i requests) for i = 0 … most within spans that start at a request, shape (spans,
        most + 1). The probability of more than `most` is added to the last."""
        k = np.arange(most + 1) * self.every
        tail = self.arrivals.at_least(k, spans_s[:, None] * self.rate, after_arrival=True)
        return np.asarray(tail - np.append(tail[:, 1:], np.zeros((len(spans_s), 1)), axis=1))

    def most(self, span_s: float) -> int:
        """Return a number of requests that practically never comes within a span."""
        mean = self.rate * span_s
        spread = math.sqrt(mean * max(1.0, 1 / self.arrivals.shape))
        return int((mean + 10 * spread + 20) / self.every) + 2


class Kernel:
    """The decision process of `problem`, vectorised. State 0 is empty, state 1 + (n−1)·J + slot has
    n requests, and the last state has a full queue."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.variants: tuple[VariantProfile, ...] = problem.candidates
        self.N = problem.longest_queue
        # ℓ(m, b) of shape (variants, N); infinite beyond a variant's largest batch.
        self.latency: Floats = np.array(
            [[p.latency(b) for b in range(1, self.N + 1)] for _, _, p in self.variants]
        )
        self.accuracy: Floats = np.array([accuracy for _, accuracy, _ in self.variants])
        self.slacks_s = self._slots()
        self.J = len(self.slacks_s)
        self.num_states = self.N * self.J + 2
        self.full = self.num_states - 1
        self.streams, self._stream_of = self._balanced()
        # Whether variant m can take all n within the slack, shape (N, J, M).
        fits = self.latency.T[:, None, :] <= self.slacks_s[None, :, None] + 1e-9
        self.fits: NDArray[np.bool_] = fits
        # The possible latencies of full batches, shape (latencies,), and the index of
        # (variant, n − 1) among them, shape (M, N). It is −1 for a latency that is not used.
        self.used_latencies, self.latency_index = self._used()
        self._cells()
        # The probability of each phase, shape (N, J, phases), and the expected waiting time of the
        # most urgent of n requests, in seconds, shape (N, J). There is one phase per request to
        # another worker (round robin), or one per stream.
        self.phases, self.waits = self._histories()

    # States -----------------------------------------------------------------------------------

    def _slots(self) -> Floats:
        slo = self.problem.slo_s
        if self.problem.discretization == "fld":
            return np.linspace(0.0, slo, self.problem.num_slacks + 1)
        within = np.unique(np.round(self.latency[self.latency <= slo], 9))
        return np.unique(np.concatenate([[0.0], within, [slo]]))

    def _balanced(self) -> tuple[list[Stream], Ints]:
        """Return the streams, and the index of the stream to a worker with n = 1 … N queued
        requests, shape (N,)."""
        p = self.problem
        if p.balancing == "round_robin":
            return [Stream(p.arrivals, p.rate, p.num_workers)], np.zeros(self.N, dtype=np.int64)
        each = p.rate / p.num_workers
        service = 1 / self._usual_latency(each)
        # Appendix I.1. The formula assumes no batching, so the result is at most an even share.
        seldom = each
        if each < service:
            seldom = (each / service) ** p.num_workers * service
        streams = [Stream(p.arrivals, each, 1), Stream(p.arrivals, max(seldom, 1e-9 * each), 1)]
        return streams, (np.arange(1, self.N + 1) >= 3).astype(np.int64)

    def _usual_latency(self, rate: float) -> float:
        """Return μ of Appendix I.1: the largest ℓ(m, 1) of a variant that keeps up within
        SLO / 2."""
        sizes = np.arange(1, self.N + 1)
        able = ((self.latency <= self.problem.slo_s / 2) & (sizes / self.latency >= rate)).any(1)
        return float(self.latency[able, 0].max() if able.any() else self.latency[:, 0].min())

    def _cells(self) -> None:
        """Set the cells of waiting time, their slots, and the states after a first arrival in
        each."""
        slo = self.problem.slo_s
        longest = max(float(self.used_latencies.max()), slo)
        gap = min(s.every / s.rate for s in self.streams)
        widest = max(min(slo / 100, gap / 2), slo / 400)
        bounds = np.unique(np.concatenate([slo - self.slacks_s, [0.0, slo, longest]]))
        bounds = bounds[np.append(True, np.diff(bounds) > 1e-9)]
        edges = [
            np.linspace(a, b, max(math.ceil((b - a) / widest - 1e-9), 1), endpoint=False)
            for a, b in pairwise(bounds.tolist())
        ]
        self.edges: Floats = np.append(np.concatenate(edges), bounds[-1])
        middle = (self.edges[1:] + self.edges[:-1]) / 2
        self.cell_slot = self.slot_of(slo - middle)
        self.num_cells = len(middle)
        self.num_outcomes = 2 + len(self.streams) * self.num_cells
        self.cell_wait: Floats = middle

        excess = np.zeros(self.num_outcomes)
        rows: list[Ints] = [np.array([EMPTY, FRESH])]
        columns: list[Ints] = [np.array([0, self.J])]
        shares: list[Floats] = [np.ones(2)]
        for i, stream in enumerate(self.streams):
            cells = 2 + i * self.num_cells + np.arange(self.num_cells)
            most = max(stream.most(longest), self.N)
            more = stream.counts(middle, most)  # arrivals after the first one
            states = 1 + np.arange(self.N)[None, :] * self.J + self.cell_slot[:, None]
            rows += [np.repeat(cells, self.N), cells]
            columns += [states.ravel(), np.full(self.num_cells, self.full)]
            shares += [more[:, : self.N].ravel(), more[:, self.N :].sum(1)]
            excess[cells] = more[:, self.N :] @ (np.arange(self.N, most + 1) + 1 - self.N)
        # The matrix is sparse: a cell has one slot, so N + 1 next states of N · J + 2.
        self.after = csr_array(
            (np.concatenate(shares), (np.concatenate(rows), np.concatenate(columns))),
            shape=(self.num_outcomes, self.num_states),
        )
        self.excess: Floats = excess  # expected requests beyond N; the model counts them as lost

    def slot_of(self, slack_s: Floats) -> Ints:
        """Return the slot with slacks_s[slot] ≤ slack < slacks_s[slot + 1]. It is 0 for late
        requests."""
        slots = np.searchsorted(self.slacks_s, slack_s + 1e-9, side="right") - 1
        return np.asarray(np.maximum(slots, 0))

    def _histories(self) -> tuple[Floats, Floats]:
        """Return `phases` and `waits`. The waiting times in a slot are weighted by the probability
        that n requests came in them."""
        inside = self.cell_wait < self.problem.slo_s
        wait = np.append(self.cell_wait[inside], 0.0)  # 0: a request just arrived
        slot = np.append(self.cell_slot[inside], self.J - 1)
        within = np.eye(self.J)[:, slot]
        middle = within @ wait / np.maximum(within.sum(1), 1)
        phases, waits = [], []
        for stream in self.streams:
            every, n = stream.every, np.arange(self.N)[:, None]
            pmf = stream.arrivals.pmf(self.N * every - 1, wait * stream.rate, after_arrival=True)
            weights = (within @ pmf).reshape(self.J, self.N, every).transpose(1, 0, 2)
            waited = (within @ (pmf * wait[:, None])).reshape(self.J, self.N, every).sum(2).T
            total = weights.sum(2)
            # States that (nearly) never occur take the likeliest phase: the first with more
            # requests than expected, the last with fewer.
            many = n * every > middle * stream.rate
            never = np.zeros((self.N, self.J, every))
            never[..., 0], never[..., -1] = many, ~many
            if every == 1:
                never[:] = 1.0
            occurs, safe = total > 1e-200, np.maximum(total, 1e-200)
            phases.append(np.where(occurs[..., None], weights / safe[..., None], never))
            waits.append(np.where(occurs, waited / safe, middle))
        if len(self.streams) == 1:
            return phases[0], waits[0]
        chosen = np.eye(len(self.streams))[self._stream_of]
        return (
            np.repeat(chosen[:, None, :], self.J, axis=1),
            np.array([waits[i][n] for n, i in enumerate(self._stream_of)]),
        )

    # Actions that take all that is queued -------------------------------------------------------

    @cached_property
    def late_choice(self) -> Ints:
        """The variant that serves n requests fastest (§4.3.1), shape (N,)."""
        return np.asarray(np.argmin(self.latency, axis=0))

    def _used(self) -> tuple[Floats, Ints]:
        """Return the possible latencies of full batches, and the index of (variant, n − 1) among
        them."""
        used = self.latency <= self.problem.slo_s + 1e-9
        if self.problem.late == "serve":
            used[self.late_choice, np.arange(self.N)] = True
        else:
            used[self.late_choice[0], 0] = True
        values, inverse = np.unique(np.round(self.latency[used], 9), return_inverse=True)
        index = np.full(self.latency.shape, -1)
        index[used] = inverse
        return values, index

    @cached_property
    def first(self) -> Floats:
        """See the module. The shape is (latencies, outcomes, phases), and outcomes sum to 1."""
        latencies = self.used_latencies
        spans = np.maximum(latencies[:, None] - self.edges[None, :], 0.0)
        result = np.zeros((len(latencies), self.num_outcomes, self.phases.shape[2]))
        for i, stream in enumerate(self.streams):
            reached = self._first_by(stream, spans)
            phases = slice(i, i + 1) if len(self.streams) > 1 else slice(None)
            cells = slice(2 + i * self.num_cells, 2 + (i + 1) * self.num_cells)
            result[:, cells, phases] = reached[:, :-1] - reached[:, 1:]
            result[:, EMPTY, phases] = 1 - reached[:, 0]
        return result

    def _first_by(self, stream: Stream, spans: Floats) -> Floats:
        """Return P(the worker's next request arrives within a span | phase), shape (*spans.shape,
        every)."""
        distinct, inverse = np.unique(spans.ravel(), return_inverse=True)
        pmf = stream.arrivals.pmf(stream.every - 1, distinct * stream.rate, after_arrival=False)
        at_most = np.minimum(np.cumsum(pmf, axis=1), 1.0)  # k = 0 … every − 1
        reached = 1 - at_most[:, ::-1]  # phase r needs every − r more requests
        reached[distinct == 0] = 0.0
        return np.asarray(reached[inverse.ravel()].reshape(*spans.shape, stream.every))

    def outcomes_of(self, choice: Ints) -> Floats:
        """Return the probabilities of outcomes, shape (states, outcomes). `choice` is the variant
        in each (n, slot), shape (N, J). A state with −1 takes no full batch; its row is zero."""
        rows = np.zeros((self.num_states, self.num_outcomes))
        rows[0, FRESH] = 1.0
        for n in range(self.N):
            for m in np.unique(choice[n]):
                if m < 0:
                    continue
                slots = np.flatnonzero(choice[n] == m)
                first = self.first[self.latency_index[m, n]]
                rows[1 + n * self.J + slots] = self.phases[n, slots] @ first.T
        rows[self.full] = rows[1 + (self.N - 1) * self.J]
        return rows

    def expect(self, value: Floats) -> Floats:
        """Return the expected value of the outcome of full batches, shape (N, J, M). It is NaN for
        latencies that are not used."""
        by_phase = np.einsum("lor,o->lr", self.first, value, optimize=True)
        by_phase = np.concatenate([by_phase, np.full((1, by_phase.shape[1]), np.nan)])
        of_action = by_phase[self.latency_index.T]  # (N, M, phases)
        return np.asarray(np.matmul(self.phases, of_action.transpose(0, 2, 1)))


@dataclass(frozen=True)
class Group:
    """Partial batches of one size b out of n requests, and the variants that can take them."""

    n: int
    size: int
    variants: Ints  # (V,); −1: the batch is dropped
    slots: Ints  # (S,): slots in which a variant can take it
    allowed: NDArray[np.bool_]  # (S, V): whether a variant can take it in a slot
    next_slot: Ints  # (S, V, R, Q): slot of the remaining requests
    arriving: Floats  # (V, R, N − (n − b) + 2): P(i arrive meanwhile); the last: more than fit
    beyond: Floats  # (V, R): expected number of requests beyond N


class Partial:
    """Actions that leave requests in the queue.

    Args:
        kernel: the process.
        wanted: every action as (n, b, variant or −1 to drop, allowed slots of shape (J,)).
    """

    def __init__(
        self, kernel: Kernel, wanted: Iterable[tuple[int, int, int, NDArray[np.bool_]]]
    ) -> None:
        self.kernel = kernel
        phases = kernel.phases.shape[2]
        self.R = min(phases, _PHASE_GROUPS)
        group_of = np.arange(phases) * self.R // phases
        self._members = np.eye(self.R)[group_of]  # (phases, R)
        self.weights: Floats = kernel.phases @ self._members  # (N, J, R)
        self._counts: dict[tuple[int, int], Floats] = {}
        by_size: dict[tuple[int, int], list[tuple[int, NDArray[np.bool_]]]] = {}
        for n, size, variant, allowed in wanted:
            if allowed.any():
                by_size.setdefault((n, size), []).append((variant, allowed))
        self.groups = [self._group(n, size, acts) for (n, size), acts in by_size.items()]

    def _group(self, n: int, size: int, acts: list[tuple[int, NDArray[np.bool_]]]) -> Group:
        k = self.kernel
        variants = np.array([v for v, _ in acts])
        allowed = np.array([a for _, a in acts]).T
        slots = np.flatnonzero(allowed.any(1))
        latency = np.array([k.latency[v, size - 1] if v >= 0 else 0.0 for v in variants])
        waits = k.waits[n - 1, slots, None, None] * self._shares(n, size)  # (S, R, Q)
        slack = k.problem.slo_s - waits[:, None] - latency[None, :, None, None]
        room = k.N - (n - size)
        arriving = np.zeros((len(variants), self.R, room + 2))
        beyond = np.zeros((len(variants), self.R))
        for i, variant in enumerate(variants.tolist()):
            counts = self._arriving(variant, size)
            fitting = min(room + 1, counts.shape[1])
            arriving[i, :, :fitting] = counts[:, :fitting]
            arriving[i, :, -1] = counts[:, fitting:].sum(1)
            beyond[i] = counts @ np.maximum(np.arange(counts.shape[1]) - room, 0)
        return Group(n, size, variants, slots, allowed[slots], k.slot_of(slack), arriving, beyond)

    def _shares(self, n: int, size: int) -> Floats:
        """Return quantiles of β by phase group, shape (R, Q)."""
        k = self.kernel
        if n == size:
            return np.zeros((self.R, _BETA_QUANTILES))
        shape = k.streams[0].arrivals.shape
        if len(k.streams) > 1:
            every, middle = 1, np.zeros(self.R)
        else:
            every = k.streams[0].every
            middle = (np.arange(every) @ self._members) / self._members.sum(0)
        ahead = size * every * shape
        behind = ((n - size - 1) * every + middle + 1) * shape
        points = (np.arange(_BETA_QUANTILES) + 0.5) / _BETA_QUANTILES
        return np.asarray(betaincinv(behind[:, None], ahead, points[None, :]))

    def _arriving(self, variant: int, size: int) -> Floats:
        """Return P(i requests arrive while the batch runs | phase group), shape (R, most + 1)."""
        k = self.kernel
        if variant < 0:  # dropping takes no time
            return np.ones((self.R, 1))
        if (variant, size) not in self._counts:
            latency = k.latency[variant, size - 1]
            most = max(s.most(latency) for s in k.streams)
            rows = []
            for stream in k.streams:
                wanted = np.arange(most + 1)[:, None] * stream.every - np.arange(stream.every)
                tail = stream.arrivals.at_least(wanted, latency * stream.rate, after_arrival=False)
                rows.append(tail.T)  # (every, most + 1)
            tail = (self._members.T @ np.concatenate(rows)) / self._members.sum(0)[:, None]
            self._counts[variant, size] = tail - np.append(tail[:, 1:], tail[:, :1] * 0, axis=1)
        return self._counts[variant, size]

    def expect(self, values: Floats, loss: float) -> list[Floats]:
        """Return the expected value of the next state, minus `loss` per request beyond N. The
        result has an array of shape (S, V) for each group.

        Args:
            values: values of the states, shape (states,).
        """
        k = self.kernel
        by_queue = values[1 : k.full].reshape(k.N, k.J)
        lost = np.full((1, k.J), values[k.full])
        phases = np.arange(self.R)[None, :, None]
        result = []
        for g in self.groups:
            if g.n == g.size:
                result.append(np.full((len(g.slots), 1), values[0]))
                continue
            ahead = np.concatenate([by_queue[g.n - g.size - 1 :], lost])  # n' = left … N, full
            by_slot = g.arriving @ ahead - loss * g.beyond[:, :, None]  # (V, R, J)
            weights = self.weights[g.n - 1, g.slots]
            q = np.empty((len(g.slots), len(g.variants)))
            for v in range(len(g.variants)):
                means = by_slot[v][phases, g.next_slot[:, v]].mean(2)
                q[:, v] = (weights * means).sum(1)
            result.append(q)
        return result

    def transitions(self, chosen: Iterable[tuple[int, int, Ints]]) -> tuple[csr_array, Floats]:
        """Return the transitions of the states that take partial batches, shape (states, states),
        and their expected number of requests beyond N, shape (states,). Other rows are empty.

        Args:
            chosen: (group, index of the variant in the group, slots) of these states.
        """
        k = self.kernel
        excess = np.zeros(k.num_states)
        entries: list[tuple[Ints, Ints, Floats]] = []
        for number, v, slots in chosen:
            g = self.groups[number]
            at = 1 + (g.n - 1) * k.J + slots
            if g.n == g.size:
                entries.append((at, np.zeros_like(at), np.ones(len(at))))
                continue
            weight = self.weights[g.n - 1, slots]  # (S, R)
            spread = np.zeros((len(slots), self.R, k.J))
            index = np.indices((len(slots), self.R, _BETA_QUANTILES))
            to = g.next_slot[np.searchsorted(g.slots, slots), v]
            np.add.at(spread, (index[0], index[1], to), 1 / _BETA_QUANTILES)
            spread *= weight[:, :, None]
            reached = np.einsum("ri,srj->sij", g.arriving[v, :, :-1], spread, optimize=True)
            state, queue, slot = np.nonzero(reached > NEVER)
            to_state = 1 + (g.n - g.size - 1 + queue) * k.J + slot
            entries.append((at[state], to_state, reached[state, queue, slot]))
            entries.append((at, np.full_like(at, k.full), weight @ g.arriving[v, :, -1]))
            excess[at] = weight @ g.beyond[v]
        rows, columns, shares = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        last = 1 + (k.N - 1) * k.J  # a full queue counts as N late requests
        again = rows == last
        excess[k.full] = excess[last]
        where = (
            np.append(rows, np.full(again.sum(), k.full)),
            np.append(columns, columns[again]),
        )
        shape = (k.num_states, k.num_states)
        return csr_array((np.append(shares, shares[again]), where), shape=shape), excess
