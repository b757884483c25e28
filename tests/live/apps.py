"""User classes for the live tests. Replicas import this module by name."""

import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np

from ray_slo.core import Decision, Dispatch
from ray_slo.policies.registry import make_policy

BASE_S = 0.03  # execution time of any batch


class Unread:
    """Can be pickled, and not read."""

    def __init__(self, one, two):
        pass

    def __reduce__(self):
        return Unread, (1,)


class Tasks:
    """Square a number; a pair (what, argument) is an instruction, such as to fail."""

    def __init__(self, power=2):
        self.power = power

    def reconfigure(self, config):
        self.power = config["power"]

    @staticmethod
    def preprocess(item):
        if item in ("lock", "unread"):
            return threading.Lock() if item == "lock" else Unread(1, 2)
        if item == "bad":
            raise ValueError("this item is bad")
        return tuple(item) if isinstance(item, list | tuple) else float(item)

    @staticmethod
    def postprocess(result):
        return {"value": result} if isinstance(result, float) else result

    @staticmethod
    def example_input():
        return 1.0

    def __call__(self, items):
        time.sleep(BASE_S + 0.001 * len(items))
        results = [self.one(item) for item in items]
        return results[:-1] if ("drop_one", 0) in items else results

    def one(self, item):
        if isinstance(item, float):
            return item**self.power
        what, argument = item
        if what == "raise":
            raise {
                "value": ValueError("poison"),
                "stop": StopIteration("stop"),
                "exit": SystemExit("exit"),
            }[argument]
        if what == "die_once" and not Path(argument).exists():
            Path(argument).touch()
            os._exit(1)
        if what in ("hold", "hold_and_fail"):  # note that it runs, until the test releases it
            Path(argument).touch()
            until = time.monotonic() + 60
            while not Path(f"{argument}.go").exists() and time.monotonic() < until:
                time.sleep(0.01)
            if what == "hold_and_fail":
                raise TimeoutError("let go")
        if what == "unread":
            return Unread(1, 2)
        return threading.Lock() if what == "lock" else os.getpid()


class Echo:
    """Answer at once, with an async method."""

    def __init__(self, prefix=""):
        self.prefix = prefix

    async def __call__(self, items):
        return [f"{self.prefix}{item}" for item in items]


class Digest:
    """Answer with the digest of the first of two arrays, and whether a frontend shares memory."""

    @staticmethod
    async def preprocess(body):
        return np.frombuffer(body, np.uint8), np.zeros(100)

    @staticmethod
    def example_input():
        return np.zeros(10, np.uint8), np.zeros(100)

    def __call__(self, items):
        is_shared = "memfd:ray-slo" in Path("/proc/self/maps").read_text()
        return [[hashlib.sha256(body).hexdigest(), is_shared] for body, _ in items]


class Slow:
    """Take longer than any SLO of the tests."""

    @staticmethod
    def example_input():
        return 0

    def __call__(self, items):
        time.sleep(0.2)
        return items


class RaisesOnce:
    """A policy whose first decision about a request raises, once per process."""

    serves_late = False
    failed = False

    def __init__(self):
        self.inner = make_policy("eager")
        self.arrived = False

    def requests_arrived(self, now, requests):
        self.arrived = True
        self.inner.requests_arrived(now, requests)

    def requests_cancelled(self, now, requests):
        self.inner.requests_cancelled(now, requests)

    def batch_finished(self, now, worker, outcome):
        self.inner.batch_finished(now, worker, outcome)

    def cluster_changed(self, now, cluster):
        self.inner.cluster_changed(now, cluster)

    def decide(self, now):
        if self.arrived and not RaisesOnce.failed:
            RaisesOnce.failed = True
            raise RuntimeError("the policy is broken")
        return self.inner.decide(now)


class Network:
    """A stand-in for a loaded network: a name and a latency."""

    def __init__(self, name, base_s, answer=None):
        self.name, self.base_s, self.answer = name, base_s, answer or name


def missing_weights(name):
    raise FileNotFoundError(f"no weights of {name!r} here")


class Named:
    """Answer with the network's result."""

    def __init__(self, power=1):
        self.power = power

    def reconfigure(self, config):
        self.power = config["power"]

    @staticmethod
    def example_input():
        return 0

    def __call__(self, network, items):
        time.sleep(network.base_s + 0.001 * len(items))
        return [[network.answer] * self.power for _ in items]


class Mortal(Named):
    """Like `Named`. On ["die_once", mark] the process ends, unless the file `mark` exists."""

    def __call__(self, network, items):
        for item in items:
            if isinstance(item, list) and not Path(item[1]).exists():
                Path(item[1]).touch()
                os._exit(1)
        return super().__call__(network, items)


class Greedy:
    """A policy that takes the most accurate variant that still meets the deadline, alone."""

    serves_late = True

    def __init__(self):
        self.queue, self.busy, self.cluster, self.count = [], {}, None, 0

    def requests_arrived(self, now, requests):
        self.queue += requests

    def requests_cancelled(self, now, requests):
        self.queue = [r for r in self.queue if r not in requests]

    def batch_finished(self, now, worker, outcome):
        self.busy.pop(worker, None)

    def cluster_changed(self, now, cluster):
        self.cluster = cluster
        self.busy = {w: b for w, b in self.busy.items() if w in cluster.workers}

    def decide(self, now):
        actions = []
        for worker in self.cluster.workers.values():
            if worker.id in self.busy or not self.queue:
                continue
            request = self.queue.pop(0)
            model = self.cluster.models[request.model]
            variants = [v for v in model.variants if v.name in worker.loaded]
            best = max(variants, key=lambda v: self.worth(v, worker, request.deadline - now))
            self.count += 1
            self.busy[worker.id] = self.count
            finish_at = now + best.profiles[worker.hardware].latency(1)
            actions.append(Dispatch(self.count, worker.id, best.name, [request], now, finish_at))
        return Decision(actions)

    @staticmethod
    def worth(variant, worker, slack):
        latency = variant.profiles[worker.hardware].latency(1)
        return variant.accuracy if latency < slack else -latency


class Same:
    """Answer with the item itself, or the length of bytes. One kind of item makes it fail."""

    @staticmethod
    def preprocess(item):
        return {"bytes": len(item)} if isinstance(item, bytes) else item

    def __call__(self, items):
        return [self.one(item) for item in items]

    @staticmethod
    def one(item):
        if isinstance(item, dict) and "raise" in item:
            raise ValueError(item["raise"])
        return item


def process_of(_):
    """The process's number and niceness."""
    return os.getpid(), os.nice(0)


def tick(path):
    """Write into a file for a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with Path(path).open("a") as file:
            file.write(".")
        time.sleep(0.05)


class Tagged:
    """Answer with the item and the release that answered."""

    def __init__(self, release="first"):
        self.release = release

    @staticmethod
    def example_input():
        return 0

    def __call__(self, items):
        time.sleep(BASE_S)
        return [[item, self.release] for item in items]


class Warming:
    """A model that takes four times as long while it is measured."""

    TIME_S = 0.05

    def __call__(self, items):
        time.sleep(self.TIME_S * (4 if items[0] == "example" else 1))
        return list(items)

    @staticmethod
    def example_input():
        return "example"
