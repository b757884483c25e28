"""Run coroutines of tests, and wait in them, in virtual time (see `clock`)."""

import asyncio
import functools

from tests.serve import clock


def in_loop(test):
    """In its own time, of which it has 30 s."""

    @functools.wraps(test)
    def run(*args, **fixtures):
        clock.run(asyncio.wait_for(test(*args, **fixtures), 30))

    return run


async def settle():
    """Let everybody do what there is to do now."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition):
    """What the condition says once it holds."""
    for _ in range(20_000):
        if found := condition():
            return found
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")
