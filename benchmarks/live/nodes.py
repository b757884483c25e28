"""Faults of nodes for `live-chaos`: a node of two or three is killed, frozen or cut off.

The model takes 20 + 4·b ms and the SLO is 400 ms, at 30 requests/s over HTTP at the head's proxy.
Each of two nodes has a CPU and a worker: the head and another one, or two beside the head. Two
frontends share a scheduler actor. Ray notices lost nodes as by default: a killed one after 15 s,
a silent one after a minute. Silence lasts for 15 s; then the node is back, with all its processes.

Plain Serve is the peer in the same run: same load, same fault, of a node that is not the head.
Every fault has a cluster and a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.live import networks
from benchmarks.live.asked import Seen, told
from benchmarks.live.cluster import Raylet
from benchmarks.live.ground import (
    APP,
    FRONTENDS,
    SCHEDULER,
    WORKERS,
    Fault,
    Ground,
    Ordered,
    ground_for,
    strike,
)
from benchmarks.live.modes import result_of
from ray_slo.serve.deadlines import PROXY_CALLBACK_ENV
from ray_slo.serve.ray_private.actors import NAMESPACE

SLO_S, RATE = 0.4, 30.0
ALPHA_S, BETA_S = 0.004, 0.02  # a batch of b takes ALPHA_S · b + BETA_S
MAX_BATCH = 16
WAIT_S = 0.01  # of `@serve.batch`: at this rate a batch is small, whatever its wait
BEFORE_S, AFTER_S = 7.0, 32.0
AWAY_S, QUICK_AWAY_S = 15.0, 3.0  # how long a node is frozen or cut off
PLANNER = f"{SCHEDULER}##planner"
STARTED_S, TRIES = 180.0, 12
WAYS = ("killed", "frozen", "cut")
SAID = {"killed": "killed", "frozen": "frozen", "cut": "cut off"}


@dataclass(frozen=True)
class Places:
    """Numbers of the nodes where parts are; 0 is the head.

    Attributes:
        frontends, workers: where each is.
        leader: where the scheduler may be.
        planner: where the planner is, if there is one.
    """

    frontends: tuple[int, int]
    workers: tuple[int, int]
    leader: tuple[int, ...]
    planner: int | None = None

    def nodes(self) -> list[dict[str, Any]]:
        """Return the arguments of `raylets`: resources keep each part at its place."""
        return [
            {
                "num_cpus": 1,
                "resources": {
                    part: places.count(node)
                    for part, places in (("frontend", self.frontends), ("worker", self.workers))
                    if node in places
                },
            }
            for node in range(max(self.frontends + self.workers) + 1)
        ]


@dataclass(frozen=True)
class OfNodes:
    """A fault of a node, and the cluster that it strikes."""

    fault: Fault
    places: Places
    way: str

    @property
    def peer(self) -> str:
        """Name of the same fault of plain Serve."""
        return f"plain-{len(self.places.nodes())}-{self.way}"


# -- the applications ----------------------------------------------------------------------


def ours(ground: Ground) -> dict[str, Any]:
    return {
        "models": {
            "sleeper": {
                "callable": Ordered,
                "kwargs": {"runs": str(ground.runs), "alpha_s": ALPHA_S, "beta_s": BETA_S},
                "latency_slo_ms": 1e3 * SLO_S,
                "max_batch_size": MAX_BATCH,
            }
        },
        "workers": {"default": {"num_replicas": 2, "ray_actor_options": needs("worker")}},
        "num_frontends": 2,
        "frontend_actor_options": needs("frontend"),
        "profile_seconds": 1.0,
        "name": "sleeper",
    }


def planned(ground: Ground) -> dict[str, Any]:
    """Return an application whose number of workers a planner decides."""
    bounds = {"min_replicas": 2, "max_replicas": 3, "ray_actor_options": needs("worker")}
    planner = {"name": "auto", "interval_s": 2}
    return {**ours(ground), "workers": {"default": bounds}, "planner": planner}


def plain(ground: Ground) -> Any:
    """Return the same model behind `@serve.batch`."""
    from ray import serve

    runs = str(ground.runs)

    class Plain:
        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S)
        async def predict(self, numbers: list[int]) -> list[int]:
            import asyncio

            await asyncio.sleep(ALPHA_S * len(numbers) + BETA_S)
            with (Path(runs) / str(os.getpid())).open("a") as file:
                file.writelines(f"{number}\n" for number in numbers)
            return numbers

        async def __call__(self, request: Any) -> dict[str, int]:
            number = await self.predict((await request.json())["id"])
            return {"id": number, "release": 1}

    deployed = serve.deployment(
        Plain, num_replicas=2, max_ongoing_requests=2000, ray_actor_options=needs("worker")
    )
    return deployed.bind()


def needs(part: str) -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {part: 1}}


# -- what goes wrong -----------------------------------------------------------------------


def of_scheduler(ground: Ground) -> Raylet:
    return node_of(ground, ground.leader())


def of_frontend(ground: Ground) -> Raylet:
    """Return the node of a frontend that the scheduler is not on."""
    leaders = of_scheduler(ground)
    nodes = [node_of(ground, actor) for actor in ground.actors(FRONTENDS)]
    return next(node for node in nodes if node is not leaders)


def of_worker(ground: Ground) -> Raylet:
    """Return the node of a worker that has no frontend."""
    busy = [node_of(ground, actor) for actor in ground.actors(FRONTENDS)]
    nodes = [node_of(ground, actor) for actor in ground.actors(WORKERS)]
    return next(node for node in nodes if node not in busy)


def of_planner(ground: Ground) -> Raylet:
    [planner] = ground.actors(PLANNER)
    return node_of(ground, planner)


def last(ground: Ground) -> Raylet:
    return ground.cluster.nodes[-1]


def node_of(ground: Ground, actor: dict[str, Any]) -> Raylet:
    [found] = [n for n in ground.cluster.nodes if n.node_id == actor["Address"]["NodeID"]]
    return found


def number_of(ground: Ground, actor: dict[str, Any]) -> int:
    return ground.cluster.nodes.index(node_of(ground, actor))


def lose(find: Callable[[Ground], Raylet], way: str, ground: Ground) -> None:
    """Kill, freeze or cut off a node; a frozen or cut one is back after a while."""
    node = find(ground)
    print(f"  {where(ground)}; lost is node {ground.cluster.nodes.index(node)}", file=sys.stderr)
    ground.hit()
    if way == "killed":
        ground.cluster.kill(node)
        return
    if way == "frozen":
        ground.cluster.freeze(node)
    elif node.network is not None:
        node.network.cut()
    try:
        time.sleep(QUICK_AWAY_S if ground.quick else AWAY_S)
    finally:
        if node.network is not None:
            node.network.mend()
        ground.cluster.thaw(node)


def where(ground: Ground) -> str:
    """Say on which node each actor is, by its number."""
    parts = {"scheduler": SCHEDULER, "planner": PLANNER, "frontend": FRONTENDS, "worker": WORKERS}
    said = []
    for part, prefix in parts.items():
        found = [a for a in ground.actors(prefix) if part != "scheduler" or "##" not in a["Name"]]
        said += [f"{part} {number_of(ground, actor)}" for actor in found]
    return ", ".join(said)


# -- the faults ----------------------------------------------------------------------------

ALL, BESIDE = (0, 1), (1, 2)  # nodes with a worker, of two and of three
PARTS = {
    "scheduler": (of_scheduler, ours, Places(ALL, ALL, (1,)), Places(BESIDE, BESIDE, BESIDE)),
    "frontend": (of_frontend, ours, Places(ALL, ALL, (0,)), Places(BESIDE, BESIDE, BESIDE)),
    "worker": (of_worker, ours, Places((0, 0), ALL, (0,)), Places((1, 1), BESIDE, ALL)),
    "planner": (of_planner, planned, Places((0, 0), ALL, (0,), 1), Places((1, 1), BESIDE, ALL, 2)),
}


def _fault(
    find: Callable[[Ground], Raylet],
    on: Callable[[Ground], Any],
    places: Places,
    way: str,
    whose: str,
) -> OfNodes:
    fault = Fault(
        f"{whose} {SAID[way]}, {len(places.nodes())} nodes",
        partial(lose, find, way),
        on=on,
        after_s=AFTER_S if way == "killed" else AFTER_S - AWAY_S,
        before_s=BEFORE_S,
        patience_s=0.0,
        rate=RATE,
        slo_s=SLO_S,
    )
    return OfNodes(fault, places, way)


FAULTS = {
    f"{part}-node-{way}{'-3' if places is three else ''}": _fault(
        find, on, places, way, f"node of the {part}"
    )
    for part, (find, on, two, three) in PARTS.items()
    for places in (two, three)
    for way in WAYS
}
PEERS = {
    fault.peer: _fault(last, plain, fault.places, fault.way, "plain Serve: node")
    for name, fault in FAULTS.items()
    if name.startswith("worker")
}


# -- the run -------------------------------------------------------------------------------


def seen_of(mode: str, quick: bool, seed: int, names: Sequence[str], folder: str) -> list[Seen]:
    """Cause these faults, and before each way of losing a node, the same of plain Serve."""
    impossible = networks.why_not()
    prefix = () if impossible else networks.ALONE
    all_names: dict[str, None] = {}
    for name in names:
        if impossible and FAULTS[name].way == "cut":
            print(f"{mode}, {name}: skipped, {impossible}", file=sys.stderr, flush=True)
        else:
            all_names |= dict.fromkeys((FAULTS[name].peer, name))
    found = []
    for name in all_names:
        order = [str(int(quick)), str(seed), name, folder, str(int(not impossible))]
        try:
            found += result_of("benchmarks.live.nodes", mode, order, prefix=prefix)
        except subprocess.CalledProcessError:  # its error is printed; the other faults go on
            print(f"{mode}, {name}: not run, see above", file=sys.stderr, flush=True)
            fault = {**FAULTS, **PEERS}[name].fault
            found.append(vars(Seen(f"{fault.says}, not run", math.nan, 0, recovery_s=None)))
    return [Seen.from_json(one) for one in found]


def struck(mode: str, quick: bool, seed: int, name: str, folder: str, apart: bool) -> Seen:
    """Start a cluster, cause one fault, and return what became of the requests.

    Args:
        apart: whether this process is in a network namespace of its own, so that nodes can be.
    """
    one = {**FAULTS, **PEERS}[name]
    if one.fault.on is plain:
        os.environ.pop(PROXY_CALLBACK_ENV, None)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(networks.networks()) if apart else None
        ground = stack.enter_context(
            ground_for(seed, quick, *one.places.nodes(), noticing={}, networks=made)
        )
        if one.fault.on is not plain:
            deploy(ground, one)
        seen, asked = strike(ground, one.fault)
        told(seen, asked, mode, name, folder)
    return seen


def deploy(ground: Ground, one: OfNodes) -> None:
    """Deploy our application, again and again until its actors are on the nodes that we want.

    Ray chooses the node of an actor that needs no CPU, at random if it likes.
    """
    import ray
    from ray import serve

    ground.deployed = one.fault.on.__name__
    for _ in range(TRIES):
        ground.deploy(one.fault.on(ground))
        ground.settle()
        if number_of(ground, ground.leader()) in one.places.leader:
            break
        serve.delete(APP)
        for actor in ground.actors(SCHEDULER):  # they would leave some seconds later
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(actor["Name"], NAMESPACE))
    else:
        raise TimeoutError(f"the scheduler came to other nodes {TRIES} times")
    if one.places.planner is not None:
        move_planner(ground, one.places.planner)
    ground.settle()


def move_planner(ground: Ground, node: int) -> None:
    """End the planner until another one is made on the node: it is made where it is called.

    Raises:
        TimeoutError: it came to other nodes again and again.
    """
    import ray

    until = time.monotonic() + STARTED_S
    while time.monotonic() < until:
        found = ground.actors(PLANNER)
        if found and number_of(ground, found[0]) == node:
            return
        if found:
            with contextlib.suppress(ValueError):  # it is ending already
                ray.kill(ray.get_actor(PLANNER, NAMESPACE))
        time.sleep(2.0)
    raise TimeoutError(f"the planner came to no node {node} within {STARTED_S:g} s")


if __name__ == "__main__":
    mode, file, quick, seed, name, folder, apart = sys.argv[1:]
    seen = struck(mode, quick == "1", int(seed), name, folder, apart == "1")
    Path(file).write_text(json.dumps([vars(seen)]))
