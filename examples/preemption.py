"""Preemption: a burst of small requests stops a long batch, which is run again afterwards.

Run: python examples/preemption.py
"""

from __future__ import annotations

import time

import ray
from ray import serve
from ray.serve.handle import DeploymentResponse

import ray_slo
from ray_slo.errors import SLOError
from ray_slo.serve import build_app


class Report:
    """A long job in steps. It can be stopped between two of them."""

    def __call__(self, titles: list[str]) -> list[str]:
        for _ in range(200):
            ray_slo.checkpoint()  # a torch network needs no such line: see `exit_points`
            time.sleep(0.01)
        return [f"report on {title}" for title in titles]

    @staticmethod
    def example_input() -> str:
        return "nothing"


class Shout:
    def __call__(self, words: list[str]) -> list[str]:
        time.sleep(0.02 + 0.001 * len(words))
        return [word.upper() for word in words]

    @staticmethod
    def example_input() -> str:
        return "hello"


def said(response: DeploymentResponse) -> str:
    """The answer, or why there is none."""
    try:
        return str(response.result())
    except SLOError as error:
        return f"no answer ({error.reason}): {error.text}"


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8124})
        spec = {
            "models": {
                # It takes 2 s, so there is time to run it twice.
                "report": {"callable": Report, "latency_slo_ms": 10_000, "max_batch_size": 1},
                # After a report there would be no time for these.
                "shout": {"callable": Shout, "latency_slo_ms": 1200, "max_batch_size": 16},
            },
            "workers": {"cpu": {"ray_actor_options": {"num_cpus": 0.5}}},
            "policy": "flex",  # stop a batch for a batch at least 3.03 times as large
        }
        handle = serve.run(build_app(spec), name="preemption")
        report = handle.remote("rivers", model="report")
        time.sleep(0.3)
        burst = [handle.remote("hello", model="shout") for _ in range(8)]
        print([said(word) for word in burst])
        print(said(report))
        for stopped in handle.slo_status.remote().result()["preemptions"]:
            print({k: stopped[k] for k in ("victim", "by", "gain", "outcome", "delay_ms")})

        # There is time for one report, but not for one and a half. After the stop, it is refused.
        late = handle.remote("lakes", model="report", latency_slo_ms=2800)
        time.sleep(0.8)
        print(said([handle.remote("hi", model="shout") for _ in range(8)][-1]))
        print(said(late))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
