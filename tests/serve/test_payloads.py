"""Items and results: what they share with others, and how they travel."""

import pickle
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray
import torch
from ray import cloudpickle

from ray_slo.errors import BadInput, BatchResultError
from ray_slo.serve import direct
from ray_slo.serve.frontend.tree import Outputs
from ray_slo.serve.messages import AGAIN
from ray_slo.serve.payloads import Items, Results, Unreadable
from ray_slo.serve.results import as_it_is, own
from tests.serve.fakes import NeverRead, over_handle


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
    found = own(value, as_it_is)
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
        assert own(rows[1], as_it_is).untyped_storage().nbytes() == 12
    rows = torch.zeros(1, 3)
    found = own(rows[0], as_it_is)
    rows += 1
    assert not found.any()


def test_what_occurs_twice_stays_one_and_what_holds_itself_or_lies_deep_ends():
    row = np.zeros((2, 2))[0]
    first, second = own([row, row], as_it_is)
    assert first is second and first is not row
    many: Any = [row]
    for _ in range(60):
        many = [many, many]
    assert own(many, as_it_is) is not many
    deep: Any = 1.5
    for _ in range(10**5):
        deep = [deep, 1]
    assert own(deep, as_it_is) is deep
    while isinstance(deep, list):
        deep = deep.pop(0)


# -- on their way ------------------------------------------------------------------------------

KNOWN = {
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "read-only": lambda: np.frombuffer(bytes(range(24)), np.float32),
    "a large one": lambda: np.frombuffer(bytes(40_000), np.uint8),
    "not contiguous": lambda: np.arange(12).reshape(3, 4)[:, 1:3],
    "Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "no dimension": lambda: np.array(3.0),
    "empty": lambda: np.zeros((0, 3), np.float32),
    "texts": lambda: np.array(["a", "bcd"]),
    "times": lambda: np.array(["2026-01-01"], "datetime64[ns]"),
    "structured": lambda: np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "objects": lambda: np.array([None, "a", 1.5], object),
    "scalar": lambda: np.float32(3.5),
    "tensor": lambda: torch.arange(6.0).reshape(2, 3),
    "row": lambda: torch.arange(60_000.0).reshape(10, -1)[1],
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "number": lambda: torch.tensor(3),
    "empty tensor": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "of a class of its own": lambda: torch.ones(4, 3).as_subclass(Pixels)[1],
    "inference": lambda: torch.inference_mode()(torch.zeros)(3),
    "trained": lambda: (torch.ones(2, 2, requires_grad=True) * 2)[0],
    "bytes": lambda: bytes(range(256)) * 1024,
    "bytearray": lambda: bytearray(40_000),
    "text": lambda: "é" * 40_000,
    "nested": lambda: {"a": [1, (2.5, None, "x")], "b": {1, 2}},
    "outputs": lambda: Outputs(1, {"next": [torch.zeros(3)]}),
    "frame": lambda: pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
    "function": lambda: lambda: 3,
    "class": lambda: Pair,
}


def over_socket(values):
    message = b"".join(bytes(piece) for piece in direct.encode(1, values))
    return direct.decode(memoryview(bytearray(message[8:])))[1]


def in_one_piece(values):
    """As Serve's calls over gRPC."""
    return pickle.loads(cloudpickle.dumps(values))


WAYS = [over_socket, over_handle, in_one_piece]


def is_same(found, value):
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.requires_grad) == (value.dtype, value.requires_grad)
        if value.layout is torch.strided:
            assert found.stride() == value.stride()
        return torch.equal(found.to_dense(), value.to_dense())
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype and found.shape == value.shape
        return np.array_equal(found, value)
    if isinstance(value, pd.DataFrame):
        return value.equals(found)
    if isinstance(value, Outputs):
        return all(map(is_same, found.items["next"], value.items["next"]))
    return found() == 3 if getattr(value, "__name__", "") == "<lambda>" else found == value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KNOWN)
def test_values_arrive_as_they_were(name, way):
    value = KNOWN[name]()
    for found in way(Items([value, 1, value])):
        if not isinstance(found, int):
            assert type(found) is type(value) and is_same(found, value)
    [(ok, found)] = way(Results([(True, value)]))
    assert ok is True and is_same(found, value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [12, 12_000, 120_000])
