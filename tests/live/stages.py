"""A pipeline for the live tests: words are found in a text, and each is spelled. It sleeps
instead of computing. Replicas import this module by name."""

import os
import signal
import time
from pathlib import Path

import ray_slo


class Net:
    """A stand-in for a loaded network."""

    def __init__(self, name, base_s, per_item_s=0.001):
        self.name, self.base_s, self.per_item_s = name, base_s, per_item_s

    def run(self, items):
        time.sleep(self.base_s + self.per_item_s * len(items))


class Find:
    """An item is a text. Each of its words is a request of the child task, except two that
    are instructions for this task: "fail" and "nonsense"."""

    @staticmethod
    def preprocess(text):
        if not isinstance(text, str):
            raise ValueError(f"a text is wanted, not {text!r}")
        return text.strip()

    @staticmethod
    def example_input():
        return "two words"

    def __call__(self, net, texts):
        net.run(texts)
        return [self.one(net, text) for text in texts]

    def one(self, net, text):
        words = text.split()
        if "fail" in words:
            raise KeyError("no such page")
        if "nonsense" in words:
            return ray_slo.Outputs(text, {"spel": words})
        return ray_slo.Outputs({"by": net.name}, {"spell": words}) if words else "empty"


class Spell:
    """An item is a word. Some are instructions: "poison" fails, "slow" takes a second. A word
    with a slash is a file: the process that creates it ends."""

    @staticmethod
    def example_input():
        return "word"

    @staticmethod
    def postprocess(word):
        return word.lower()

    def __call__(self, net, words):
        net.run(words)
        if "slow" in words:
            time.sleep(1.0)
        return [self.one(word) for word in words]

    @staticmethod
    def one(word):
        if word == "poison":
            raise ValueError("this word cannot be spelled")
        if "/" in word and not Path(word).exists():
            Path(word).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "-".join(word).upper()


def joined(result, outputs):
    if isinstance(result, str):
        return result
    return {**result, "words": outputs["spell"]}


def variants(prefix, *accuracies_and_base_s):
    return [
        ray_slo.Variant(f"{prefix}{i}", accuracy=accuracy, load=Net, args=(f"{prefix}{i}", base_s))
        for i, (accuracy, base_s) in enumerate(accuracies_and_base_s)
    ]


def tasks():
    return [
        ray_slo.Task("find", Find, variants=variants("f", (80, 0.01), (90, 0.03))),
        ray_slo.Task(
            "spell", Spell, parent="find", variants=variants("s", (70, 0.005), (95, 0.02))
        ),
    ]
