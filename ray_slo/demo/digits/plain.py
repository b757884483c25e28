"""The same application on plain Ray Serve, with `@serve.batch`: what ray-slo is compared with.

Decoding, network, threads, warm-up and answers are those of the other applications; only who
forms the batches differs. Takes a PNG or JPEG (or a JSON array) by POST, like them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ray_slo.demo.digits import Digits
from ray_slo.demo.systems import WAY_HEADER

WARM_UP_SIZES = (1, 2, 4, 8, 16, 32)


class DigitsOverHttp:
    """Reads a digit out of an HTTP request.

    Subclasses batch: `predict(image)` -> (answer, size of its batch).
    """

    def __init__(self, variant: str, **options: Any) -> None:
        self.digits = Digits(variant)
        for size in WARM_UP_SIZES:  # torch prepares its kernels per batch size on first use
            self.digits([Digits.example_input()] * size)
        self.configure(**options)

    predict: Any

    def configure(self, *_: Any, **options: Any) -> None:
        """Takes the options of a subclass."""

    def run(self, images: list[Any]) -> list[Any]:
        """The batch, with its size beside each answer."""
        return [(answer, len(images)) for answer in self.digits(images)]

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        try:
            is_json = request.headers.get("content-type", "").startswith("application/json")
            image = Digits.preprocess(await request.json() if is_json else body)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        answer, size = await self.predict(image)
        return JSONResponse(answer, headers={"x-slo-batch-size": str(size)})


class PlainDigits(DigitsOverHttp):
    """`@serve.batch` with a fixed wait.

    ``off_loop``: the network runs in a thread, as asyncio asks of code that computes; else it
    blocks the event loop.
    """

    off_loop = True

    def configure(self, max_batch_size: int = 32) -> None:
        self.predict.set_max_batch_size(max_batch_size)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self.off_loop = user_config["off_loop"]
        self.predict.set_batch_wait_timeout_s(user_config["batch_wait_s"])

    @serve.batch
    async def predict(self, images: list[Any]) -> list[Any]:
        return await asyncio.to_thread(self.run, images) if self.off_loop else self.run(images)


class TunableDigits(PlainDigits):
    """The same, but each request says how to batch: a header is heard at once, where Serve would
    start new replicas."""

    way = ""

    async def __call__(self, request: Request) -> Response:
        way = request.headers.get(WAY_HEADER, "")
        if way and way != self.way:
            self.way = way
            self.reconfigure(json.loads(way))
        return await super().__call__(request)


def app(
    variant: str = "digits-xl",
    num_replicas: int = 2,
    batch_wait_s: float = 0.01,
    max_batch_size: int = 32,
    off_loop: bool = True,
    tunable: bool = False,
) -> serve.Application:
    """A Serve application; ``batch_wait_s`` 0.01 is the default wait of `@serve.batch`.

    ``tunable``: requests may change how to batch, with `WAY_HEADER`.
    """
    return serve.deployment(
        TunableDigits if tunable else PlainDigits,
        name="PlainDigits",
        num_replicas=num_replicas,
        max_ongoing_requests=10_000,  # the default of 5 would cap every batch at 5
        ray_actor_options={"num_cpus": 1},
        logging_config={"enable_access_log": False},  # as in a ray-slo application
        user_config={"batch_wait_s": batch_wait_s, "off_loop": off_loop},
    ).bind(variant, max_batch_size=max_batch_size)
