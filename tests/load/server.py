"""A tiny HTTP server in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Answers:
    """Answers with what `respond(body)` gives: (delay s or coroutine, status, headers, body)."""

    url = "http://127.0.0.1:1/"

    def __init__(self, respond) -> None:
        self.respond = respond
        self.requests: list[tuple[str, bytes]] = []

    async def connection(self, reader, writer) -> None:
        try:
            gone = asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
            with contextlib.suppress(*gone):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    length = 0
                    for line in head.splitlines():
                        if line.lower().startswith("content-length:"):
                            length = int(line.split(":")[1])
                    body = await reader.readexactly(length)
                    self.requests.append((head, body))
                    delay, status, headers, answer = self.respond(body)
                    await (delay if asyncio.iscoroutine(delay) else asyncio.sleep(delay))
                    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(answer)}"]
                    lines += [f"{k}: {v}" for k, v in headers.items()]
                    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + answer)
        finally:
            writer.transport.abort()


class Server(Answers):
    """In a thread of its own."""

    def __init__(self, respond) -> None:
        super().__init__(respond)
        self.loop = asyncio.new_event_loop()
        self.stopped = asyncio.Event()
        started = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,))
        self.thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        self.loop.run_until_complete(self._serve(started))
        self.loop.close()

    async def _serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        started.set()
        await self.stopped.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # lets the transports close

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join()


@contextlib.contextmanager
def serving(respond) -> Iterator[Server]:
    server = Server(respond)
    try:
        yield server
    finally:
        server.stop()
