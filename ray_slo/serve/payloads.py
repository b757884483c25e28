"""What users' code gives and gets: taken out of memory that it shares, and pickled.

`apart` is for values that stay in their process.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import numpy as np

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def apart(value: Any, *, whole: bool = False) -> Any:
    """Return a value that shares no memory with others: views of arrays and tensors are copied.

    Rows of one array are the usual results of a batch. A row keeps the whole array in memory, and
    changes when the array is filled again. Lists, tuples, dictionaries and dataclasses are searched.
    What holds no view is returned itself.

    Args:
        whole: copy also arrays and tensors that are no views. Nothing says whether somebody else
            has the same object, and fills it again.
    """
    if type(value) in _PLAIN:
        return value
    try:
        return _Copier(whole).copied(value)
    except RecursionError:  # no array lies that deep
        return value


class _Copier:
    """Copies what is shared. An object that occurs twice in a value is copied once."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._torch = sys.modules.get("torch")
        self._seen: dict[int, Any] = {}

    def copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = value  # if it holds itself
        found = self._seen[id(value)] = self._copied(value, kind)
        return found

    def _copied(self, value: Any, kind: type) -> Any:
        if isinstance(value, np.ndarray | np.void):
            return value.copy() if _is_shared_array(value, self._whole) else value
        if self._torch is not None and isinstance(value, self._torch.Tensor):
            return value.clone() if _is_shared_tensor(value, self._whole) else value
        if kind is dict:
            found = self._all(list(value.values()))
            return value if found is None else dict(zip(value, found, strict=True))
        if kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make")):
            found = self._all(value)
            if found is None:
                return value
            return kind._make(found) if hasattr(kind, "_make") else kind(found)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            found = self._all([getattr(value, name) for name in names])
            if found is None:
                return value
            new = copy.copy(value)
            for name, one in zip(names, found, strict=True):
                object.__setattr__(new, name, one)
            return new
        return value

    def _all(self, values: Any) -> list[Any] | None:
        """Return the values, or None if none of them was copied."""
        if _PLAIN.issuperset(map(type, values)):
            return None
        found = [self.copied(one) for one in values]
        same = all(new is old for new, old in zip(found, values, strict=True))
        return None if same else found


def _is_shared_array(array: Any, whole: bool) -> bool:
    base = array.base
    if base is None:
        return whole and isinstance(array, np.ndarray)
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return type(base) is not bytes  # nobody can write into bytes


def _is_shared_tensor(tensor: Any, whole: bool) -> bool:
    if whole or tensor._base is not None:
        return True
    try:
        return bool(tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size())
    except (NotImplementedError, RuntimeError):  # such as a sparse one
        return False
