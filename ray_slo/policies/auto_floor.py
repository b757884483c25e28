"""A floor per model in overload: models that do better than needed give up requests.

In overload, a policy that maximises the answers in time serves those models least whose requests
take most time of a worker. `Floor` limits the difference. It measures each model's share of
requests in time. The worst share must be at least the floor times the mean share. While it is not,
`Floor` lowers a *cap*: new requests of a model whose share exceeds its cap are refused, so the
workers have time for the others. The first model to be capped is the one whose requests take most
time, of those with a share above the floor, because it loses the fewest answers for the time that
it frees. When the worst share is better than the floor, caps rise again, in reverse order. If the
worst model has a cap itself, this cap rises.

Worked example: requests of three models take 4, 10 and 20 ms, their shares are 100, 100 and 40 %,
and the floor is 0.7. The mean is 80 %, and 40 is less than 56. So the second model's cap falls,
until its share is 75 % and the third one has 55 %: 70 % of the mean, 77 %, is 54.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ray_slo.core.requests import BatchOutcome, Request, RequestId

_WINDOW_S, _WINDOW_SLOS = 2.0, 20.0  # of the measured shares, at least
_LOOKS = 8  # per window
_STEP = 0.97  # of the cap
_SLACK = 1.01  # above the floor, before the cap rises
_FEW = 10  # requests of a model in the window, below which its share is unknown


class Floor:
    """See the module.

    Args:
        least: the worst model's share of requests in time, over the mean share.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._caps: dict[str, float] = {}  # below 1
        self._busy_s: dict[str, float] = {}  # of workers
        self._ran: dict[str, float] = {}
        self._good: dict[str, float] = {}
        self._all: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._present: dict[RequestId, float] = {}  # deadlines
        self._refused: list[Request] = []
        self._looked_at = -math.inf
        self._window_s = _WINDOW_S

    def covers(self, slos_s: Iterable[float]) -> None:
        """The SLOs of the application, seconds."""
        self._window_s = max([_WINDOW_S, *(_WINDOW_SLOS * slo_s for slo_s in slos_s)])

    def admitted(self, now: float, requests: Sequence[Request]) -> list[Request]:
        """Those that stay, of requests that arrived. One that stayed before always does."""
        self._look(now)
        stay = []
        for r in requests:
            if r.upstream is None and r.id not in self._present:
                if self._shares.get(r.model, 0.0) > self._caps.get(r.model, 1.0):
                    self._count(r.model, good=False)
                    self._refused.append(r)
                    continue
                self._present[r.id] = r.deadline
            stay.append(r)
        return stay

    def refused(self) -> list[Request]:
        """Those that did not stay, once."""
        refused, self._refused = self._refused, []
        return refused

    def ended(self, requests: Iterable[Request], at: float = math.inf) -> None:
        """Requests were answered, or (`at` is infinite) will never be."""
        for r in requests:
            if self._present.pop(r.id, None) is not None:
                self._count(r.model, good=r.deadline >= at)

    def ran(self, outcome: BatchOutcome) -> None:
        """A batch ended by itself."""
        took_s = outcome.finished_at - outcome.started_at
        for model, count in Counter(r.model for r in outcome.requests).items():
            part_s = took_s * count / len(outcome.requests)
            self._busy_s[model] = self._busy_s.get(model, 0.0) + part_s
            self._ran[model] = self._ran.get(model, 0.0) + count
        self.ended(outcome.requests, outcome.finished_at)

    def cancelled(self, requests: Sequence[Request]) -> list[Request]:
        """Those that had stayed, of requests whose clients wait no longer."""
        gone = {r.id for r in requests}
        for request_id in gone:
            self._present.pop(request_id, None)
        refused = {r.id for r in self._refused}
        self._refused = [r for r in self._refused if r.id not in gone]
        return [r for r in requests if r.id not in refused]

    def _count(self, model: str, good: bool) -> None:
        self._good[model] = self._good.get(model, 0.0) + good
        self._all[model] = self._all.get(model, 0.0) + 1
        if self._all[model] >= _FEW:
            self._shares[model] = self._good[model] / self._all[model]

    def _look(self, now: float) -> None:
        passed_s = now - self._looked_at
        if passed_s < self._window_s / _LOOKS:
            return
        self._looked_at = now
        # Those of a lost batch may not come again.
        old = now - self._window_s
        self._present = {i: deadline for i, deadline in self._present.items() if deadline > old}
        keep = math.exp(-passed_s / self._window_s)
        for counts in (self._good, self._all, self._busy_s, self._ran):
            for model in counts:
                counts[model] *= keep
        self._shares = {m: self._good[m] / n for m, n in self._all.items() if n >= _FEW}
        self._caps = {m: cap for m, cap in self._caps.items() if m in self._shares}
        if self._shares:
            self._set_caps()

    def _set_caps(self) -> None:
        shares, caps = self._shares, self._caps
        aim = self._least * sum(shares.values()) / len(shares)
        worst = min(shares, key=lambda m: shares[m])
        if shares[worst] < aim and worst not in caps:
            if above := [m for m, share in shares.items() if share * _STEP > aim]:
                model = max(above, key=self._work_s)
                caps[model] = _STEP * min(caps.get(model, 1.0), shares[model])
        elif shares[worst] < aim or (shares[worst] > _SLACK * aim and caps):
            model = worst if worst in caps else min(caps, key=self._work_s)
            caps[model] /= _STEP
            if caps[model] >= 1:
                del caps[model]

    def _work_s(self, model: str) -> float:
        """Time of a worker per request."""
        return self._busy_s[model] / self._ran[model] if model in self._ran else 0.0
