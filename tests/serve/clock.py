"""Virtual time for a test, so that the speed of the machine does not matter.

`run(main)` is `asyncio.run(main)` with a clock that moves only while all code waits: then it
jumps to the next timer. It stands still while the loop or a thread of an executor works, however
long that takes. `time.monotonic`, `time.perf_counter` and `time.sleep` use this clock, too. So
a batch method that sleeps takes exactly that long in virtual time, and no real time.

Do not use it for networks: the clock does not see a message on its way (Unix sockets are as fast as
memory). Nor for loops in several threads.
"""

import asyncio
import contextlib
import functools
import selectors
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

GIVE_UP_S = 300.0  # of real time
_real_monotonic, _real_sleep = time.monotonic, time.sleep
_real_submit = ThreadPoolExecutor.submit


def run(main):
    """`asyncio.run(main)`, in its own time.

    Raises:
        TimeoutError: it took five minutes of real time: something waits for what never comes.
    """
    with mock.patch.object(asyncio.events, "new_event_loop", Loop):
        return asyncio.run(main)


class _Selector(selectors.DefaultSelector):
    """Jumps where another would wait."""

    def __init__(self, loop):
        super().__init__()
        self._loop, self._give_up_at = loop, _real_monotonic() + GIVE_UP_S

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0 and not self._loop.working:
            self._loop.now += timeout
        elif not ready and timeout != 0:
            ready = super().select(max(self._give_up_at - _real_monotonic(), 0.0))
        if _real_monotonic() >= self._give_up_at:
            self._give_up_at += 10.0  # to end what runs
            raise TimeoutError(f"not done after {GIVE_UP_S:g} s of real time")
        return ready


class _Call:
    """What a thread of an executor does."""

    over = False


class Loop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own.

    Attributes:
        now: what the clock shows, seconds.
        working: what threads of executors do, and do not sleep.
    """

    def __init__(self):
        self.now, self.working = 1000.0, set()
        self._calls = threading.local()
        self._asleep, self._lock = set(), threading.Lock()
        super().__init__(_Selector(self))

    def time(self):
        return self.now

    def run_forever(self):
        def submit(executor, function, /, *args, **kwargs):
            return self._submit(executor, functools.partial(function, *args, **kwargs))

        with (
            mock.patch.multiple(
                time, monotonic=self.time, perf_counter=self.time, sleep=self.sleep
            ),
            mock.patch.object(ThreadPoolExecutor, "submit", submit),
        ):
            super().run_forever()

    def _submit(self, executor, function):
        call = _Call()

        def work():
            self._calls.now = call
            try:
                return function()
            finally:
                del self._calls.now

        def worked():
            call.over = True
            self.working.discard(call)

        def ended(_future):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.call_soon_threadsafe(worked)

        self.working.add(call)
        future = _real_submit(executor, work)
        # In the next turn, so that the caller's own callback comes before this one.
        self.call_soon_threadsafe(future.add_done_callback, ended)
        return future

    def sleep(self, seconds):
        """`time.sleep`; a real one in a thread that is none of ours."""
        call = getattr(self._calls, "now", None)
        if threading.get_ident() == self._thread_id:
            self.now += seconds  # it holds the loop
        elif call is None or not self._nap(call, seconds):
            _real_sleep(seconds)

    def _nap(self, call, seconds):
        over = threading.Event()
        with self._lock:
            if self.is_closed():
                return False
            self._asleep.add(over)
            self.call_soon_threadsafe(self._fall_asleep, call, seconds, over)
        over.wait()
        return True

    def _fall_asleep(self, call, seconds, over):
        self.working.discard(call)
        self.call_later(seconds, self._wake, call, over)

    def _wake(self, call, over):
        if not call.over:
            self.working.add(call)
        self._asleep.discard(over)
        over.set()

    def close(self):
        with self._lock:
            super().close()
        for over in self._asleep:
            over.set()
