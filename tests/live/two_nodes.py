"""One application on three Ray nodes; the program writes what callers saw as JSON
to the file that its first argument names.

test_two_nodes.py runs it in a process of its own, because a process has one connection to Ray. The
head has Serve's controller, the proxy and the frontend that the proxy prefers. The other nodes have
a frontend and a worker each. On the third node, all wall clocks are an hour ahead.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import httpx
import ray
from ray import serve

from benchmarks.live.cluster import raylets
from ray_slo.serve import build_app
from ray_slo.serve.deadlines import PROXY_CALLBACK, PROXY_CALLBACK_ENV

HERE = Path(__file__).parent
AHEAD_S = 3600
SLO_MS = 30_000
LONG_MS = 40_000  # time for Ray to notice that a machine is gone
EXEC_S = 0.05
APP = {
    "name": "where",
    "models": {
        "where": {"callable": "two_nodes:Where", "latency_slo_ms": SLO_MS, "max_batch_size": 8}
    },
    "workers": {"far": {"num_replicas": 2, "ray_actor_options": {"resources": {"worker": 1}}}},
    "num_frontends": 3,
    "frontend_actor_options": {"num_cpus": 0, "resources": {"frontend": 1}},
    "profile_seconds": 0.5,
}


class Where:
    """Sleep for the item's seconds; answer with the node and its wall clocks."""

    @staticmethod
    def preprocess(seconds):  # in the frontend
        return {"seconds": seconds, "from": here()}

    @staticmethod
    def example_input():
        return {"seconds": EXEC_S, "from": None}

    def __call__(self, items):
        time.sleep(max(item["seconds"] for item in items))
        return [{"from": item["from"], "to": here()} for item in items]


def here():
    return {"node": ray.get_runtime_context().get_node_id(), "clock": time.time()}


async def main(cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:

        async def ask(seconds=EXEC_S, slo_ms=SLO_MS):
            sent, wall = time.monotonic(), time.time()
            response = await client.post(
                "/", json=seconds, headers={"x-slo-latency-ms": str(slo_ms)}
            )
            seen = {"status": response.status_code, "took_s": time.monotonic() - sent}
            seen["slo"] = {k[6:]: v for k, v in response.headers.items() if k[:6] == "x-slo-"}
            if response.is_success:
                answer = response.json()
                for end in ("from", "to"):
                    place = answer[end]
                    seen[end] = {"node": place["node"], "ahead_s": place["clock"] - wall}
            else:
                seen["reason"] = response.json()["reason"]
            return seen

        async def paced(count, pause_s, **how):
            tasks = []
            for _ in range(count):
                tasks.append(asyncio.ensure_future(ask(**how)))
                await asyncio.sleep(pause_s)
            return tasks

        for answered in await paced(4, 0.2):  # connections, imports
            await answered
        both = await asyncio.gather(*await paced(60, 0.03))
        # One at a time, so that both workers are free; to all frontends.
        handle = serve.get_app_handle("where").options(_prefer_local_routing=False)
        near = []
        for _ in range(36):
            answer = await handle.remote(EXEC_S)
            near.append([answer[end]["node"] for end in ("from", "to")])
            await asyncio.sleep(0.05)  # until the scheduler has heard that the worker is free
        refused = await ask(slo_ms=1)

        under_way = await paced(20, 0.03, slo_ms=LONG_MS)
        cluster.kill(cluster.nodes[1])
        under_way += await paced(40, 0.03, slo_ms=LONG_MS)
        killed = await asyncio.gather(*under_way)

        alone = await asyncio.gather(*await paced(40, 0.06))
        hanging = await ask(seconds=3.0, slo_ms=1500)
        status = await serve.get_app_handle("where").slo_status.remote()
    return {
        "both": both,
        "near": near,
        "refused": refused,
        "killed": killed,
        "alone": alone,
        "hanging": hanging,
        "status": status,
    }


def program():
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    os.environ["PYTHONPATH"] = paths
    an_hour_ahead = {
        "PYTHONPATH": os.pathsep.join([str(HERE / "wrong_clock"), paths]),
        "CLOCK_AHEAD_S": str(AHEAD_S),
    }
    os.environ[PROXY_CALLBACK_ENV] = PROXY_CALLBACK
    with raylets(
        {"num_cpus": 1, "resources": {"frontend": 1}},
        {"num_cpus": 1, "resources": {"frontend": 1, "worker": 1}},
        {"num_cpus": 1, "resources": {"frontend": 1, "worker": 1}, "env": an_hour_ahead},
    ) as cluster:
        nodes = [node.node_id for node in cluster.nodes]
        serve.run(build_app(APP), name="where")
        seen = asyncio.run(main(cluster))
        Path(sys.argv[1]).write_text(json.dumps({"nodes": nodes, **seen}, default=str))


if __name__ == "__main__":
    program()
