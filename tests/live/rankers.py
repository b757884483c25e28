"""A model whose items have sizes, on two kinds of workers that sleep instead of computing. Replicas
import this module by name."""

import os
import time


class Ranker:
    """An item is its own size; the answer says who ranked it."""

    def __init__(self):
        self.kind = os.environ["RANKER"]
        self.per_item_s = float(os.environ["RANKER_ITEM_S"])

    @staticmethod
    def example_input(size=1):
        return size

    @staticmethod
    def size(item):
        return item

    def __call__(self, items):
        time.sleep(0.02 + self.per_item_s * sum(items))
        return [(self.kind, os.getpid())] * len(items)


def kind(name, per_item_s, price):
    """A kind of worker."""
    variables = {"RANKER": name, "RANKER_ITEM_S": str(per_item_s)}
    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": variables}}
    return {"instance_type": {"price_per_hour": price}, "ray_actor_options": options}
