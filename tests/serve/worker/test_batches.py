"""What a worker does with batches that it cannot run."""

import asyncio
import time

from tests.serve.loops import in_loop


@in_loop
async def test_a_batch_of_a_variant_that_was_unloaded_frees_its_worker_at_once(app):
    """The scheduler in the frontend hears of it with the piece's result: no heartbeat comes."""
    async with app(policy="eager", wire={"execute": 0.01}) as (front, worker):
        since = time.monotonic()
        asked = asyncio.create_task(front(("item", 1)))
        await asyncio.sleep(0.005)  # granted, and under way
        await worker.unload(["m"])
        await asyncio.sleep(0.02)
        await worker.load(["m"])
        assert await asked == "item"
        assert time.monotonic() - since < 0.5
