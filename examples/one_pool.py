"""One pool for everything: a pipeline, a model with two SLO classes, and lists of any length. They
run on two kinds of machines in two groups. The load and a budget decide the number of machines.

A sheet of handwriting goes to `find`, and every digit on it to `digit`. Clients may ask `digit`
directly, too, and get an answer within a second, or within 300 ms as `gold`. `rank` orders lists of
digits by the probability that they show a given digit. The cost of a list depends on its length.
The planner `auto` decides how many machines of each kind run, and which networks they have.

The networks are scikit-learn's, and train in a second. The answers are real. The machines are
simulated: they sleep as long as such a machine would compute.

Run, in the root of the repository: python -m examples.one_pool
"""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from numpy.typing import NDArray
from ray import serve

import ray_slo
from ray_slo.demo.digits.data import INK, SIDE, test_set, train_set
from ray_slo.errors import SLOError
from ray_slo.serve import build_app

CONFIG = Path(__file__).parents[1] / "configs" / "showcase.yaml"
SLOWER = {"small": 2.0, "large": 1.0}  # machines
COSTS_MS = {  # of a batch, and of an item in it, on a large machine
    "find": (8.0, 2.0),
    "bayes": (4.0, 0.5),
    "linear": (8.0, 1.0),
    "svm": (15.0, 4.0),
    "rank": (10.0, 0.5),
}
SECONDS = 8
RATES = {"sheets": 3, "digits": 6, "gold": 3, "lists": 3}  # a second

Picture = NDArray[np.float32]


class Machine:
    """Sleeps as long as the simulated machine would compute."""

    def __init__(self) -> None:
        self.kind = os.environ.get("MACHINE", "large")
        self.slower = SLOWER[self.kind]

    def keep(self, started: float, network: str, items: int) -> None:
        base_ms, item_ms = COSTS_MS[network]
        due = started + self.slower * (base_ms + item_ms * items) / 1e3
        time.sleep(max(due - time.perf_counter(), 0.0))


