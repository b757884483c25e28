"""The digits application on plain Ray Serve with `@serve.batch`, for comparisons with ray-slo.

Decoding, network, threads, warm-up and answers are those of the other applications. Only the
batching differs. Like them, it takes a PNG, a JPEG or a JSON array by POST.
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
    """Reads the digit in an HTTP request.

    Subclasses do the batching: `predict(image)` returns the answer, and the size of its batch.
    """

    def __init__(self, variant: str, **options: Any) -> None:
        self.digits = Digits(variant)
        for size in WARM_UP_SIZES:  # torch prepares its kernels per batch size on first use
            self.digits([Digits.example_input()] * size)
        self.configure(**options)

    predict: Any

    def configure(self, *_: Any, **options: Any) -> None:
        """Take the options of a subclass."""

    def run(self, images: list[Any]) -> list[Any]:
        """Run a batch. Return each answer with the size of the batch."""
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
    """Batches with `@serve.batch` and a fixed wait.

    With ``off_loop``, the network runs in a thread, as is usual for computations in asyncio.
    Otherwise it blocks the event loop.
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
    """Batches as `PlainDigits`, in the way that each request's header says. So the way changes at
    once; with Serve's own configuration, new replicas would have to start."""

    way = ""

    async def __call__(self, request: Request) -> Response:
        way = request.headers.get(WAY_HEADER, "")
        if way and way != self.way:
            self.way = way
            self.reconfigure(json.loads(way))
        return await super().__call__(request)
