"""HTTP connections leave descriptors for other files; the one that was idle longest gives way."""

import asyncio
import gc
import json
import resource
from types import SimpleNamespace

import pytest
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ray_slo.serve.errors import http_response
from ray_slo.serve.proxy import bounds, room
from ray_slo.serve.ray_private import http_head as heads
from tests.serve.loops import in_loop, settle, until

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("files", "most"), [(1000, 500), (resource.RLIM_INFINITY, float("inf")), (3, 1)]
)
def test_the_share_of_the_descriptors(monkeypatch, files, most):
    monkeypatch.setattr(room.resource, "getrlimit", lambda which: (files, files))
    assert room.most(0.5) == most


def test_a_connection_that_another_protocol_has_taken_is_not_counted(monkeypatch):
    monkeypatch.setattr(room, "most", lambda share: 1)
    connections, loop = room._Connections(), SimpleNamespace(time=lambda: 0.0)
    one = Protocol(loop)
    assert connections.have_room(one)
    connections.busy(one)
    assert not connections.have_room(Protocol(loop))
    del one
    gc.collect()
    assert connections.have_room(Protocol(loop))


class Protocol:
    def __init__(self, loop):
        self.loop = loop


@in_loop
async def test_the_longest_idle_one_gives_way_and_a_new_one_hears_why_if_there_is_none(monkeypatch):
    goes_on = asyncio.Event()

    async def app(scope, receive, send):
        await goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(room, "most", lambda share: 4)
    monkeypatch.setattr(room, "IDLE_S", 0.05)
    full = http_response(bounds._full())
    protocol = heads.bounded(room.with_room(HttpToolsProtocol, full))
    config = Config(app, lifespan="off", http=protocol, log_config=None, access_log=False)
    config.load()
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(lambda: protocol(config, state, {}, loop), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    lines = []

    async def connect():
        lines.append(await asyncio.open_connection("127.0.0.1", port))
        await settle()
        return lines[-1]

    async def ask(line):
        line[1].write(ASK)
        return await line[0].readuntil(b"\r\n\r\n")

    idle = [await connect() for _ in range(2)]
    busy = [await connect() for _ in range(2)]
    asking = [asyncio.ensure_future(ask(line)) for line in busy]
    await until(lambda: len(state.tasks) == 2)
    await asyncio.sleep(0.1)
    later = [await connect(), await connect()]  # in place of the two idle ones
    assert [await line[0].read() for line in idle] == [b"", b""]
    refused = await connect()  # nobody was idle for long
    said = await ask(refused)
    assert said.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in said
    assert json.loads(await refused[0].read())["reason"] == "queue_full"
    asking += [asyncio.ensure_future(ask(line)) for line in later]
    await until(lambda: len(state.tasks) == 4)
    await asyncio.sleep(0.1)
    mute = await connect()  # all have requests
    goes_on.set()
    assert all(said.startswith(b"HTTP/1.1 200 ") for said in await asyncio.gather(*asking))
    monkeypatch.setattr(room, "most", lambda share: 5)
    assert (await ask(await connect())).startswith(b"HTTP/1.1 200 ")
    assert await mute[0].read() == b""  # it said nothing for a second
    server.close()
    for line in lines:
        line[1].close()
    await until(lambda: not state.connections)