@cache
def trained(name: str) -> Any:
    """A classifier of digits."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.svm import SVC

    made = {
        "bayes": MultinomialNB(),
        "linear": LogisticRegression(max_iter=500),
        "svm": SVC(C=3),
    }
    images, labels = train_set()
    return made[name].fit(_flat(images), labels)


def load(name: str) -> tuple[str, Any]:
    """What a worker gives to `Digit`: a network and its name."""
    return name, trained(name)


def accuracies() -> dict[str, float]:
    """Percent of held-out digits that each network reads."""
    images, labels = test_set()
    names = ("bayes", "linear", "svm")
    return {name: round(100 * trained(name).score(_flat(images), labels), 1) for name in names}


def _flat(images: Any) -> Picture:
    return np.asarray(images, np.float32).reshape(len(images), -1) / INK


def picture(item: Any, wanted: str) -> Picture:
    """Numbers from 0 (paper) to 16 (ink) as an array; ValueError says what is wrong."""
    try:
        made = np.asarray(item, np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"{wanted} is wanted") from None
    if made.ndim != 2 or 0 in made.shape or made.shape[0] % SIDE or made.shape[1] % SIDE:
        raise ValueError(f"{wanted} is wanted, got an array of shape {made.shape}")
    return made


class Find:
    """Cuts a sheet into cells of 8 x 8 pixels, and sends those with ink to the next task."""

    def __init__(self) -> None:
        self.machine = Machine()

    @staticmethod
    def preprocess(item: Any) -> Picture:
        return picture(item, "a sheet of cells of 8 x 8 numbers")

    @staticmethod
    def example_input() -> Picture:
        return sheet(5)

    def __call__(self, sheets: list[Picture]) -> list[ray_slo.Outputs]:
        started = time.perf_counter()
        answers = []
        for page in sheets:
            rows, columns = page.shape[0] // SIDE, page.shape[1] // SIDE
            cells = page.reshape(rows, SIDE, columns, SIDE).swapaxes(1, 2)
            inked = cells.any((2, 3))
            answers.append(ray_slo.Outputs(inked.tolist(), {"read": list(cells[inked])}))
        self.machine.keep(started, "find", len(sheets))
        return answers


class Digit:
    """Reads digits with the network that it is given."""

    def __init__(self) -> None:
        self.machine = Machine()

    @staticmethod
    def preprocess(item: Any) -> Picture:
        made = picture(item, "a digit of 8 x 8 numbers")
        if made.shape != (SIDE, SIDE):
            raise ValueError(f"a digit of 8 x 8 numbers is wanted, got an array of {made.shape}")
        return made

    @staticmethod
    def example_input() -> Picture:
        return np.array(test_set()[0][0])

    def __call__(self, network: tuple[str, Any], images: list[Picture]) -> list[int]:
        started, (name, classifier) = time.perf_counter(), network
        labels = [int(label) for label in classifier.predict(_flat(images))]
        self.machine.keep(started, name, len(images))
        return labels


class Rank:
    """Orders a list of digits by the probability that they show the given digit."""

    def __init__(self) -> None:
        self.machine, self.network = Machine(), trained("linear")

    @staticmethod
    def preprocess(item: Any) -> tuple[int, list[Picture]]:
        if not isinstance(item, dict) or set(item) != {"label", "images"}:
            raise ValueError("an object with `label` and `images` is wanted")
        if item["label"] not in range(10) or not 1 <= len(item["images"]) <= 200:
            raise ValueError("a label from 0 to 9 and 1 to 200 images are wanted")
        return int(item["label"]), [Digit.preprocess(image) for image in item["images"]]

    @staticmethod
    def size(query: tuple[int, list[Picture]]) -> int:
        """The size of a list in images. Profiles and `max_batch_size` count images, too."""
        return len(query[1])

    @staticmethod
    def example_input(size: int = 1) -> tuple[int, list[Picture]]:
        return 3, [Digit.example_input()] * size

    def __call__(self, queries: list[tuple[int, list[Picture]]]) -> list[list[int]]:
        started = time.perf_counter()
        answers = []
        for label, images in queries:
            sure = self.network.predict_proba(_flat(images))[:, label]
            answers.append(np.argsort(-sure, kind="stable").tolist())
        self.machine.keep(started, "rank", sum(len(images) for _, images in queries))
        return answers


def join(inked: list[list[bool]], outputs: dict[str, list[int]]) -> list[str]:
    """The text of a sheet, line by line."""
    labels = iter(outputs["read"])
    return ["".join(str(next(labels)) if ink else " " for ink in row) for row in inked]


def sheet(count: int, seed: int = 0) -> Picture:
    """A sheet of two lines with a number of held-out digits."""
    images, _ = test_set()
    cells = np.zeros((2 * (count // 2 + 1), SIDE, SIDE), np.float32)
    cells[:count] = images[(seed * count + np.arange(count)) % len(images)]
    return np.concatenate([np.hstack(row) for row in np.split(cells, 2)])


SHEETS = [sheet(5, seed).tolist() for seed in range(100)]
DIGITS = test_set()[0].tolist()
LISTS = [{"label": i % 10, "images": DIGITS[: (1, 5, 20, 100)[i % 4]]} for i in range(40)]


def application(budget_per_hour: float | None = None) -> Any:
    """The application of `configs/showcase.yaml`, with another budget if wanted."""
    (said,) = yaml.safe_load(CONFIG.read_text("utf-8"))["applications"]
    if budget_per_hour is not None:
        said["args"]["planner"]["kwargs"]["budget_per_hour"] = budget_per_hour
    return build_app(said["args"])


def requests() -> list[tuple[float, str, Any, dict[str, Any]]]:
    """For each request: when it leaves, its name, its item, and the handle's arguments."""
    found = []
    for what, rate in RATES.items():
        items, asked = {
            "sheets": (SHEETS, {"model": "sheet"}),
            "digits": (DIGITS, {"model": "digit"}),
            "gold": (DIGITS, {"model": "digit", "slo_class": "gold"}),
            "lists": (LISTS, {"model": "rank"}),
        }[what]
        count = rate * SECONDS
        found += [(i / rate, what, items[i % len(items)], asked) for i in range(count)]
    return sorted(found, key=lambda request: request[0])


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(application(), name="showcase", route_prefix=None)
        began, responses = time.perf_counter(), []
        for at, what, item, asked in requests():
            time.sleep(max(0.0, began + at - time.perf_counter()))
            responses.append((what, handle.remote(item, response_metadata=True, **asked)))
        told: dict[str, Counter[str]] = {what: Counter() for what in RATES}
        for what, response in responses:
            try:
                told[what]["in time" if response.result().deadline_met else "late"] += 1
            except SLOError as error:
                told[what][f"refused: {error.reason}"] += 1
        for what, counts in told.items():
            print(f"{what}: {dict(counts)}")
            assert sum(counts.values()) == RATES[what] * SECONDS
        plan = handle.slo_status.remote().result()["plan"]
        print(f"workers: {plan['running']}, at {plan['cost_per_hour']:g} an hour")
        print(plan["why"])
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
