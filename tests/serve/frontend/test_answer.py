"""Answers: metadata, headers, JSON."""

import json

import numpy as np
import pytest

from ray_slo.serve.frontend.answer import Answer, to_json


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
