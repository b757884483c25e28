"""Notices a worker whose every batch fails in the same way, as after an error of its GPU."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray_slo.core.text import clipped
from ray_slo.models.memory import is_out_of_memory
from ray_slo.serve import user_code
from ray_slo.serve.errors import MAX_MESSAGE, SLOError, original
from ray_slo.serve.suspects import note_sick, sick_lately
from ray_slo.serve.worker.models import Loaded

_BATCHES = 3  # batches that must fail in the same way, one after the other
_SPAN_S = 5.0  # seconds over which they must fail
_MORE = 4.0  # factor of these seconds for each worker that was replaced for this lately
_LATELY_S = 600.0  # seconds before this worker's start that count as lately
_MOST_S = 300.0  # the most seconds over which they must fail
# What Python raises for an item that is not as the code expects it, and for errors in the code.
# A new process would raise it again.
_OF_ITEMS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError),
    *(ValueError, NotImplementedError, RecursionError, FileNotFoundError, SLOError),
)


def is_of_items(error: BaseException) -> bool:
    """Return whether an error says nothing about the worker: the items are wrong, or the code, or
    another service is gone."""
    error = original(error)
    status = getattr(error, "status_code", None)
    refuses = isinstance(status, int) and 400 <= status < 500  # an HTTPException
    if user_code.is_of_service(error):
        return True
    return refuses or isinstance(error, _OF_ITEMS) or is_out_of_memory(error)


@dataclass
class _Failing:
    """Batches of a model that have failed in the same way, one after the other."""

    loaded: Loaded
    error: str
    since: float
    until: float
    last: str = ""
    batches: int = 0


class Failures:
    """The failed batches on a worker, since one has worked.

    A worker is replaced only if that can help. Its model has worked before. The error is none that
    an item causes. The model's `example_input`, if it has one, fails too. Without one, a client may
    send items that fail, and nobody else sends any. So workers are replaced more and more seldom.

    Args:
        name: name of workers with the same code, to know of those that were replaced. Empty: only
            this worker is known.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._failing: dict[str, _Failing] = {}  # by model
        ends = sick_lately(name, _LATELY_S) if name else 0
        self._span_s = min(_SPAN_S * _MORE**ends, _MOST_S)
        self._is_noted = not name

    def worked(self, loaded: Loaded) -> None:
        """Take note of a batch that has worked."""
        loaded.has_worked = True
        self._failing.pop(loaded.ref.model, None)

    def failed(self, loaded: Loaded, batch: str, error: Exception) -> None:
        """Take note of a batch, or a part of one, that has failed."""
        if is_of_items(error):
            return
        said, now = clipped(user_code.in_words(error), MAX_MESSAGE), time.monotonic()
        failing = self._failing.get(loaded.ref.model)
        if failing is None or failing.error != said:
            failing = self._failing[loaded.ref.model] = _Failing(loaded, said, now, now)
        failing.batches += batch != failing.last
        failing.last, failing.until = batch, now

    async def check(
        self,
        run_example: Callable[[Loaded], Awaitable[Any]],
        is_loaded: Callable[[Loaded], bool] = lambda loaded: True,
    ) -> None:
        """Check that some batches of every model work.

        Args:
            is_loaded: whether a variant is still loaded.
            run_example: runs a model's example alone. It returns whether there is an example.

        Raises:
            RuntimeError: all batches of a model fail in the same way.
        """
        for model, failing in list(self._failing.items()):
            if not is_loaded(failing.loaded):
                del self._failing[model]
                continue
            seconds = failing.until - failing.since
            if failing.batches < _BATCHES or seconds < self._span_s:
                continue
            if not failing.loaded.has_worked:
                continue
            try:
                if await run_example(failing.loaded):
                    self._failing.pop(model, None)
                    continue
            except Exception as error:
                if is_of_items(error):
                    continue
            if self._failing.get(model) is not failing:  # a batch has worked meanwhile
                continue
            if not self._is_noted:
                self._is_noted = True
                note_sick(self._name)
            raise RuntimeError(
                f"the last {failing.batches} batches of {model}, over {seconds:.0f} s, failed "
                f"with {failing.error}"
            )
