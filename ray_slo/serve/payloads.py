"""What users' code gives and gets, on its way: how it is pickled.

Frontends send items to workers, and workers send results back (`Items`, `Results`), over direct
connections or Serve's handle. These things hold on every way:

* Each value has a pickle of its own. One that cannot be pickled, or read at the other end, harms no
  other, and two values share no memory there.
* A view travels alone: a row of a tensor does not bring the tensor along.
* Arrays and tensors arrive writable.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import cloudpickle

from ray_slo.core.seldom import Seldom
from ray_slo.core.text import clipped
from ray_slo.serve.errors import MAX_MESSAGE, BadInput, BatchResultError
from ray_slo.serve.user_code import in_words

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_BESIDE = 16_384  # data of at least this many bytes is put beside the pickle
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_REFERENCES = frozenset({ray.ObjectRef, ray.ObjectRefGenerator})
_PATH = re.compile(r"(/[\w.@+~-]+){2,}")


class Unreadable(NamedTuple):
    """Stands for an item or a result that could not be sent.

    Attributes:
        kind: name of its type.
        why: the reason.
    """

    kind: str
    why: str

    def of_item(self, *, is_made: bool) -> Exception:
        """Return the error for the caller, if this is an item.

        Args:
            is_made: whether `preprocess` has made it, and not the client.
        """
        said = f"an item of type {self.kind} cannot be sent to a worker: {self.why}"
        return BatchResultError(said) if is_made else BadInput(said, field="item")

    def of_result(self) -> Exception:
        """Return the error for the caller, if this is a result."""
        return BatchResultError(f"a result of type {self.kind} cannot be sent: {self.why}")


class Items(list[Any]):
    """Items for a worker. It unpickles a list, in which some may be `Unreadable`."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if _PLAIN.issuperset(map(type, self)):
            return list, ([_beside(value) for value in self],)
        return _read, _pickled(self)


class Results(list[tuple[bool | None, Any]]):
    """Results for a frontend: see `messages.PieceResult`. It unpickles a list, in which errors
    replace the results that could not be sent."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        errors = {
            i: clipped(in_words(value), MAX_MESSAGE)
            for i, (ok, value) in enumerate(self)
            if ok is False
        }
        return _read_results, (
            [ok for ok, _ in self],
            Items(value for _, value in self),
            errors,
        )


def _read_results(
    oks: list[bool | None], values: list[Any], errors: dict[int, str]
) -> list[tuple[bool | None, Any]]:
    found = list(zip(oks, values, strict=True))
    for i, (ok, value) in enumerate(found):
        if type(value) is Unreadable:
            found[i] = False, value.of_result() if ok else RuntimeError(errors[i])
    return found


class _Plain(NamedTuple):
    """A value that is pickled by whoever pickles the list."""

    value: Any


def _pickled(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments of `_read`."""
    file, buffers = io.BytesIO(), list[Any]()
    pickler = _Known(file, 5, buffer_callback=buffers.append)
    kinds, ends = [], list[int]()
    instead: dict[int, Unreadable | _Plain] = {}
    for i, value in enumerate(values):
        begin = file.tell(), len(buffers)
        try:
            pickler.dump(_beside(value))
            pickler.clear_memo()
        except Exception:  # `_Other`, or it is too deep
            _back_to(begin, file, buffers)
            if (found := _alone(value, file, buffers)) is not None:
                _back_to(begin, file, buffers)
                instead[i] = found
            pickler = _Known(file, 5, buffer_callback=buffers.append)
        kinds.append(type(value).__name__)
        ends += file.tell(), len(buffers)
    pickled = pickle.PickleBuffer(file.getbuffer()) if file.tell() >= _BESIDE else file.getvalue()
    return kinds, ends, instead, pickled, *map(_as_bytes, buffers)


def _back_to(begin: tuple[int, int], file: io.BytesIO, buffers: list[Any]) -> None:
    file.seek(begin[0])
    file.truncate()
    del buffers[begin[1] :]


def _alone(value: Any, file: io.BytesIO, buffers: list[Any]) -> Unreadable | _Plain | None:
    """Pickle a value of any type. If this is not possible, return what replaces it."""
    pickler = _Any(file, 5, buffer_callback=buffers.append)
    try:
        pickler.dump(value)
        for buffer in buffers:
            buffer.raw()
    except BaseException as error:  # it runs users' code
        logger.warning("a %s cannot be pickled: %s", type(value).__name__, in_words(error))
        return Unreadable(type(value).__name__, f"it cannot be pickled: {why(error)}")
    return _Plain(value) if pickler.has_reference else None


