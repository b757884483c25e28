"""What a worker tells its scheduler, in order."""

import asyncio

from tests.serve import clock


class Slow:
    """A way to a scheduler; the first heartbeat takes longer than those after it."""

    def __init__(self):
        self.heard, self.delays_s = [], [0.3]

    async def heartbeat(self, beat):
        await asyncio.sleep(self.delays_s.pop() if self.delays_s else 0.0)
        self.heard.append(set(beat.profiles))

    def report(self, report):
        raise AssertionError("nothing runs")


def test_an_older_heartbeat_never_comes_after_a_newer_one(app):
    async def scenario():
        async with app() as (_, worker):
            link = Slow()
            joining = asyncio.ensure_future(worker.join(link))
            await asyncio.sleep(0.1)  # the first heartbeat is on its way
            await worker.unload(["m"])
            await joining
            assert link.heard == [{"m"}, set()]
            assert worker.announced == set()

    clock.run(scenario())


def test_who_leaves_a_group_is_not_taken_for_one_of_its_workers_again(app):
    async def scenario():
        async with app() as (_, worker):
            old, new = Slow(), Slow()
            joining = asyncio.ensure_future(worker.join(old))
            await asyncio.sleep(0.1)
            await worker.join(new)
            await joining
            assert old.heard == [{"m"}, set()]  # it takes leave last
            assert new.heard[0] == worker.announced == {"m"}

    clock.run(scenario())
