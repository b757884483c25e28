"""Items and results: what they share with others, and how they travel."""

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ray_slo.serve.frontend.tree import Outputs
from ray_slo.serve.payloads import apart


@dataclass
class Found:
    crop: Any
    extra: Any = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    crop: Any


Pair = namedtuple("Pair", "left right")
ROWS = {
    "numpy": lambda: np.zeros((4, 3)),
    "structured": lambda: np.zeros(4, [("a", "f8"), ("b", "f8")]),
    "torch": lambda: torch.zeros(4, 3),
    "detached": lambda: torch.zeros(4, 3, requires_grad=True).detach(),
}
PLACES = {
    "itself": lambda row: row,
    "list": lambda row: [1, [row]],
    "tuple": lambda row: ("a", row),
    "namedtuple": lambda row: Pair(1, row),
    "dict": lambda row: {"label": 1, "crop": {"row": row}},
    "dataclass": Found,
    "frozen": Frozen,
    "outputs": lambda row: Outputs(row, {"next": [row, row]}),
}


def arrays_in(value):
    if isinstance(value, np.ndarray | np.void | torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [a for one in value.values() for a in arrays_in(one)]
    if isinstance(value, list | tuple):
        return [a for one in value for a in arrays_in(one)]
    found = (getattr(value, name, None) for name in ("crop", "result", "items"))
    return [a for one in found if one is not None for a in arrays_in(one)]


def sum_of(row):
    return sum(row.tolist()) if isinstance(row, np.void) else float(row.sum())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ROWS)
def test_a_row_does_not_change_when_its_array_is_filled_again(kind, place):
    rows = ROWS[kind]()
    value = PLACES[place](rows[1])
    found = apart(value)
    assert type(found) is type(value)
    if kind == "structured":
        rows["a"] = 5
    else:
        rows += 5
    assert arrays_in(value) and len(arrays_in(found)) == len(arrays_in(value))
    assert all(sum_of(row) for row in arrays_in(value))
    assert not any(sum_of(row) for row in arrays_in(found))


def test_a_row_in_inference_mode_and_a_batch_of_one():
    with torch.inference_mode():
        rows = torch.zeros(4, 3)
        assert apart(rows[1]).untyped_storage().nbytes() == 12
    rows = torch.zeros(1, 3)
    found = apart(rows[0])
    rows += 1
    assert not found.any()


@pytest.mark.parametrize(
    "value",
    [
        [1.5, "a", None],
        {"a": [np.arange(3)], "b": Found(torch.zeros(3))},
        np.frombuffer(b"12345678", np.uint8)[2:4],
        torch.zeros(3).to_sparse(),
        np.float32(3),
        object(),
    ],
    ids=["plain", "own memory", "bytes, which never change", "sparse", "scalar", "other"],
)
def test_what_holds_no_view_is_returned_itself(value):
    assert apart(value) is value


def test_whole_arrays_and_tensors_on_demand():
    for array in (np.zeros(3), torch.zeros(3)):
        found = apart([array], whole=True)[0]
        array += 1
        assert not found.any()


def test_what_occurs_twice_stays_one_and_what_holds_itself_or_lies_deep_ends():
    row = np.zeros((2, 2))[0]
    first, second = apart([row, row])
    assert first is second and first is not row
    ring: list[Any] = []
    ring.append(ring)
    assert apart(ring) is ring
    many: Any = [row]
    for _ in range(60):
        many = [many, many]
    assert apart(many) is not many
    deep: Any = 1.5
    for _ in range(10**5):
        deep = [deep, 1]
    assert apart(deep) is deep
    while isinstance(deep, list):
        deep = deep.pop(0)
