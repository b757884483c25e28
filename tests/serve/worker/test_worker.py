"""What a worker tells its scheduler, in order, and what it hears from frontends."""

import asyncio
import threading

import pytest

from ray_slo.errors import BadInput, BatchResultError
from ray_slo.serve.direct import Listener
from ray_slo.serve.frontend.workers import Connections
from ray_slo.serve.worker import registration
from tests.serve import clock
from tests.serve.fakes import NeverRead, Wire, over_handle
from tests.serve.loops import until


class Slow:
    """A way to a scheduler; the first heartbeat takes longer than those after it."""

    def __init__(self):
        self.heard, self.delays_s = [], [0.3]

    async def heartbeat(self, beat):
        await asyncio.sleep(self.delays_s.pop() if self.delays_s else 0.0)
        self.heard.append(set(beat.profiles))

    def report(self, report):
        raise AssertionError("nothing runs")

    def close(self):
        pass


@pytest.fixture
def links(monkeypatch):
    """Ways to schedulers by group, once the worker has joined one."""
    found = {}

    def link(spec, app_key, on_lead):
        return found.setdefault(app_key, Slow())

    return lambda: monkeypatch.setattr(registration, "WorkerLink", link) or found


@pytest.mark.slow
def test_an_older_heartbeat_never_comes_after_a_newer_one(app, links):
    async def scenario():
        async with app() as (_, worker):
            found = links()
            joining = asyncio.ensure_future(worker.join("a"))
            await asyncio.sleep(0.1)  # the first heartbeat is on its way
            await worker.unload(["m"])
            await joining
            assert found["a"].heard == [{"m"}, set()]
            assert worker.registration.announced == set()

    clock.run(scenario())


def test_who_leaves_a_group_is_not_taken_for_one_of_its_workers_again(app, links):
    async def scenario():
        async with app() as (_, worker):
            found = links()
            joining = asyncio.ensure_future(worker.join("old"))
            await asyncio.sleep(0.1)
            await worker.join("new")
            await joining
            assert found["old"].heard == [{"m"}, set()]  # it takes leave last
            assert found["new"].heard[0] == worker.registration.announced == {"m"}

    clock.run(scenario())


class Doubles:
    """Doubles an item. A text names a result."""

    ran: list = []  # noqa: RUF012

    async def __call__(self, items):
        self.ran += items
        await asyncio.sleep(0.01)
        named = {"never read": NeverRead(1, 2), "never pickled": threading.Lock()}
        return [named[i] if isinstance(i, str) else 2 * i for i in items]


class PickledWire(Wire):
    """Pickles pieces and results, as Ray does."""

    def __getattr__(self, name):
        found = super().__getattr__(name)
        call = found.remote

        async def execute(piece, worker):
            return over_handle(await call(over_handle(piece), worker=worker))

        if name == "execute":
            found.remote = execute
        return found


@pytest.mark.parametrize("way", ["socket", "handle"])
def test_what_cannot_be_sent_harms_no_other_call(app, way):
    async def scenario():
        Doubles.ran.clear()
        async with app(Doubles, "eager") as (front, worker):
            workers = front._workers
            listener = Listener(worker._asked)
            if way == "handle":
                workers._handles = {"default": PickledWire(worker)}
            else:
                await listener.begin()
                address = asyncio.sleep(0, listener.address)
                workers._connections = Connections(lambda *_: address, asyncio.ensure_future)
                await until(lambda: workers._connections.to("default", "w0"))
                workers._handles = {"default": None}  # so no call goes this way
            bad = [NeverRead(1, 2), threading.Lock(), "never read", "never pickled"]
            items = [item for i in range(10) for item in (i, bad[i % 4])]
            said = await asyncio.gather(*map(front, items), return_exceptions=True)
            assert said[::2] == [2 * i for i in range(10)]
            kinds = [BadInput, BadInput, BatchResultError, BatchResultError]
            assert [type(error) for error in said[1::2]] == [kinds[i % 4] for i in range(10)]
            assert sorted(i for i in Doubles.ran if isinstance(i, int)) == list(range(10))
            connection = workers._connections.to("default", "w0")
            assert way == "handle" or connection.is_open
            await workers.alive("default", "w0")
            workers._connections.close()
            listener.close()

    clock.run(scenario())
