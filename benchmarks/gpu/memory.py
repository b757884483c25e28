"""Parts `memory` (of each network) and `out of memory` (provoked, and survived)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.setting import Network, Setting
from benchmarks.harness.data import Missing
from benchmarks.harness.rows import Row
from ray_slo.models.memory import Meter
from ray_slo.models.running import How, Runner

FITS, AT_ONCE = 6, 32


def memory(setting: Setting) -> Iterator[Row]:
    """Measure the memory of networks, each run plainly and then with recorded graphs.

    Networks stay loaded, as the variants of a worker do.
    """
    meter = Meter()
    held: list[Runner] = []
    makers: list[Callable[[], Network]] = [
        lambda: setting.resnet(18),
        lambda: setting.resnet(50),
        lambda: setting.resnet(152),
        setting.bert,
    ]
    for make in makers:
        for how in (How(), How(engine="graph")):
            try:
                network = make()
                name = f"{network.name}, {how}"
                with meter.loading(name):
                    runner = network.runner(setting.device, how)
                    runner.prepare(lambda size, n=network, r=runner: n.stage(r, size), (1, 2, 4))
            except Missing as error:
                yield Row(f"left out: {error}", "networks measured", "", 0)
                break
            held.append(runner)
            size = network.max_batch
            with meter.running(name, size):
                runner(network.stage(runner, size))
            found = meter.variants[name]
            case = f"memory of the {meter.device} · {name}"
            yield Row(case, "loaded", "MB", found.load_mb)
            yield Row(case, f"on top, batch of {size}", "MB", found.batch_mb)
    room_mb = meter.room_mb
    yield Row(f"memory of the {meter.device} · all {len(held)}", "room", "MB", room_mb)


def out_of_memory(setting: Setting) -> Iterator[Row]:
    """Send batches that do not fit into memory.

    Every request must be answered, and later batches must be smaller.
    """
    with setting.serve():
        from ray import serve

        from ray_slo.demo.systems import APP, running
        from ray_slo.serve import build_app

        application = build_app(
            {
                "models": {
                    "hungry": {
                        "callable": "benchmarks.gpu.served:Hungry",
                        "args": (setting, FITS),
                        "latency_slo_ms": 20_000,
                        "max_batch_size": AT_ONCE,
                    }
                },
                "workers": {"all": {"num_replicas": 1, "ray_actor_options": setting.actor}},
                "policy": {"name": "timeout", "kwargs": {"timeout_ms": 300}},
            }
        )
        with running(application):
            handle = serve.get_app_handle(APP)

            for name in ("the first burst", "the next"):
                asked = [handle.remote(i) for i in range(AT_ONCE)]
                good = sum(_is(answer, i) for i, answer in enumerate(asked))
                case = f"out of memory, {AT_ONCE} requests at once, {FITS} fit · {name}"
                yield Row(case, "answered", "", good)
                time.sleep(2.0)  # the scheduler learns which batch size fits
            status = handle.slo_status.remote().result()
            largest = [
                size
                for worker in status["workers"].values()
                for size in worker["memory"]["largest_batch"].values()
            ]
            case = f"out of memory, {AT_ONCE} requests at once, {FITS} fit · afterwards"
            yield Row(case, "largest batch", "", min(largest, default=AT_ONCE))


def _is(answer: Any, item: int) -> bool:
    from ray_slo.errors import SLOError

    try:
        return bool(answer.result() == item)
    except SLOError:
        return False
