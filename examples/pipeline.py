"""A pipeline of two tasks, planned by Loki. The load decides how many workers run, and which
networks they have.

A frame goes to `detect`, and every face in it to `name`. One SLO counts from the frame to the last
name. At low load, two workers serve with the most accurate networks. At high load a third one
starts. It is not enough, so a smaller network names some faces.

Run: python examples/pipeline.py
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

import ray_slo
from ray_slo.errors import SLOError

SLO_MS = 3000
PHASES = {"calm": (2, 5), "busy": (18, 14)}  # frames/s, and seconds
FACES = 4  # on a frame
FRAMES = range(1000)


class Network(NamedTuple):
    """Stands for loaded weights."""

    name: str
    base_s: float
    per_item_s: float

    def run(self, items: list[int]) -> None:
        time.sleep(self.base_s + self.per_item_s * len(items))


def load(name: str, base_s: float, per_item_s: float) -> Network:
    return Network(name, base_s, per_item_s)  # here: torch.load, from_pretrained, …


class Detect:
    """Takes frames. Returns for each frame a result, and the items for the next task."""

    def __call__(self, network: Network, frames: list[int]) -> list[ray_slo.Outputs]:
        network.run(frames)
        faces = [[frame * FACES + i for i in range(FACES)] for frame in frames]
        return [ray_slo.Outputs(f, {"name": found}) for f, found in zip(frames, faces, strict=True)]

    @staticmethod
    def example_input() -> int:
        return 0


class Name:
    """Takes faces, and returns names."""

    def __call__(self, network: Network, faces: list[int]) -> list[str]:
        network.run(faces)
        return [f"face {face}, says {network.name}" for face in faces]

    @staticmethod
    def example_input() -> int:
        return 0


def join(frame: int, outputs: dict[str, list[str]]) -> dict[str, object]:
    """The client's answer: the result of the first task, and those of all its items."""
    return {"frame": frame, "names": outputs["name"]}


PIPELINE = ray_slo.Pipeline(
    [
        ray_slo.Task(
            "detect",
            Detect,
            variants=[ray_slo.Variant("ssd", accuracy=95, load=load, args=("ssd", 0.015, 0.015))],
        ),
        ray_slo.Task(
            "name",
            Name,
            parent="detect",
            variants=[
                ray_slo.Variant("small", accuracy=80, load=load, args=("small", 0.006, 0.006)),
                ray_slo.Variant("large", accuracy=98, load=load, args=("large", 0.03, 0.03)),
            ],
        ),
    ],
    latency_slo_ms=SLO_MS,
    join=join,
    num_replicas=2,
    max_replicas=3,
    ray_actor_options={"num_cpus": 0.2},
    planner={"name": "loki", "interval_s": 2},
    name="faces",
    profile_seconds=1.5,
)


def stream(
    handle: DeploymentHandle, rate: float, seconds: float
) -> tuple[list[ray_slo.Answer], dict[str, Any]]:
    """The answers to frames sent at this rate, and the plan at the end. Refused and late frames
    have no answer."""
    start, responses, answers = time.perf_counter(), [], []
    for i, frame in enumerate(FRAMES[: round(rate * seconds)]):
        time.sleep(max(0.0, start + i / rate - time.perf_counter()))
        responses.append(handle.remote(frame, response_metadata=True))
    plan = handle.slo_status.remote().result()["plan"]
    for response in responses:
        with suppress(SLOError):
            answers.append(response.result())
    return answers, plan


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(PIPELINE.bind(), name="faces", route_prefix=None)
        for phase, (rate, seconds) in PHASES.items():
            answers, plan = stream(handle, rate, seconds)
            in_time = sum(answer.deadline_met for answer in answers)
            used: Counter[str] = Counter()
            for answer in answers:
                assert len(answer.result["names"]) == FACES
                used.update(answer.stages[-1].variants)
            mean = sum(answer.accuracy or 0 for answer in answers) / max(len(answers), 1)
            print(
                f"{phase}, {rate} frames/s: {in_time} of {round(rate * seconds)} in time, accuracy "
                f"{mean:.1f} %, faces named by {dict(used.most_common())}, "
                f"{plan['running']['default']} workers"
            )
            print("  ", plan["why"])
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
