"""Groups that a planner finds and keeps: each has workers of its own kinds, and models of its own.
The planner sizes them together; nothing moves between them.

    >>> homes = Homes({"cpu": "a", "gpu": "b"}, {"l": "a", "m": "b"}, {"l": "l", "m-1": "m"})
    >>> homes.routing.complete  # nobody has loaded anything yet
    False
    >>> cpu = WorkerSays("w", "cpu", frozenset({"l"}), group="a")
    >>> gpu = WorkerSays("v", "gpu", frozenset({"m-1"}), group="b")
    >>> homes.look(Seen({"w": cpu, "v": gpu}))
    >>> homes.routing
    Routing(number=2, routes={'l': 'a', 'm': 'b'}, groups=('a', 'b'), complete=True)
    >>> homes.send_home({"w": Wanted((), ("l",))}, Seen({"w": cpu}))["w"].group
    'a'
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_slo.planning.brains.brain import Routing, Seen, Wanted, WorkerSays


class Homes:
    """Which group a worker is in, and where a model's requests go.

    Args:
        kinds: group of each kind of worker.
        models: group of each model.
        model_of: model of each variant.
    """

    def __init__(
        self, kinds: Mapping[str, str], models: Mapping[str, str], model_of: Mapping[str, str]
    ) -> None:
        self._kinds = dict(kinds)
        self._models = dict(models)
        self._model_of = dict(model_of)
        self._complete = False  # and stays so: a worker that goes is replaced

    def look(self, seen: Seen) -> None:
        """See which models are served in their groups."""
        served = {
            (self._model_of.get(variant), says.group)
            for says in seen.workers.values()
            for variant in says.loaded
        }
        self._complete |= served >= set(self._models.items())

    def send_home(self, wanted: Mapping[str, Wanted], seen: Seen) -> dict[str, Wanted]:
        """The same, with the group of each worker."""
        homes = {worker: self._home(says) for worker, says in seen.workers.items()}
        return {w: order._replace(group=homes.get(w)) for w, order in wanted.items()}

    def _home(self, says: WorkerSays) -> str | None:
        return self._kinds.get(says.kind)

    @property
    def routing(self) -> Routing | None:
        """Where requests go; None where there are no groups."""
        if not self._models:
            return None
        groups = tuple(sorted({*self._models.values(), *self._kinds.values()}))
        return Routing(1 + self._complete, dict(self._models), groups, self._complete)
