"""What a batch method is given, and what it returns: one place for `@ray_slo.batch` and workers.

User code may keep, change and use again whatever it is given or returns: it may sort its list of
items, change an item in place, fill one output array in every batch, or compute results only when
they are read. So it gets a list of its own (`given`). Its results are taken directly after it
returns, before any other code can run (`taken`), and no answer shares memory with an object that
the method may still have (`own`).
"""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import inspect
import itertools
import mmap
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, TypeVar, cast

import numpy as np
from ray import cloudpickle

from ray_slo.core.text import type_in_words
from ray_slo.models.memory import is_out_of_memory
from ray_slo.serve.errors import BatchResultError

_T = TypeVar("_T")

# Objects of these types cannot be changed.
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), type(...)}) | {
    scalar for scalar in np.sctypeDict.values() if scalar not in (np.void, np.object_)
}
_FLAT = (bytearray, array.array, np.void)  # can be changed, and have no parts


def as_it_is(value: _T) -> _T:
    """Return the value itself: `@ray_slo.batch` hands other people's objects on, as Serve does."""
    return value


def copied(value: _T) -> _T:
    """Return a copy, or the value itself if it has none. What goes to another process can usually
    be copied, for the same cost as its pickle."""
    for make in (copy.deepcopy, _through_a_pickle):
        with contextlib.suppress(Exception):
            return cast(_T, make(value))
    return value


def _through_a_pickle(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))


def own(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return a copy of a value that shares no memory with it.

    It copies arrays, tensors, Python's containers and dataclasses, with all that they contain.
    A view becomes an array of its own, without the rest of the array that it is a view of.

    Args:
        other: copies objects of any other class.
    """
    try:
        return _own(value, other, {})
    except RecursionError:  # no array lies that deep
        return value


_Memo = dict[int, tuple[Any, Any]]  # originals and copies, by the `id` of the original


def _own(value: Any, other: Callable[[Any], Any], memo: _Memo) -> Any:
    if type(value) in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    try:
        made = _copy(value, other, memo)
    except RecursionError:
        raise
    except Exception as error:  # its class allows no copy, or not in this way
        if is_out_of_memory(error):
            raise
        made = other(value)
    memo[id(value)] = value, made
    return made


def _copy(value: Any, other: Callable[[Any], Any], memo: _Memo) -> Any:
    kind = type(value)
    if kind is list or kind is dict or isinstance(value, list | dict):
        made = copy.copy(value)
        memo[id(value)] = value, made  # for a value that contains itself
        parts = value if isinstance(value, list) else value.values()
        if not _ATOMS.issuperset(map(type, parts)):
            places = range(len(value)) if isinstance(value, list) else list(value)
            for place in places:
                made[place] = _own(value[place], other, memo)
        return made
    if isinstance(value, tuple):
        if _ATOMS.issuperset(map(type, value)):
            return value
        return _tuple(value, [_own(part, other, memo) for part in value], other, memo)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject and value.dtype.names is not None:
            return copy.deepcopy(value)
        made = value.copy(order="K")
        if value.dtype.hasobject:
            for at in np.ndindex(made.shape):
                made[at] = _own(made[at], other, memo)
        return made
    if isinstance(value, _FLAT) or kind in (set, frozenset):
        return copy.copy(value)
    if isinstance(value, deque | UserDict | UserList):
        made = copy.copy(value)
        parts = made.data if isinstance(made, UserDict | UserList) else list(made)
        owned = _own(parts, other, memo)
        if isinstance(made, UserDict | UserList):
            made.data = owned
            return made
        made.clear()
        made.extend(owned)
        return made
    if kind is memoryview:
        return memoryview(bytearray(value.tobytes())).cast(value.format, value.shape)
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        return value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        memo[id(value)] = value, made
        for part in dataclasses.fields(value):
            if hasattr(value, part.name):
                found = _own(getattr(value, part.name), other, memo)
                object.__setattr__(made, part.name, found)  # it may be frozen
        return made
    return other(value)


def _tuple(value: Any, parts: list[Any], other: Callable[[Any], Any], memo: _Memo) -> Any:
    """Return a tuple of the same class. The constructor of its class may take other arguments."""
    kind = type(value)
    try:
        made = tuple.__new__(kind, parts)
    except TypeError:  # a class such as those of `torch.return_types`
        made = kind(parts)
    if attributes := getattr(value, "__dict__", None):
        vars(made).update(_own(dict(attributes), other, memo))
    return made


def given(items: Iterable[Any]) -> list[Any]:
    """Return a list of copies of these items, for user code that may change them."""
    return [own(item, copied) for item in items]


def taken(
    results: Any, expected: int, method: str, model: str, other: Callable[[Any], Any]
) -> list[Any]:
    """Return the results of a batch method as a list of copies, one for each item.

    Call it directly after the method, on its thread, because the method may use the memory of its
    results again for the next batch, and may compute results while they are read.

    Args:
        other: copies objects that are no containers, arrays or dataclasses (`own`).

    Raises:
        BatchResultError: this is no list, or its length differs from the number of items.
        Exception: another error, which user code raised while its results were read.
    """
    if (why := _no_list(results)) is not None:
        raise _wrong(type_in_words(results), expected, method, model, why)
    count = len(results)
    rows = list(itertools.islice(iter(results), expected + 1)) if count == expected else []
    if count != expected or len(rows) != expected:
        found = count if count != expected else len(rows)
        more = "more than " if found == expected + 1 and count == expected else ""
        raise _wrong(f"{more}{_counted(found, 'result')}", expected, method, model)
    if _ATOMS.issuperset(map(type, rows)):
        return rows
    return [own(row, other) for row in rows]


def _no_list(results: Any) -> str | None:
    """Return what to write instead, if this is no list of results; None if it is one.

    A list, a tuple and the first axis of an array are lists of results. So is any other object that
    has a length and is indexed by position. An object whose `iter` gives columns or keys is none.
    """
    if isinstance(results, np.ndarray):
        return None if results.ndim else "this array has no axis"
    if isinstance(results, type):
        return "it is a class"
    if isinstance(results, str | bytes | bytearray | memoryview | mmap.mmap):
        return "one of them is the result of one item"
    if isinstance(results, Mapping):
        return "it is a mapping of columns or keys, so make a list with one value per item"
    if isinstance(results, Set):
        return "a set has no order"
    kind = type(results)
    if isinstance(results, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_fields")):
        return "its fields are columns, so write list(zip(*result))"
    if isinstance(results, list | tuple):
        return None
    if inspect.isawaitable(results):
        if inspect.iscoroutine(results):
            results.close()
        return "it must be awaited"
    if hasattr(results, "to_pylist") and hasattr(results, "columns"):
        return "for a result per row, write table.to_pylist()"
    if hasattr(results, "toarray"):
        return "for a result per row, write list(matrix.toarray())"
    if hasattr(results, "columns"):
        return "for a result per row, write list(frame.itertuples(index=False))"
    if (shape := getattr(results, "shape", None)) is not None:
        return None if len(shape) else "it has no axis"
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not hasattr(kind, "keys"):
        return None
    return "write list(…) around it" if hasattr(kind, "__iter__") else ""


def _wrong(got: str, expected: int, method: str, model: str, instead: str = "") -> BatchResultError:
    return BatchResultError(
        f"{method} was given {_counted(expected, 'item')} and returned {got}; it must return a "
        f"list with one result per item{': ' if instead else ''}{instead}",
        model=model,
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