@pytest.mark.parametrize("held", [lambda x: x, lambda x: {"pixels": [x]}, Found])
def test_arrays_arrive_writable_and_each_item_has_its_own(way, size, held):
    times = np.frombuffer(bytes(size // 4 * 8), "datetime64[s]")
    for array in (np.frombuffer(bytes(size), np.uint8), np.zeros(size), torch.zeros(size), times):
        kind = np.int64 if array is times else array.dtype
        first, second = way(Items([held(array)] * 2))
        for found in arrays_in(first):
            found += 1
        assert all(found.view(kind).all() for found in arrays_in(first))
        assert not any(found.view(kind).any() for found in arrays_in(second))


class Pixels(torch.Tensor):
    pass


@pytest.mark.parametrize("place", PLACES)
def test_a_row_does_not_bring_its_tensor_along(place):
    batch = torch.zeros(50, 10, 1000)
    tensors = {
        "row": batch[3],
        "column": batch[:, 0],  # not contiguous
        "of a model in training": torch.nn.Parameter(batch)[4],
        "half": batch.half()[3],
        "of a class of its own": batch.as_subclass(Pixels)[3],
    }
    for name, row in tensors.items():
        value = PLACES[place](row)
        own = row.numel() * row.element_size()
        sent = sum(len(bytes(piece)) for piece in direct.encode(1, Items([value])))
        assert own <= sent < own + 4_000, name
        assert len(cloudpickle.dumps(Results([(True, value)]))) < own + 4_000, name


class Exits:
    def __reduce__(self):
        raise SystemExit(1)


class ExitsThere:
    def __reduce__(self):
        return sys.exit, (1,)


class Missing:
    def __reduce__(self):
        return import_module, ("/srv/secret/models/missing.py",)


class NeverReadError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


BAD = {
    "not pickled": (threading.Lock(), "lock", "cannot be pickled: TypeError: cannot pickle"),
    "exits": (Exits(), "Exits", "cannot be pickled: SystemExit: 1"),
    "not read": (NeverRead(1, 2), "NeverRead", "cannot be read there: TypeError: "),
    "exits there": ([ExitsThere()], "list", "cannot be read there: SystemExit: 1"),
    "not there": (Missing(), "Missing", "cannot be read there: ModuleNotFoundError: "),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sent_harms_no_other(name, way):
    bad, kind, why = BAD[name]
    good = [{"pixels": np.arange(4)}, Found("crop"), "text", bytes(20_000)]
    for at in range(len(good) + 1):
        values = [*good[:at], bad, *good[at:]]
        found = way(Items(values))
        unread = found.pop(at)
        assert type(unread) is Unreadable and unread.kind == kind
        said = str(unread.of_item(is_made=False))
        assert said.startswith(f"an item of type {kind} cannot be sent to a worker: it {why}")
        assert isinstance(unread.of_item(is_made=False), BadInput) and "/srv" not in said
        np.testing.assert_equal(found, good)
        found = way(Results([(True, value) for value in values]))
        ok, error = found.pop(at)
        assert ok is False and type(error) is BatchResultError
        assert str(error).startswith(f"a result of type {kind} cannot be sent: it {why}")
        np.testing.assert_equal(found, [(True, value) for value in good])


@pytest.mark.parametrize("way", WAYS)
def test_an_error_as_a_result_keeps_its_words(way):
    errors = [ValueError("one"), NeverReadError("one", "two"), BadInput("no", field="item")]
    found = way(Results([(True, 1), *((False, error) for error in errors), AGAIN]))
    assert [ok for ok, _ in found] == [True, False, False, False, None]
    words = [f"{type(error).__name__}: {error}" for _, error in found[1:4]]
    assert words == ["ValueError: one", "RuntimeError: NeverReadError: one and two", "BadInput: no"]
    assert found[4] == AGAIN


def test_what_holds_a_reference_of_ray_goes_through_ray():
    reference = ray.ObjectRef(b"x" * 28)
    with pytest.raises(direct.NotDirect, match="ObjectRef"):
        direct.encode(1, Items([1.5, [reference], np.zeros(3)]))
    made = Items([reference, threading.Lock(), [reference, threading.Lock()]]).__reduce_ex__(5)
    instead = made[1][2]
    assert instead[0].value is reference
    assert [instead[i].kind for i in (1, 2)] == ["lock", "list"]


def test_an_item_that_preprocess_made_is_no_mistake_of_the_client():
    unread = Unreadable("Crop", "it cannot be read there: TypeError: no")
    assert isinstance(unread.of_item(is_made=True), BatchResultError)
    assert isinstance(unread.of_item(is_made=False), BadInput)
