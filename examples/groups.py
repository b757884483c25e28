"""Two serving groups, and a model that moves from one to the other while requests come in.

Run: python examples/groups.py
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import serve

from ray_slo.serve import build_app


class Scale:
    """Multiplies, in place of a network."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, items: list[int]) -> list[int]:
        time.sleep(0.02 + 0.001 * len(items))
        return [self.factor * item for item in items]

    @staticmethod
    def example_input() -> int:
        return 1


def application() -> Any:
    worker = {"default": {"ray_actor_options": {"num_cpus": 0.5}}}
    return build_app(
        {
            "models": {
                name: {"callable": Scale, "kwargs": {"factor": factor}, "latency_slo_ms": 10_000}
                for name, factor in {"double": 2, "triple": 3, "tenfold": 10}.items()
            },
            "groups": {
                "left": {"workers": worker, "models": ["double", "triple"]},
                "right": {"workers": worker, "models": ["tenfold"]},
            },
            "profile_seconds": 0.3,
        }
    )


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8127})
        handle = serve.run(application(), name="scales")
        answers = []
        handle.slo_move.remote("triple", "right").result()
        while handle.slo_status.remote().result()["plan"]["state"] != "settled":
            answers += [handle.remote(i, model="triple") for i in range(5)]
            time.sleep(0.05)
        results = [answer.result() for answer in answers]
        assert results == [0, 3, 6, 9, 12] * (len(results) // 5)
        print(f"{len(results)} requests answered while `triple` moved")
        for name, group in handle.slo_status.remote().result()["groups"].items():
            print(name, group["models"], group.get("counts", "has not answered"))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
