"""One model, three networks: the load decides which one answers.

It sends requests at a low rate, then at a high rate, and prints which networks answered. The
configuration has only the SLO and the accuracy of each network. The scheduler learns their
latencies and the rate of requests.

Run: python examples/variants.py
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

import ray_slo
from ray_slo.errors import SLOError

SLO_MS = 600
RATES = {"calm": 5, "busy": 40}  # requests/s
SECONDS = 3


class Network(NamedTuple):
    """Stands for loaded weights."""

    name: str
    base_s: float
    per_item_s: float


def load(name: str, base_s: float, per_item_s: float) -> Network:
    return Network(name, base_s, per_item_s)  # here: torch.load, from_pretrained, …


@ray_slo.deployment(
    latency_slo_ms=SLO_MS,
    num_replicas=1,
    ray_actor_options={"num_cpus": 0.5},
    variants=[
        ray_slo.Variant("small", accuracy=70, load=load, args=("small", 0.005, 0.002)),
        ray_slo.Variant("medium", accuracy=80, load=load, args=("medium", 0.02, 0.01)),
        ray_slo.Variant("large", accuracy=85, load=load, args=("large", 0.05, 0.05)),
    ],
)
class Classifier:
    def __call__(self, network: Network, items: list[int]) -> list[str]:
        time.sleep(network.base_s + network.per_item_s * len(items))
        return [f"{item}, says {network.name}" for item in items]

    @staticmethod
    def example_input() -> int:
        return 0


def stream(handle: DeploymentHandle, rate: float) -> list[ray_slo.Answer]:
    """The answers to requests sent at this rate. Refused and late requests have none."""
    start, responses, answers = time.perf_counter(), [], []
    for i in range(round(rate * SECONDS)):
        time.sleep(max(0.0, start + i / rate - time.perf_counter()))
        responses.append(handle.remote(i, response_metadata=True))
    for response in responses:
        with suppress(SLOError):
            answers.append(response.result())
    return answers


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(Classifier.bind(), name="classifier", route_prefix=None)
        mean = {}
        for load_name, rate in RATES.items():
            answers = stream(handle, rate)
            used = Counter(answer.variant for answer in answers)
            mean[load_name] = sum(answer.accuracy or 0 for answer in answers) / max(len(answers), 1)
            in_time = sum(answer.deadline_met for answer in answers)
            print(
                f"{load_name}, {rate} requests/s: {in_time} of {round(rate * SECONDS)} in time, "
                f"accuracy {mean[load_name]:.1f} %, by {dict(used.most_common())}"
            )
        assert mean["calm"] >= mean["busy"]
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