def _as_bytes(buffer: pickle.PickleBuffer) -> Any:
    """Return a buffer. If it is of bytes, it arrives as such, so that nobody copies it."""
    view = buffer.raw()
    data: Any = view.obj
    is_bytes = type(data) is bytes and len(data) == view.nbytes
    return _Beside(data) if is_bytes else buffer


def _read(
    kinds: list[str],
    ends: list[int],
    instead: dict[int, Unreadable | _Plain],
    pickled: Any,
    *buffers: Any,
) -> list[Any]:
    """Return values. `Unreadable` replaces those that cannot be read."""
    view, found = memoryview(pickled), list[Any]()
    at, first = 0, 0
    for i, kind in enumerate(kinds):
        end, last = ends[2 * i : 2 * i + 2]
        try:
            if i in instead:
                value = instead[i]
                found.append(value.value if type(value) is _Plain else value)
            else:
                parts = [p if type(p) is bytes else _writable(p) for p in buffers[first:last]]
                found.append(pickle.loads(view[at:end], buffers=parts))
        except BaseException as error:  # it runs users' code
            logger.warning("a %s cannot be read: %s", kind, in_words(error))
            found.append(Unreadable(kind, f"it cannot be read there: {why(error)}"))
        at, first = end, last
    return found


def why(error: BaseException) -> str:
    """Return an error in words for clients: its first line, without paths."""
    return clipped(_PATH.sub("…", in_words(error).partition("\n")[0]), MAX_MESSAGE)


# -- types -------------------------------------------------------------------------------------


class _Other(Exception):
    """There is a value of another type."""


class _Known(pickle.Pickler):
    """Pickles values of Python's own types, arrays and tensors, and of ours."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if (found := _reduced(value, kind)) is not None:
            return found
        named = value if isinstance(value, _NAMED) else kind
        package = (named.__module__ or "").partition(".")[0]
        if package in ("numpy", "ray_slo") or named is bytes:
            return NotImplemented
        raise _Other


class _Any(cloudpickle.CloudPickler):
    """Pickles any value, as Ray does. It notes references to Ray's objects: only Ray can pass them
    on."""

    has_reference = False

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in _REFERENCES:
            self.has_reference = True
            return str, ()
        if (found := _reduced(value, kind)) is not None:
            return found
        return super().reducer_override(value)


_NAMED = (type, FunctionType, BuiltinFunctionType)


def _reduced(value: Any, kind: type) -> Any:
    """Return how an array or a tensor is pickled. None: as usual."""
    if kind is np.ndarray:
        # NumPy's own way says the type in many words.
        if (dtype := value.dtype).kind in "biufc" and value.flags.c_contiguous and value.size:
            return _array, (pickle.PickleBuffer(value), dtype.str, value.shape)
        made = value.__reduce_ex__(5)
        return made if len(made) > 2 else (_made, (made[0], *made[1]))
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return _reduced_tensor(value, torch) if is_tensor else None


def _reduced_tensor(tensor: Any, torch: Any) -> Any:
    if tensor.is_nested:
        return None
    if (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    ):
        data = tensor.detach().view(-1).view(torch.uint8).numpy()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        return _tensor, (pickle.PickleBuffer(data), dtype, shape, tensor.requires_grad)
    if not _is_view(tensor):
        return None
    alone = tensor.detach().clone().as_subclass(type(tensor))
    vars(alone).update(vars(tensor))
    return alone.requires_grad_(tensor.requires_grad).__reduce_ex__(5)


def _writable(part: Any) -> Any:
    """Return a buffer in which one may write."""
    view = memoryview(part)
    if not view.readonly:
        return part
    # The pickle says that the sender's memory was read-only. Nobody else has this memory, though.
    is_own = type(view.obj) is bytearray and len(view.obj) == view.nbytes
    return view.obj if is_own else bytearray(view)


def _array(part: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(_writable(part), dtype).reshape(shape)


def _made(make: Any, part: Any, *about: Any) -> Any:
    return make(_writable(part), *about)


def _tensor(part: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    found = torch.frombuffer(_writable(part), dtype=getattr(torch, dtype)).view(shape)
    return found.requires_grad_() if requires_grad else found


class _Beside:
    """Bytes that are sent beside the pickle."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self.data),)


def _beside(value: Any) -> Any:
    """Return a value, with large bytes as `_Beside`."""
    return _Beside(value) if type(value) is bytes and len(value) >= _BESIDE else value


def _is_view(tensor: Any) -> bool:
    if tensor._base is not None:
        return True
    try:
        return bool(tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size())
    except (NotImplementedError, RuntimeError):  # such as a sparse one
        return False
