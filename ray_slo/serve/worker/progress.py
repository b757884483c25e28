"""Tells all frontends what a starting worker does, and why its start failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray_slo.core.text import clipped
from ray_slo.serve.errors import MAX_MESSAGE
from ray_slo.serve.messages import SERVING, Progress

logger = logging.getLogger(__name__)

_REPEAT_S = 1.0  # time between two reports: frontends that have just started need one, too
_LAST_WORDS_S = 0.5  # seconds for the reason of a failure to reach frontends


class Starting:
    """Progress of a worker's start.

    Args:
        frontends: makes a handle to all frontends.
        variants: number of variants that the worker loads at first, if known.
    """

    def __init__(self, worker: str, kind: str, frontends: Callable[[], Any], variants: int) -> None:
        self._worker, self._kind = worker, kind
        self._frontends = frontends
        self._variants = variants
        self._progress = Progress(worker, kind)
        self._news = asyncio.Event()

    def will_load(self, variants: int) -> None:
        """Set the number of variants that the worker loads at first."""
        self._variants = variants

    def doing(self, doing: str, what: str, number: int) -> None:
        of = max(self._variants, number)
        self._progress = Progress(self._worker, self._kind, doing, what, number, of)
        self._news.set()

    @contextlib.asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Report progress until the block ends, then that the worker serves, or the exception."""
        telling = asyncio.create_task(self._tell_on())
        try:
            yield
        except Exception as error:
            said = clipped(f"{type(error).__name__}: {error}", MAX_MESSAGE)
            self._progress = self._progress._replace(failed=said)
            self._news.set()
            await asyncio.sleep(_LAST_WORDS_S)
            raise
        finally:
            telling.cancel()
        # Before Serve declares the application running, so that no frontend refuses its first
        # request.
        self._progress = Progress(self._worker, self._kind, SERVING)
        await self._tell()

    async def _tell_on(self) -> None:
        while True:
            self._news.clear()
            await self._tell()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), _REPEAT_S)

    async def _tell(self) -> None:
        try:
            responses = self._frontends().broadcast("slo_progress", self._progress)
            await responses.results_async(timeout_s=2.0, return_exceptions=True)
        except Exception as error:  # there is no frontend yet
            logger.debug("no frontend takes the report %s: %r", self._progress, error)
