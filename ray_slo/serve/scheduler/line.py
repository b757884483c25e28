"""Calls of a scheduler actor: over a socket on its machine, otherwise through Ray.

An actor call costs about a millisecond of CPU on both sides together, and a frontend and a worker
make several per batch. On the scheduler's machine they use a direct connection instead
(`serve.direct`). All messages on it arrive in order.
"""

from __future__ import annotations

from typing import Any

from ray_slo.serve.direct import Connection, NotDirect, connect

METHODS = frozenset({"events", "lead", "ping", "poll", "report"})
"""Methods of the actor that may be called over a socket."""


class SchedulerLine:
    """A connection to a scheduler actor.

    Args:
        actor: its handle.

    Attributes:
        node: Ray's id of its node.
    """

    def __init__(self, actor: Any) -> None:
        self.node = ""
        self._actor = actor
        self._connection: Connection | None = None

    async def connect(self) -> None:
        """Connect to the actor's socket, if it is on this machine.

        Raises:
            RayError: the actor did not answer.
        """
        self.node, address = await self._actor.where.remote()
        self._connection = await connect(address) if address else None

    @property
    def is_running(self) -> bool:
        """Whether the actor is a process of this machine that runs: see `Connection.is_running`."""
        return self._connection is not None and self._connection.is_running

    def tell(self, method: str, *args: Any) -> None:
        """Call one of `METHODS` without waiting; nobody learns whether it arrived."""
        if self._connection is not None and self._connection.is_open:
            try:
                self._connection.tell((method, *args))
                return
            except NotDirect:  # nothing was sent
                pass
        getattr(self._actor, method).remote(*args)

    async def ask(self, method: str, *args: Any) -> Any:
        """The answer of one of `METHODS`.

        Raises:
            RayError, Disconnected: the actor died, or cannot be reached.
        """
        if self._connection is not None and self._connection.is_open:
            return await self._connection.call((method, *args))
        return await getattr(self._actor, method).remote(*args)

    def close(self) -> None:
        """Close the socket."""
        if self._connection is not None:
            self._connection.close()
