"""Answers: metadata, headers, JSON."""

import asyncio
import enum
import json
import math
import uuid

import numpy as np
import pytest

from ray_slo.serve.frontend import answer as answer_module
from ray_slo.serve.frontend.answer import Answer, to_json


class Flavour(enum.Enum):
    SWEET = "sweet"


def answer(**changes):
    values = {
        "result": 1,
        "model": "m",
        "variant": "v",
        "accuracy": 93.456,
        "batch_size": 4,
        "queue_ms": 1.5,
        "exec_ms": 20.0,
        "latency_ms": 30.0,
        "latency_slo_ms": 40.0,
    }
    return Answer(**{**values, **changes})


def test_headers():
    assert answer().headers() == {
        "x-slo-model": "m",
        "x-slo-variant": "v",
        "x-slo-accuracy": "93.46",
        "x-slo-batch-size": "4",
        "x-slo-queue-ms": "1.500",
        "x-slo-exec-ms": "20.000",
        "x-slo-latency-ms": "30.000",
        "x-slo-latency-slo-ms": "40.000",
        "x-slo-deadline-met": "true",
    }
    late = answer(latency_ms=40.1, accuracy=None).headers()
    assert late["x-slo-deadline-met"] == "false"
    assert "x-slo-accuracy" not in late


def test_json_takes_numpy():
    value = {"a": np.arange(3), "b": np.float32(0.5), "c": [np.int64(2)], "d": np.bool_(True)}
    assert json.loads(to_json(value)) == {"a": [0, 1, 2], "b": 0.5, "c": [2], "d": True}


def test_json_says_what_to_do_with_the_rest():
    with pytest.raises(TypeError, match="a result of type set is not JSON; convert it in postproc"):
        to_json({"a": {1}})


NUMBERS = [number / 8 for number in range(20_000)]
LARGE = {
    "numbers": NUMBERS,
    "one of them": {"a": [1, {"b": NUMBERS, "c": "x"}], 3: None},
    "rows": [NUMBERS[i : i + 10] for i in range(0, 20_000, 10)],
    "objects": [{"label": "é", "score": number} for number in NUMBERS],
    "keys": {number: str(number) for number in NUMBERS},
    "array": np.array(NUMBERS, np.float32),
    "arrays": {"a": np.array(NUMBERS).reshape(4, 10, 500), "b": np.zeros((3, 0))},
    "scalars": [np.float32(number) for number in NUMBERS],
    "text": 300_000 * "é\ud83d\n",
    "not finite": [math.nan, -math.inf] * 5000,
    "wide": [2**70, -(2**64)] * 5000,
    "flags": tuple([True, None] * 5000),
    "enums": [Flavour.SWEET, uuid.UUID(int=1)] * 5000,
}


def pieces_of(value, monkeypatch):
    """Its JSON, the turns of the event loop meanwhile, and the largest piece."""
    monkeypatch.setattr(answer_module, "_TURN_S", -1)
    sizes, turns = [0], [0]
    original = answer_module._quick

    def quick(part):
        piece = original(part)
        sizes.append(len(piece))
        return piece

    monkeypatch.setattr(answer_module, "_quick", quick)

    async def main():
        async def others():
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        made = await answer_module.encoded(value, asyncio.Lock())
        task.cancel()
        return made

    return asyncio.run(main()), turns[0], max(sizes)


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_a_large_answer_is_the_same_and_lets_others_work(value, monkeypatch):
    made, turns, largest = pieces_of(value, monkeypatch)
    assert json.loads(made) == json.loads(to_json(value))
    assert turns > 4
    assert largest < len(made) / 2


def test_a_small_answer_takes_no_turn(monkeypatch):
    for value in (1, "a", {"a": [1.5] * 100}, np.arange(500)):
        made, turns, _ = pieces_of(value, monkeypatch)
        assert (made, turns) == (to_json(value), 0)


@pytest.mark.parametrize("wrong", [{1}, b"bytes", object()])
def test_what_is_not_json_is_not_json_in_a_large_answer(wrong, monkeypatch):
    with pytest.raises(TypeError, match="is not JSON; convert it in postprocess"):
        pieces_of([*NUMBERS, wrong], monkeypatch)


def test_a_large_answer_cannot_hold_itself(monkeypatch):
    loop = [*NUMBERS]
    loop.append({"loop": loop})
    with pytest.raises(ValueError, match="Circular"):
        pieces_of(loop, monkeypatch)
