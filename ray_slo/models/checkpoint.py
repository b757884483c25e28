"""Stopping a running batch from another thread: flags, scopes, and `ray_slo.checkpoint()`.

A batch runs inside `preemption_scope(flag)`. When another thread sets the flag, the next checkpoint
that the batch reaches raises `Preempted`, and the batch ends. There are two sorts of checkpoints:
the exit points that `ray_slo.models.preemption` places in a PyTorch module (SHEPHERD §6), and calls
of `checkpoint()` in any other code. Every batch has a flag of its own, so a late `set` cannot stop
the next batch:

    flag = PreemptionFlag()                     # in the worker's event loop, which keeps it

    def run_batch():                            # in the worker's thread
        with preemption_scope(flag):
            return model(items)                 # may raise Preempted

    flag.set()                                  # in the event loop, at any time
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from types import TracebackType

logger = logging.getLogger(__name__)


class PreemptionFlag:
    """Asks one batch to stop. Any thread may call `set`, at any time and repeatedly."""

    __slots__ = ("_ended", "_entered", "_set")

    def __init__(self) -> None:
        self._set = False
        self._entered = False
        self._ended = False

    def set(self) -> bool:
        """Ask the batch to stop at its next checkpoint. If it has not started, it does not start.

        Returns:
            False if the batch had already ended; then nothing happens. True does not mean that the
            batch will stop, because it may be past its last checkpoint. The code that runs the
            batch sees which it was: the batch either raises `Preempted` or returns its result.
        """
        if self._ended:
            return False
        self._set = True
        return True

    @property
    def is_set(self) -> bool:
        return self._set


class Preempted(BaseException):
    """The batch was asked to stop, and stopped.

    It is not an `Exception`, so `except Exception` in a model does not catch it
    (`asyncio.CancelledError` is built the same way). If code catches it anyway, the next checkpoint
    raises it again.

    Attributes:
        flag: the flag that was set.
    """

    def __init__(self, flag: PreemptionFlag) -> None:
        super().__init__("the batch was preempted")
        self.flag = flag


# Flags of the scopes around the running code, the outermost first. It is a context variable, so
# each thread and each asyncio task has its own value.
flags_in_force: ContextVar[tuple[PreemptionFlag, ...]] = ContextVar("flags_in_force", default=())


def preemption_scope(flag: PreemptionFlag) -> AbstractContextManager[None]:
    """Return a context manager in which `flag` can stop the code. Scopes nest: an outer flag also
    stops the code of an inner scope.

    The scope is valid for this thread or asyncio task, and for tasks and threads that inherit its
    context (`asyncio.to_thread`). It is not valid for threads that the code starts by other means.

    Raises:
        Preempted: at a checkpoint inside, or at once if the flag is already set. The exception
            leaves the scope without the traceback to the checkpoint. Otherwise, code that keeps the
            exception would also keep the activations of the stopped frames in memory.
        ValueError: the flag was used for another batch.
    """
    return _Scope(flag)


class _Scope(AbstractContextManager[None]):
    def __init__(self, flag: PreemptionFlag) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        flag = self._flag
        if flag._entered:
            raise ValueError("flag was used for another batch; make one PreemptionFlag per batch")
        flag._entered = True
        if flag._set:
            flag._ended = True
            raise Preempted(flag)
        self._token = flags_in_force.set((*flags_in_force.get(), flag))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._flag._ended = True
        flags_in_force.reset(self._token)
        if isinstance(error, Preempted):
            flag = error.flag
            error.__traceback__ = None
            # The new exception's traceback holds this frame, and so its local variables.
            del error, traceback
            raise Preempted(flag) from None


_in_vain: list[str] = []  # what the first checkpoint in no scope warns of


def warn_of_checkpoints(said: str) -> None:
    """Warn once if code of this process calls `checkpoint` where no batch can be preempted.

    Args:
        said: why none can be, and what to write instead.
    """
    _in_vain[:] = [said]


def checkpoint() -> None:
    """Stop the running batch if this was asked for. Call it between the steps of a batch method.

    A call takes well under a microsecond. Where no batch can be preempted, it does nothing, and
    replicas of ray-slo warn of it once.

    Raises:
        Preempted: the batch was asked to stop. Do not catch it; `finally` blocks run as usual.
    """
    flags = flags_in_force.get()
    if _in_vain and not flags:
        with suppress(IndexError):  # another thread was first
            logger.warning("ray_slo.checkpoint() stops nothing here: %s", _in_vain.pop())
    for flag in flags:
        if flag._set:
            raise Preempted(flag)
