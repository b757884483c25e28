"""Figures that were recorded once, and that change only on purpose.

    kept("policies/decisions", "eager", {"batches": 12, "finish_at": 3.25})

compares with `tests/policies/kept/decisions.json`. A refactoring must leave these figures as they
are. If a change of behaviour is meant, `RAY_SLO_KEEP=1 pytest TESTS` records them anew; the
difference of the files shows what has changed.
"""

import dataclasses
import json
import math
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent
KEEP = os.environ.get("RAY_SLO_KEEP") == "1"
REL = 1e-6  # processors and releases of numpy differ in the last digits


def kept(file, name, value):
    """Compare a value (as JSON) with the recorded one, or record it."""
    room, _, stem = file.partition("/")
    path = ROOT / room / "kept" / f"{stem}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    value = json.loads(json.dumps(value, default=float))
    if KEEP:
        path.parent.mkdir(exist_ok=True)
        known[name] = _rounded(value)
        text = json.dumps(known, indent=1, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
        return
    assert name in known, f"{path.name} has no {name!r}: RAY_SLO_KEEP=1 pytest records it"
    _compare(value, known[name], name)


def condensed(value):
    """The numbers and words of a nested value in three figures: how many there are, and weighted
    sums of the finite numbers and of all else. If one of them changes, so does a sum."""
    found = list(_flat(value))
    finite = rest = 0.0
    for i, one in enumerate(found):
        weight = 1 + (i * 0.6180339887498949) % 1
        if isinstance(one, float) and math.isfinite(one):
            finite += weight * one
        elif isinstance(one, float):
            rest += weight * (7 if math.isnan(one) else 11 if one > 0 else 13)
        else:
            rest += weight * (zlib.crc32(str(one).encode()) % 1000)
    return [len(found), finite, rest]


def _flat(value):
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        yield from map(float, value.ravel())
    elif hasattr(value, "items"):
        for key, one in sorted(value.items(), key=lambda item: str(item[0])):
            yield str(key)
            yield from _flat(one)
    elif isinstance(value, set | frozenset):
        yield from _flat(sorted(value, key=str))
    elif isinstance(value, list | tuple):
        yield len(value)
        for one in value:
            yield from _flat(one)
    elif isinstance(value, float | np.number):
        yield float(value)
    else:
        yield value


def _compare(value, recorded, at):
    if isinstance(recorded, dict):
        assert value.keys() == recorded.keys(), at
        for key, one in recorded.items():
            _compare(value[key], one, f"{at}: {key}")
    elif isinstance(recorded, list):
        assert len(value) == len(recorded), at
        for i, (one, other) in enumerate(zip(value, recorded, strict=True)):
            _compare(one, other, f"{at}[{i}]")
    elif isinstance(recorded, float) and isinstance(value, float | int):
        assert value == pytest.approx(recorded, rel=REL, abs=1e-9, nan_ok=True), at
    else:
        assert value == recorded, at


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.9g}")
    return value
