"""Stopping a running batch from another thread: flags, scopes, and `ray_slo.checkpoint()`.

A batch runs inside `preemption_scope(flag)`. When another thread sets the flag, the next
checkpoint that the batch passes raises `Preempted`, and the batch is over. Checkpoints are the exit
points that `ray_slo.models.preemption` places in a PyTorch module (SHEPHERD §6), and calls of
`checkpoint()` in any other code. One flag belongs to one batch, so that a late `set` can never hit
the next one:

    flag = PreemptionFlag()                     # in the worker's event loop, which keeps it

    def run_batch():                            # in the worker's thread
        with preemption_scope(flag):
            return model(items)                 # may raise Preempted

    flag.set()                                  # in the event loop, at any time
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType


class PreemptionFlag:
    """Asks one batch to stop: `set` may be called from any thread, at any time, repeatedly."""

    __slots__ = ("_ended", "_entered", "_set")

    def __init__(self) -> None:
        self._set = False
        self._entered = False
        self._ended = False

    def set(self) -> bool:
        """Ask the batch to stop at its next checkpoint; before it started, to not even start.

        Returns:
            False if the batch had ended already: then nothing happens. True does not promise that
            it will stop: it may be past its last checkpoint. Whether it did is for the one who runs
            it to say: either `Preempted` is raised or the batch has its result, never both.
        """
        if self._ended:
            return False
        self._set = True
        return True

    @property
    def is_set(self) -> bool:
        return self._set


class Preempted(BaseException):
    """The batch was asked to stop, and did.

    Not an `Exception`, so that `except Exception` in a model does not swallow it (as with
    `asyncio.CancelledError`). Code that does is asked again at its next checkpoint.

    Attributes:
        flag: the flag that was set.
    """

    def __init__(self, flag: PreemptionFlag) -> None:
        super().__init__("the batch was preempted")
        self.flag = flag


# Flags of the scopes that the running code is in, outermost first. A context variable follows both
# threads and asyncio tasks.
flags_in_force: ContextVar[tuple[PreemptionFlag, ...]] = ContextVar("flags_in_force", default=())


def preemption_scope(flag: PreemptionFlag) -> AbstractContextManager[None]:
    """Code inside can be stopped by `flag`. Scopes nest: an outer flag stops an inner scope, too.

    The scope holds for this thread or asyncio task, and for what is started from it with its
    context (`asyncio.to_thread`, tasks); not for threads that the code starts by other means.

    Raises:
        Preempted: at a checkpoint inside, or at once if the flag is already set. It leaves the
            scope without the traceback to the checkpoint, so that whoever keeps it does not keep
            the activations of the stopped frames.
        ValueError: the flag was used for a batch before.
    """
    return _Scope(flag)


class _Scope(AbstractContextManager[None]):
    def __init__(self, flag: PreemptionFlag) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        flag = self._flag
        if flag._entered:
            raise ValueError("flag was used for a batch before; make a PreemptionFlag for each")
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
            del error, traceback  # this frame is in the traceback of what is raised now
            raise Preempted(flag) from None


def checkpoint() -> None:
    """A place where the running batch can be stopped. Call it between steps of a batch method.

    Costs well under a microsecond, and does nothing where no batch can be preempted.

    Raises:
        Preempted: the batch was asked to stop. Let it pass (`finally` blocks run as usual).
    """
    for flag in flags_in_force.get():
        if flag._set:
            raise Preempted(flag)
