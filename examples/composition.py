"""A FastAPI ingress in front of a ray-slo deployment: composition, typed errors, own deadlines.

Run: python examples/composition.py
"""

from __future__ import annotations

import time

import httpx
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

import ray_slo

api = FastAPI()


@ray_slo.deployment(latency_slo_ms=1000, num_replicas=1, ray_actor_options={"num_cpus": 0.5})
class Shout:
    def __call__(self, words: list[str]) -> list[str]:
        time.sleep(0.02 + 0.001 * len(words))  # stands for a network
        return [word.upper() for word in words]

    @staticmethod
    def example_input() -> str:
        return "hello"


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Ingress:
    def __init__(self, shout: DeploymentHandle) -> None:
        self.shout = shout

    @api.get("/shout/{word}")
    async def say(self, word: str, within_ms: float = 1000) -> str:
        # A request that cannot be answered in time raises ray_slo.errors.RefusedEarly, which Serve
        # answers with 503 and Retry-After by itself.
        return await self.shout.remote(word, latency_slo_ms=within_ms)


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8123})
        serve.run(Ingress.bind(Shout.bind()), name="shout")
        url = "http://127.0.0.1:8123/shout/hello"
        answer = httpx.get(url, timeout=30)
        print(answer.status_code, answer.json())
        refused = httpx.get(url, params={"within_ms": 1}, timeout=30)
        print(refused.status_code, refused.json()["message"])
        assert (answer.status_code, answer.json(), refused.status_code) == (200, "HELLO", 503)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
