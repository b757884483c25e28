"""A frontend's connection to one of the two scheduler actors."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from ray_slo.core.quantile import FEW_SAMPLES, Quantile
from ray_slo.core.seldom import Seldom
from ray_slo.serve.config.spec import AppSpec
from ray_slo.serve.direct import Disconnected
from ray_slo.serve.ray_private.actors import find_actor, this_node, usable_nodes
from ray_slo.serve.scheduler.actor import get_or_create_scheduler
from ray_slo.serve.scheduler.lease import candidate_name
from ray_slo.serve.scheduler.line import SchedulerLine

if TYPE_CHECKING:
    from ray_slo.serve.channels.channel import ActorChannel

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_APART_S = 30.0  # a spare on the leader's node looks for another node once in so many seconds
_FIRST_S = 30.0  # the spare is made when the node of the other one is known, or after this time
_TICK_S = 0.05
_QUIET_TICKS = 2  # after so many ticks without an answer, the leader is asked for a sign of life
# Its answer may take so many times the usual, and at least and at most so many ticks. A process of
# this machine that runs is given the most: the machine is busy, for another scheduler as well.
_PATIENCE, _LEAST_TICKS, _MOST_TICKS = 4.0, 3, 40
# A leader that answers so many seconds after it was called silent was only slow. The patience is
# twice as long from then on, until no leader was called silent for so many seconds.
_SLOW_S, _FORGET_S = 2.0, 60.0


class Candidate:
    """One of the two actors that may lead, as a frontend sees it.

    Attributes:
        actor: its handle. None until it is found.
        found: set when its node is known for the first time.
        answers: number of its answers.
        is_silent: whether it has not answered since it was found silent.
    """

    def __init__(
        self, spec: AppSpec, app_key: str, client: str, number: int, channel: ActorChannel
    ) -> None:
        self._spec = spec
        self._app_key = app_key
        self._client = client
        self._number = number
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._node = this_node()
        self._line: SchedulerLine | None = None
        self._epoch: str | None = None
        self._looked_at = -math.inf  # for another node
        self.actor: Any = None
        self.found = asyncio.Event()
        self.answers = 0
        self.is_silent = False
        self._poller = self._loop.create_task(self._poll())

    @property
    def node(self) -> str:
        """Ray's id of its node."""
        return "" if self._line is None else self._line.node

    @property
    def is_connected(self) -> bool:
        """Whether it has answered a poll of this connection."""
        return self._epoch is not None

    @property
    def is_running(self) -> bool:
        """Whether it is a process of this machine that runs."""
        return self._line is not None and self._line.is_running

    def status(self, *, leads: bool) -> dict[str, Any]:
        """Return its node and its state for `ray-slo status`."""
        state = "leads" if leads else "silent" if self.is_silent else "spare"
        return {"node": self.node, "state": state if self.is_connected else "unreachable"}

    def tell(self, method: str, *args: Any) -> None:
        """Call a method whose first arguments are this client, and for `events` its epoch."""
        if self._line is not None and self._epoch is not None:
            about = (self._client, self._epoch) if method == "events" else (self._client,)
            self._line.tell(method, *about, *args)

    async def ping(self) -> None:
        """Wait for a sign of life.

        Raises:
            RayError, Disconnected: it cannot be reached.
        """
        if self._line is not None:
            await self._line.ask("ping")
            self._answered()

    def close(self) -> None:
        """Send and receive nothing more."""
        self._poller.cancel()
        if self.actor is not None:
            self.actor.goodbye.remote(self._client)
        if self._line is not None:
            self._line.close()

    def _answered(self) -> None:
        self.answers += 1
        if self.is_silent:
            self.is_silent = False
            self._channel.answers_again()

    async def _find(self) -> Any:
        other = self._channel.other_than(self)
        if self._number and not other.found.is_set():
            name = candidate_name(self._app_key, self._number)
            with suppress(ValueError):  # there is none yet
                return await self._loop.run_in_executor(None, find_actor, name)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(other.found.wait(), _FIRST_S)
        return await self._loop.run_in_executor(
            None, get_or_create_scheduler, self._spec, self._app_key, self._number, other.node
        )

    async def _keep_apart(self) -> None:
        """End this spare if it is on the leader's node although there is another one. It is found
        there if an earlier application of this name left it, or if nodes came later."""
        now, leader = self._loop.time(), self._channel.other_than(self)
        if self.node != leader.node or now - self._looked_at < _APART_S:
            return
        self._looked_at = now
        nodes = await self._loop.run_in_executor(None, usable_nodes)
        if any(node != self.node for node in nodes):
            logger.warning("the spare scheduler is on the leader's node; another one is made apart")
            ray.kill(self.actor)

    async def _connect(self) -> SchedulerLine:
        if self.actor is None:
            self.actor = await self._find()
            await self.actor.configure.remote(self._spec.without_code())
        if self._line is None:
            self._line = SchedulerLine(self.actor)
            await self._line.connect()
            self.found.set()
        return self._line

    async def _poll(self) -> None:
        acked, channel = 0, self._channel
        while True:
            try:
                line = await self._connect()
                epoch, term, sequence, messages = await line.ask(
                    "poll", self._client, self._epoch, acked, self._node, channel.term
                )
                self._answered()
                is_new = epoch != self._epoch
                if is_new:
                    await self.actor.configure.remote(self._spec.without_code())
                    self._epoch, acked = epoch, 0
                news = messages if sequence > acked else []
                acked = max(acked, sequence)
                channel.polled(self, term, news, is_new=is_new)
                if channel.is_spare(self):
                    await self._keep_apart()
            except asyncio.CancelledError:
                raise
            except (ray.exceptions.RayError, Disconnected) as error:
                logger.warning("scheduler unreachable (%s); trying again", type(error).__name__)
                again_s = 0.2
            except Exception:
                logger.exception("poll of the scheduler failed; trying again")
                again_s = 1.0
            else:
                continue
            # Events may be lost with it, even if it is the same scheduler afterwards: submit again.
            if self._line is not None:
                self._line.close()
            self.actor = self._line = self._epoch = None
            channel.lost(self)
            await asyncio.sleep(again_s)


