"""The worker: a Serve replica that loads every variant of every model, and runs batches one at a
time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from ray_slo.core import LatencyProfile
from ray_slo.core.cluster import Assigned
from ray_slo.core.processes import bound_threads
from ray_slo.models.checkpoint import warn_of_checkpoints
from ray_slo.serve.config.spec import AppSpec, worker_deployment
from ray_slo.serve.direct import Listener
from ray_slo.serve.memory import keep_blocks, vitals
from ray_slo.serve.messages import Heartbeat, Piece, PieceResult, WorkerMemory
from ray_slo.serve.payloads import Results, Unreadable
from ray_slo.serve.planner.links import Follower
from ray_slo.serve.ray_private.actors import bring_forward, this_node
from ray_slo.serve.ray_private.context import count_only
from ray_slo.serve.ray_private.replica_port import listen_on_node_only
from ray_slo.serve.suspects import note_own_end
from ray_slo.serve.worker.batches import Batches
from ray_slo.serve.worker.failures import Failures
from ray_slo.serve.worker.models import Models
from ray_slo.serve.worker.progress import Starting
from ray_slo.serve.worker.registration import Registration

logger = logging.getLogger(__name__)

_LAST_S = 0.1  # seconds for a piece to arrive after the last grant
_FIRST_BEAT_S = 1.0  # seconds for the first heartbeat to arrive before Serve may send requests


class Worker:
    """Runs batches of every model of the application on one accelerator or CPU slot.

    Attributes:
        models: the user's models on this worker.
        batches: the batches on this worker.
        registration: the worker's registration with its scheduler.
        assigned: the plan's assignment, as the scheduler is told.
    """

    async def __init__(  # type: ignore[misc]
        self, spec: AppSpec, kind: str, frontend: str
    ) -> None:
        listen_on_node_only()
        bring_forward()
        context = serve.get_replica_context()
        self.id: str = context.replica_tag
        self._listener = Listener(self._asked)
        # Tests run workers in their own process, where `os._exit` must stay as it is.
        if in_ray := ray.is_initialized():
            bound_threads()
            keep_blocks()  # for the copies of items
            count_only(("execute",))
            note_own_end(self.id)
            await self._listener.begin()
        self._spec = spec
        self._kind = kind
        self._node = this_node()
        self._left_out: dict[str, str] = {}  # reason by variant
        self.assigned: tuple[Assigned, ...] = ()
        # Serve numbers deployments with equal names in an application; ours get equal numbers.
        frontend += context.deployment.removeprefix(worker_deployment(frontend, kind))
        self._starting = Starting(
            self.id,
            kind,
            lambda: serve.get_deployment_handle(frontend, context.app_name),
            len(spec.variants()),
        )
        self.models = Models(spec, kind, self._starting.doing, rank=context.rank)
        if not self.models.preempts:
            warn_of_checkpoints(spec.policy_of(spec.workers[kind].group).how_to_preempt)
        # Workers of the same code in this cluster: a change of the code may have helped.
        same = (self._node, context.app_name, context.deployment, spec.fingerprint)
        self.batches = Batches(
            self.id,
            self.models,
            lambda report: self.registration.report(report),
            smaller=lambda: self.registration.news(),
            isolate_errors=spec.isolate_errors,
            failures=Failures("#".join(same) if in_ray else ""),
        )
        self.registration = Registration(spec, self._heartbeat, self.batches.refuse)
        async with self._starting.told():
            self._follower = await self._begin(f"{context.app_name}#{frontend}")
        # Serve asks a replica only for what it has when its constructor returns.
        vars(self).update(self.models.instances.records())
        loop = asyncio.get_running_loop()
        self._running = loop.create_task(self.batches.run())
        self._tasks = [loop.create_task(self.registration.beat())]
        if self._follower is not None:
            self.models.begin_service()
            self._tasks.append(loop.create_task(self._follower.follow()))

    async def _begin(self, app_key: str) -> Follower | None:
        """Load the models that this worker serves, and announce them to the scheduler.

        Returns:
            The follower that later changes what the worker serves, if there is one.
        """
        spec = self._spec
        follower = None
        if spec.grouped or spec.planned:
            follower = Follower(spec, app_key, self._kind, self)
            await follower.begin()
        else:
            for name in spec.models:
                variants = self.models.variants_of(name)
                self._left_out |= await self.models.load(variants, {}, leave_out=True)
                self.check_slo()
        if spec.grouped:  # the follower has joined a group
            return follower
        self.registration.begin(app_key)
        try:
            await asyncio.wait_for(self.registration.announce(), _FIRST_BEAT_S)
        except asyncio.TimeoutError:
            logger.info("no scheduler yet; the next heartbeat will tell it")
        return follower

    # -- for its follower ---------------------------------------------------------------

    @property
    def offered(self) -> frozenset[str]:
        """Variants that are loaded for schedulers to use."""
        return frozenset(self.models.offered)

    @property
    def profiles(self) -> dict[str, LatencyProfile]:
        """Profiles of every variant that was ever loaded."""
        return self.models.profiles.current

    @property
    def memory(self) -> WorkerMemory:
        """Memory of its variants."""
        meter = self.models.meter
        found = {k: (f.load_mb, f.batch_mb, f.batch_size) for k, f in meter.variants.items()}
        refs, models = self._spec.variants(), self._spec.models
        largest = {
            key: profile.max_batch_size
            for key, profile in self.models.profiles.current.items()
            if profile.max_batch_size < models[refs[key].model].max_batch_size
        }
        return WorkerMemory(meter.device, meter.room_mb, found, largest, self._left_out)

    def will_load(self, variants: int) -> None:
        """Report how many variants the worker loads at first."""
        self._starting.will_load(variants)

    async def load(
        self, variants: Iterable[str], known: Mapping[str, LatencyProfile] | None = None
    ) -> None:
        """Load variants, and offer them to the scheduler. Other variants are served meanwhile.

        Args:
            known: profiles that other workers have learned. Variants without a known profile are
                measured.

        Raises:
            Exception: whatever a loader or a model's constructor raised. Then none of these
                variants stays.
        """
        await self.models.load(variants, known or {})
        await self.registration.announce()

    async def unload(self, variants: Iterable[str]) -> None:
        """Accept no more batches of these variants, finish the present ones, and free the
        variants."""
        keys = set(variants)
        self.models.offered -= keys
        await self.registration.announce()
        await self.batches.finish(keys)
        self.models.forget(keys)

    def check_slo(self) -> None:
        """See `Models.check_slo`."""
        self.models.check_slo()

    async def assign(self, assigned: tuple[Assigned, ...]) -> None:
        """Tell the scheduler which of the loaded variants the plan assigns to this worker."""
        self.assigned = assigned
        await self.registration.announce()

    async def join(self, app_key: str) -> None:
        """Serve in another group. Batches that the old group's scheduler has sent are still run.

        Args:
            app_key: name of the group's scheduler.
        """
        await self.registration.join(app_key)

    # -- for frontends ---------------------------------------------------------------------

    async def execute(self, piece: Piece, worker: str) -> PieceResult:
        """Run one piece of a batch, together with its other pieces.

        Args:
            worker: this replica's id; the router sends the call to it.
        """
        return await self._heard(piece)

    def _asked(self, piece: Piece | None) -> Awaitable[Any]:
        """Answer a frontend of this machine: run its piece, or tell it that the worker is alive."""
        return self.address(self.id) if piece is None else self._heard(piece)

    async def _heard(self, piece: Piece) -> PieceResult:
        """Run one piece of a batch. Items that could not be read fail alone."""
        items = piece.items
        if any(type(item) is Unreadable for item in items):
            read = [i for i, item in enumerate(items) if type(item) is not Unreadable]
            sizes = tuple(piece.sizes[i] for i in read) if piece.sizes else ()
            piece = replace(piece, items=[items[i] for i in read], sizes=sizes)
        result = await self.batches.execute(piece)
        if result.results is None:
            return result
        found = iter(result.results)
        is_made = self._has_preprocess(piece.variant)
        share = [
            (False, item.of_item(is_made=is_made)) if type(item) is Unreadable else next(found)
            for item in items
        ]
        return replace(result, results=Results(share))

    def _has_preprocess(self, variant: str) -> bool:
        """Return whether the items of a variant are what the application's code made."""
        loaded = self.models.loaded.get(variant)
        return loaded is not None and hasattr(
            type(self.models.instances[loaded.ref.model]), "preprocess"
        )

    async def address(self, worker: str) -> str:
        """The address for frontends of this machine; empty if they cannot connect. A frontend also
        asks for it to learn whether the worker is alive.

        Args:
            worker: this replica's id; the router sends the call to it.
        """
        return self._listener.address

    async def preempt(self, batch_id: str, worker: str) -> None:
        """Stop a batch, if it is not over: see `Batches.preempt`.

        Args:
            worker: this replica's id; the router sends the call to it.
        """
        self.batches.preempt(batch_id)

    async def introduce(self) -> Heartbeat:
        """Introduce the worker to a frontend that has just started."""
        return self._heartbeat()

    async def slo_status(self) -> dict[str, Any]:
        """Return the state of this worker."""
        batches, waiting = len(self.batches.ids), self.batches.waiting
        return {"worker": self.id, "process": vitals(batches=batches, waiting=waiting)}

    # -- for the scheduler -----------------------------------------------------------------

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.id,
            kind=self._kind,
            profiles={
                key: profile
                for key, profile in self.models.profiles.current.items()
                if key in self.models.offered
            },
            batches=self.batches.ids,
            preempt_delay_s=self.models.preempt_delay_s,
            assigned=self.assigned,
            node=self._node,
            memory=self.memory,
        )

    # -- Serve's hooks ---------------------------------------------------------------------

    async def reconfigure(self, user_config: dict[str, Any] | None, rank: Any = None) -> None:
        """See `Instances.reconfigure`."""
        await self.models.instances.reconfigure(user_config or {}, rank)

    async def check_health(self) -> None:
        """Check that no batch runs far too long, that the models say that they are well, and that
        not every batch fails.

        Raises:
            Exception: something is wrong. After three times in a row, Serve replaces the replica.
        """
        if self._running.done():
            raise RuntimeError("the worker runs no batches any more")
        self.batches.check_hung()
        await self.models.instances.check_health(lambda: self.batches.runs_since)
        loaded = self.models.loaded
        await self.batches.failures.check(
            self.models.run_example, lambda variant: loaded.get(variant.key) is variant
        )

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        follower, self._follower = getattr(self, "_follower", None), None
        if follower is not None:
            follower.leave()
        has_left, self._has_left = getattr(self, "_has_left", False), True  # Python calls it again
        is_ready = not has_left and hasattr(self, "_running")
        if is_ready and (self._listener.is_heard or self.models.instances.have_ends):
            return self._leave()
        self._end()
        return None

    async def _leave(self) -> None:
        """Ask the scheduler for no more grants, and finish the granted batches.

        Serve has already waited for its own calls, and waits for this one. It does not know the
        calls of directly connected frontends.
        """
        await self.registration.leave()
        for _ in range(2):  # earlier grants may be on their way
            await self.batches.finish(self._spec.variants())
            await asyncio.sleep(_LAST_S)
        await self.models.instances.end()
        self._end()

    def _end(self) -> None:
        if hasattr(self, "registration"):
            self.registration.close()
        if hasattr(self, "_listener"):
            self._listener.close()
        if hasattr(self, "_running"):
            self._running.cancel()
        if hasattr(self, "models"):
            self.models.close()
