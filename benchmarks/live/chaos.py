"""Live on Ray Serve: faults under load: what callers see, and how long recovery takes.

Poisson arrivals go over HTTP to an application whose workers sleep, as the host of an accelerator
does while it computes. A fault strikes at a random time, drawn from the seed. Each fault has a row:

* *in flight*: requests that were not answered yet when the fault struck.
* *refused*: requests that got a typed error with a reason (a table below counts the reasons).
* *lost*: requests that got neither an answer nor a typed error. *Overdue*: these came, but more
  than one second after the deadline. *Duplicated*: answers that came twice, or to another caller.
  Every request has a number, which the model's answer repeats.
* *run twice*: requests whose batch was completed more than once; workers record what they have run.
  This is right if a worker died with its results. The caller still gets one answer.
* *bare errors*: lost requests to which the server answered 500 or above, without a reason.
* *late*: requests that were answered after their deadline.
* *in time*: share of all requests. *Longest gap*: longest time, in seconds, in which no request
  came that was answered in time.
* *recovery*: seconds until the share of requests in time is back at 95 % of its value before the
  fault. It ends at the start of the first full second with that share, and is 0 if the share never
  fell below.

All faults run with Serve's proxies, and again with HAProxy (`haproxy`); those of nodes
(`benchmarks.live.nodes`) only with the former, unless they or the mode are named.

    python -m benchmarks live-chaos [--mode haproxy] [--faults worker,frontend] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.live import nodes
from benchmarks.live.asked import Seen, rows, told
from benchmarks.live.cluster import OBJECT_STORE_BYTES
from benchmarks.live.ground import (
    APP,
    FRONTENDS,
    Fault,
    Ground,
    args,
    ground_for,
    model,
    strike,
)
from benchmarks.live.load import some_of
from benchmarks.live.modes import HAPROXY, MODES, ORDINARY, result_of

SOURCE = "ray-slo"
PLANNER = f"{APP}#grouped##planner"
DELAY = "CoreWorkerService.grpc_server.PushTask=5000:50000"  # from 5,000 to 50,000 µs
QUICK = ("worker", "scheduler")
LARGE_KB = 256  # size of a payload that goes through the object store


def grouped(ground: Ground) -> dict[str, Any]:
    """Return an application with a planner and two groups; requests go to one of its models."""
    cpu = {"default": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}}}
    return {
        "models": {"sleeper": model(ground), "other": model(ground)},
        "groups": {
            "a": {"workers": cpu, "models": ["sleeper"]},
            "b": {
                "workers": {"default": {"ray_actor_options": {"num_cpus": 0.1}}},
                "models": ["other"],
            },
        },
        "num_frontends": 2,
        "profile_seconds": 1.0,
        "name": "grouped",
    }


# -- faults --------------------------------------------------------------------------------


def kill(prefix: str) -> Callable[[Ground], None]:
    """Return a fault: SIGKILL for one of the actors whose names begin with `prefix`."""

    def strike(ground: Ground) -> None:
        pid = int(ground.rng.choice(ground.pids(prefix)))
        ground.hit()
        os.kill(pid, signal.SIGKILL)

    return strike


def kill_scheduler(ground: Ground) -> None:
    pid = ground.leader()["Pid"]
    ground.hit()
    os.kill(pid, signal.SIGKILL)


def kill_worker(ground: Ground) -> None:
    pid = ground.busy_worker()
    ground.hit()
    os.kill(pid, signal.SIGKILL)


def stop_worker(ground: Ground) -> None:
    stop(ground, ground.busy_worker())


def stop_frontend(ground: Ground) -> None:
    stop(ground, int(ground.rng.choice(ground.pids(FRONTENDS))))


def stop(ground: Ground, pid: int) -> None:
    ground.hit()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 if ground.quick else 5.0)
    os.kill(pid, signal.SIGCONT)


def hang_batch(ground: Ground) -> None:
    assert ground.load is not None
    ground.hit()
    ground.load.also(hang_s=5.0 if ground.quick else 3600.0)


def stop_scheduler(ground: Ground) -> None:
    """Stop the scheduler several times, so that its messages are up to 0.4 s late."""
    pid = ground.leader()["Pid"]
    ground.hit()
    for _ in range(3 if ground.quick else 10):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(ground.rng.uniform(0.1, 0.4))
        os.kill(pid, signal.SIGCONT)
        time.sleep(ground.rng.uniform(0.1, 0.4))


def update(ground: Ground) -> None:
    ground.hit()
    ground.deploy(args(ground, release=2))
    ground.deployed = ""


def scale(ground: Ground) -> None:
    ground.hit()
    ground.deploy(args(ground, num_replicas=4))
    time.sleep(0.5 if ground.quick else 3.0)
    ground.deploy(args(ground, num_replicas=1))


def fill_store(ground: Ground) -> None:
    """Put 1.5 times as much into the object store as it holds.

    All of it stays referenced, so Ray cannot evict it.
    """
    import ray

    size = 8 * 1024**2
    ground.hit()
    held = [
        ray.get(ray.put(np.ones(size, np.uint8)))
        for _ in range(int(1.5 * OBJECT_STORE_BYTES / size))
    ]
    time.sleep(1.0 if ground.quick else 5.0)
    del held


def lose_node(ground: Ground) -> None:
    ground.hit()
    ground.cluster.kill(ground.cluster.nodes[1])


def jump(ground: Ground) -> None:
    ground.hit()
    for jump_s in (3600, -3600, 0):
        (ground.folder / "clock").write_text(f"{jump_s:+d}")
        time.sleep(1.0 if ground.quick else 3.0)


def one_worker(ground: Ground) -> dict[str, Any]:
    return args(ground, num_replicas=1)


def embedded(ground: Ground) -> dict[str, Any]:
    return args(ground, num_frontends=1)


def delayed(ground: Ground) -> dict[str, Any]:
    """Use Ray's own testing option: every call of our actors is delayed when it arrives."""
    return args(ground, env={"RAY_testing_asio_delay_us": DELAY})