class Silence:
    """Notices that the leader is silent while requests wait for it.

    It counts ticks, because time also passes while this event loop does not run, and then the
    silence is not the leader's fault.

    Args:
        waits: function that returns the leader if requests wait for it.
        on_silence: called with a leader that did not answer.
    """

    def __init__(
        self, waits: Callable[[], Candidate | None], on_silence: Callable[[Candidate], None]
    ) -> None:
        self._waits = waits
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last: tuple[Candidate, int] | None = None  # the leader, and number of its answers
        self._ticks = 0
        self._ping: asyncio.Task[None] | None = None
        self._least_ticks = _LEAST_TICKS
        self._called_at = -math.inf  # when a leader was last called silent
        self._ping_s = Quantile(0.95, prior=FEW_SAMPLES)

    def watch(self) -> None:
        """Watch until no request waits."""
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def was_wrong(self) -> None:
        """Note that the one that was called silent last has answered."""
        if self._loop.time() - self._called_at < _SLOW_S:
            self._least_ticks = min(2 * self._least_ticks, _MOST_TICKS)

    def close(self) -> None:
        """Watch no more."""
        for handle in (self._timer, self._ping):
            if handle is not None:
                handle.cancel()

    def _tick(self) -> None:
        self._timer = None
        leader = self._waits()
        if leader is None:
            self._last, self._ticks = None, 0
            return
        self.watch()
        if self._last != (leader, leader.answers):
            self._last, self._ticks = (leader, leader.answers), 0
            return
        self._ticks += 1
        if self._ticks == _QUIET_TICKS:
            if self._ping is not None:
                self._ping.cancel()
            self._ping = self._loop.create_task(self._time_ping(leader))
        elif self._ticks > _QUIET_TICKS and (
            self._ticks > _QUIET_TICKS + self._patience_with(leader)
        ):
            self._last, leader.is_silent = None, True
            self._called_at = self._loop.time()
            self._on_silence(leader)

    def _patience_with(self, leader: Candidate) -> int:
        if leader.is_running:
            return _MOST_TICKS
        if self._loop.time() - self._called_at > _FORGET_S:
            self._least_ticks = _LEAST_TICKS
        usual = _PATIENCE * self._ping_s.value(default=0.0) / _TICK_S
        return min(max(math.ceil(usual), self._least_ticks), _MOST_TICKS)

    async def _time_ping(self, leader: Candidate) -> None:
        since = self._loop.time()
        with suppress(ray.exceptions.RayError, Disconnected):  # its poll fails, too
            await leader.ping()
            self._ping_s.add(self._loop.time() - since)
