"""A pipeline of two tasks, and a fake handle of its workers that can fail."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import ray

from ray_slo import Outputs
from ray_slo.serve.config.resolve import parse_spec
from tests.serve.fakes import Silent

STEP_S = 0.005


def net(name):
    return name


class Find:
    """A text's words are requests downstream."""

    @staticmethod
    def preprocess(text):
        if not isinstance(text, str):
            raise ValueError("no text")
        return text

    @staticmethod
    def join(by, outputs):
        return {by: outputs["spell"]}

    def __call__(self, net, texts):
        time.sleep(STEP_S)
        if "fail" in texts:
            raise KeyError("fail")
        return [Outputs(net, {"spel" if t == "typo" else "spell": t.split()}) for t in texts]


class Spell:
    """ "slow" takes its time, and "held" waits for the gate."""

    ran: ClassVar[list[str]] = []
    gate = threading.Event()

    @staticmethod
    def postprocess(word):
        return word.lower()

    def __call__(self, net, words):
        if "poison" in words:
            raise ValueError("poison")
        time.sleep(0.7 if "slow" in words else STEP_S)
        while "held" in words and not Spell.gate.is_set():
            time.sleep(STEP_S)
        Spell.ran += words
        return [word.upper() for word in words]


def variant(name, accuracy):
    return {"load": f"{__name__}:net", "args": [name], "accuracy": accuracy}


def spec(slo_ms=5000, policy="eager", **app):
    find = {"callable": Find, "variants": {"f": variant("f", 90)}, "max_batch_size": 1}
    spell = {"callable": Spell, "parent": "find", "variants": {"s": variant("s", 80)}}
    tasks = {"find": find, "spell": {**spell, "max_batch_size": 4}}
    pipeline = {"tasks": tasks, "latency_slo_ms": slo_ms}
    return parse_spec({"pipeline": pipeline, "policy": policy, "planner": None, "name": "p", **app})


class Handle:
    """Reaches workers by name. One that is in `dying` is gone when it is next asked to work."""

    deployment_name = "p-worker"

    def __init__(self, workers):
        self.workers, self.dying, self.metrics = workers, [], Silent()
        self.execute = SimpleNamespace(remote=self._execute)
        self.introduce = SimpleNamespace(remote=self._introduce)

    async def _execute(self, piece, worker):
        if piece.variant in self.dying:
            self.dying.remove(piece.variant)
            await asyncio.sleep(STEP_S)
            raise ray.exceptions.RayActorError
        return await self.workers[worker].execute(piece, worker)

    async def _introduce(self):
        return await next(iter(self.workers.values())).introduce()