def faked_clock(ground: Ground) -> dict[str, Any]:
    """Run under libfaketime, which reads the offset of the wall clock from a file.

    Monotonic clocks remain as they are.
    """
    (ground.folder / "clock").write_text("+0")
    env = {
        "LD_PRELOAD": str(faketime()),
        "FAKETIME_TIMESTAMP_FILE": str(ground.folder / "clock"),
        "FAKETIME_CACHE_DURATION": "1",  # s; without it, every look at the clock reads the file
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    return args(ground, env=env)


def on_two_nodes(ground: Ground) -> dict[str, Any]:
    """Place the frontends and two workers on the head, and two workers on a second node."""
    if len(ground.cluster.nodes) < 2:
        ground.cluster.add(num_cpus=2, resources={"there": 2})
    here, there = ({"num_cpus": 0.1, "resources": {node: 0.1}} for node in ("here", "there"))
    return args(
        ground,
        workers={
            "here": {"num_replicas": 2, "ray_actor_options": here},
            "there": {"num_replicas": 2, "ray_actor_options": there},
        },
        frontend_actor_options={"num_cpus": 0, "resources": {"here": 0.1}},
    )


def faketime() -> Path:
    """Return the path of the library in the package `libfaketime`.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import libfaketime

    [library] = Path(libfaketime.__file__).parent.rglob("libfaketime.so.1")
    return library


FAULTS = {
    "worker": Fault("worker killed", kill_worker),
    "frontend": Fault("one of two frontends killed", kill(FRONTENDS)),
    "stopped-frontend": Fault("frontend stopped for 5 s", stop_frontend),
    "scheduler": Fault("scheduler killed", kill_scheduler),
    "pause": Fault("worker stopped for 5 s", stop_worker),
    "hang": Fault("batch that never ends", hang_batch, after_s=20.0),
    "pulses": Fault("scheduler stopped 10 times", stop_scheduler),
    "store": Fault("object store full", fill_store, kb=LARGE_KB),
    "update": Fault("rolling update", update, after_s=15.0),
    "scale": Fault("1 worker, 4, 1", scale, on=one_worker, after_s=8.0),
    "only-frontend": Fault("only frontend killed", kill(FRONTENDS), on=embedded),
    "planner": Fault("planner of groups killed", kill(PLANNER), on=grouped, path="sleeper"),
    "delay": Fault("calls delayed 5 to 50 ms", Ground.hit, on=delayed),
    "clock": Fault("wall clocks jump 1 h", jump, on=faked_clock),
    "node": Fault("node lost", lose_node, on=on_two_nodes),
    **{name: of_nodes.fault for name, of_nodes in nodes.FAULTS.items()},
}


# -- the run -------------------------------------------------------------------------------


chosen = partial(some_of, FAULTS, "fault")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--faults",
        type=chosen,
        metavar="A,B",
        help=f"cause only these faults, out of {', '.join(FAULTS)}",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="run only in this mode of Serve; default: ordinary and haproxy",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="write every request and its outcome to this folder"
    )


def run(
    quick: bool,
    seed: int,
    faults: list[str] | None = None,
    out: Path | None = None,
    mode: str | None = None,
) -> list[Row]:
    made: list[Row] = []
    for one in (mode,) if mode else (ORDINARY,) if quick else (ORDINARY, HAPROXY):
        names = faults or (QUICK if quick else FAULTS)
        if one != ORDINARY and not (faults or mode):
            names = [name for name in names if name not in nodes.FAULTS]  # they take half an hour
        folder = "" if out is None else str(out / one)
        all_seen = seen_of(one, quick, seed, [n for n in names if n not in nodes.FAULTS], folder)
        all_seen += nodes.seen_of(one, quick, seed, [n for n in names if n in nodes.FAULTS], folder)
        made += rows(all_seen)
    return made


def seen_of(mode: str, quick: bool, seed: int, names: list[str], folder: str) -> list[Seen]:
    if not names:
        return []
    order = [str(int(quick)), str(seed), ",".join(names), folder]
    found = result_of("benchmarks.live.chaos", mode, order)
    return [Seen.from_json(one) for one in found]


def struck(mode: str, quick: bool, seed: int, names: list[str], folder: str) -> list[Seen]:
    """Start a cluster, strike one fault after another, and return what became of the requests.

    Runs in a process of its own, in whose environment the mode is set.
    """
    all_seen = []
    with ground_for(seed, quick, {"num_cpus": 8, "resources": {"here": 8}}) as ground:
        for name in names:
            seen, asked = strike(ground, FAULTS[name])
            told(seen, asked, mode, name, folder)
            all_seen.append(seen)
    return all_seen


if __name__ == "__main__":
    mode, file, quick, seed, names, folder = sys.argv[1:]
    found = struck(mode, quick == "1", int(seed), names.split(","), folder)
    Path(file).write_text(json.dumps([vars(seen) for seen in found]))
