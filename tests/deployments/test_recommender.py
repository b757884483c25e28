"""The recommender: queries, loading, what it answers, simulated hardware, and the configs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from deployments.recommender import Query, Recommender, app, data, train
from ray_slo.serve.config.resolve import parse_spec

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is found in a cache that was there before."""
    monkeypatch.setenv("RAY_SLO_CACHE", str(tmp_path))
    return tmp_path


# --- queries -------------------------------------------------------------------------------------


def test_forms_of_a_query_give_the_same():
    wanted = Recommender.preprocess({"user": 7, "items": [3, 14, 15]})
    assert wanted.user == 7 and wanted.items.tolist() == [3, 14, 15]
    assert wanted.items.dtype == np.int64
    for item in (wanted, {"items": (3, 14, 15), "user": np.int32(7)}, Query(7, wanted.items)):
        got = Recommender.preprocess(item)
        assert got.user == 7 and np.array_equal(got.items, wanted.items)
    assert Recommender.size(wanted) == 3


@pytest.mark.parametrize("size", [1, 40, app.MAX_ITEMS])
def test_examples_are_queries_of_their_size(size):
    example = Recommender.example_input(size)
    assert Recommender.size(Recommender.preprocess(example)) == size


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (None, "query: got a NoneType, wanted {'user'"),
        ([1, 2], "query: got a list, wanted {'user'"),
        ({"user": 1}, "query: got the keys ['user'], wanted {'user'"),
        ({"user": "1", "items": [1]}, "user: got a str, wanted a whole number"),
        ({"user": True, "items": [1]}, "user: got a bool, wanted a whole number"),
        ({"user": -1, "items": [1]}, "user: got -1, wanted 0 to 1499"),
        ({"user": 1500, "items": [1]}, "user: got 1500, wanted 0 to 1499"),
        ({"user": 1, "items": "12"}, "items: got a str, wanted a list of whole numbers"),
        ({"user": 1, "items": []}, "items: got 0, wanted 1 to 1000"),
        ({"user": 1, "items": [0] * 1001}, "items: got 1001, wanted 1 to 1000"),
        ({"user": 1, "items": [1, 2.5]}, "items: got something else among them"),
        ({"user": 1, "items": [1, True]}, "items: got something else among them"),
        ({"user": 1, "items": [1, None]}, "items: got something else among them"),
        ({"user": 1, "items": [1, 2**70]}, "items: got object of shape (2,), wanted a list"),
        ({"user": 1, "items": np.zeros((2, 2), int)}, "items: got int64 of shape (2, 2), wanted"),
        ({"user": 1, "items": np.zeros(2)}, "items: got float64 of shape (2,), wanted a list"),
        ({"user": 1, "items": [3, -2]}, "items: got -2 among them, wanted 0 to 2999"),
        ({"user": 1, "items": [3, 3000]}, "items: got 3000 among them, wanted 0 to 2999"),
    ],
)
def test_bad_queries_are_refused_with_the_field(item, message):
    with pytest.raises(ValueError) as caught:
        Recommender.preprocess(item)
    assert str(caught.value).startswith(message)


def test_payloads_are_queries_of_all_sizes_the_same_each_time():
    queries = app.payloads()
    assert queries == app.payloads() != app.payloads(seed=1)
    sizes = [Recommender.size(Recommender.preprocess(query)) for query in queries]
    assert (min(sizes), max(sizes)) == (1, app.MAX_ITEMS)
    assert np.median(sizes) == pytest.approx(90, rel=0.2)
    assert all(len(set(query["items"])) == len(query["items"]) for query in queries)


# --- the world -----------------------------------------------------------------------------------


def test_interactions_are_those_of_a_skewed_world_and_hold_one_out():
    seen, held_out = data.interactions()
    assert seen.shape == (data.USERS, data.PER_USER - 1) and held_out.shape == (data.USERS,)
    rows = np.sort(np.column_stack([seen, held_out]), axis=1)
    assert (np.diff(rows, axis=1) > 0).all(), "an item twice"
    counts = np.sort(np.bincount(seen.ravel(), minlength=data.ITEMS))[::-1]
    assert counts[: data.ITEMS // 5].sum() > 0.4 * counts.sum()


def test_the_measure_tells_knowing_from_guessing():
    rng = np.random.default_rng(0)
    guessing = train.measure(lambda users, items: rng.random(len(items)))
    assert guessing == pytest.approx(0.1, abs=0.03)
    assert train.measure(train.popularity()) > 0.3
    _, held_out = data.interactions()
    assert train.measure(lambda users, items: (items == held_out[users]).astype(float)) == 1


# --- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", train.NAMES)
def test_rankings_hold_the_items_best_first_whatever_the_batch(name):
    recommender = Recommender(name, "none", threads=1)
    queries = [Recommender.example_input(size) for size in (5, 1, 300)]
    answers = recommender(queries)
    assert recommender([]) == []
    for query, answer in zip(queries, answers, strict=True):
        ranking = np.array(answer["ranking"])
        assert sorted(ranking) == sorted(query.items)
        scores = train._scorer(recommender.network)(np.full(len(ranking), query.user), ranking)
        assert (np.diff(scores) < 1e-5).all()


def test_a_batch_staged_ahead_has_the_same_answers():
    recommender = Recommender("ncf", "none", threads=1, device="cpu")
    queries = [Recommender.example_input(size) for size in (5, 1, 300)]
    assert recommender(recommender.stage(queries)) == recommender(queries)
    assert not recommender.stages_ahead  # on a CPU it would take the running batch's time


def test_the_way_is_chosen_by_measurement():
    measured = Recommender("ncf", "none", threads=1, device="cpu", how="measure")
    assert measured.runs.startswith(str(measured.runner.how))
    assert " ms at batch size 1, " in measured.runs and " ms at batch size 1000" in measured.runs


@pytest.mark.parametrize("name", train.NAMES)
def test_the_network_runs_where_and_how_it_is_told(name):
    plain = Recommender(name, "none", threads=1, device="cpu")
    assert plain.runs == "float32, eager" and str(plain.runner.device) == "cpu"
    recorded = Recommender(name, "none", threads=1, device="cpu", how={"engine": "graph"})
    queries = [Recommender.example_input(size) for size in (3, 4, 40)]
    assert [recorded([query]) for query in queries] == [plain([query]) for query in queries]


def test_random_weights_are_the_same_each_time_and_leave_torch_alone():
    import torch

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    query = Recommender.example_input(50)
    first, second = Recommender("ncf", "none", threads=1), Recommender("ncf", "none", threads=1)
    assert first([query]) == second([query])
    assert torch.rand(1) == expected


def test_weights_are_trained_once_measured_and_found_again(cache, no_network, monkeypatch):
    monkeypatch.setattr(data, "interactions", _little(data.interactions()))
    monkeypatch.setitem(train.EPOCHS, "ncf", 1)
    trained = Recommender("ncf", threads=1)
    rate = train.hit_rate("ncf")
    assert 0 < rate < 1
    monkeypatch.setattr(train, "train", None)  # it cannot be trained again
    query = Recommender.example_input(50)
    for weights in (None, "download", "local"):
        again = Recommender("ncf", weights)
        assert again([query]) == trained([query]) != Recommender("ncf", "none", threads=1)([query])
    assert no_network == []
    (file,) = cache.glob("recommender/*/ncf.pt")
    for path in (file, file.parent):  # a file, and a folder with it
        assert Recommender("ncf", path)([query]) == trained([query])
    with pytest.raises(ValueError, match=r"weights: .*ncf.pt' is not a state dict of wide_deep"):
        Recommender("wide_deep", file)


def test_local_weights_that_were_never_trained_are_named_with_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(train, "train", lambda name: pytest.fail("trained"))
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "local")
    with pytest.raises(ValueError) as caught:
        Recommender("ncf")
    file = train.cache_folder() / "ncf.pt"
    assert str(caught.value) == (
        f"weights: got 'local', but '{file}' is not there; make it with python -m "
        "deployments.recommender.train, or say 'download' (trains it), 'none' (random) or a path, "
        "as the argument weights or in RAY_SLO_WEIGHTS"
    )
    monkeypatch.setenv("RAY_SLO_WEIGHTS", "none")
    query = Recommender.example_input(50)
    assert Recommender("ncf")([query]) == Recommender("ncf", "none")([query])


def _little(whole: data.Interactions):
    return lambda: data.Interactions(whole.seen[:, :2], whole.held_out)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"network": "dlrm"}, "network: got 'dlrm', wanted one of ncf, wide_deep"),
        (
            {"weights": "nowhere.pt"},
            "weights: got 'nowhere.pt', .*'download' .as local, and trains",
        ),
        (
            {"weights": "default"},
            "weights: got 'default', wanted 'none' .random., 'local' .*'download'",
        ),
        ({"weights": __file__}, "weights: .* is not what torch.save"),
        ({"weights": str(ROOT)}, "weights: .*wide_deep.pt' is not what torch.save"),
        ({"threads": 0}, "threads: got 0, wanted a whole number from 1"),
        ({"weights": "none", "device": "gpu"}, "device: got 'gpu', wanted 'auto', 'cpu', 'cuda'"),
        ({"weights": "none", "how": "fast"}, "how: got 'fast', wanted one of 'auto', 'measure'"),
    ],
)
def test_bad_arguments_are_refused_with_the_field(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Recommender(**kwargs)


# --- simulated hardware --------------------------------------------------------------------------


def test_a_batch_takes_at_least_what_the_simulated_hardware_does(monkeypatch):
    monkeypatch.setenv(app.BASE_VARIABLE, "20")
    monkeypatch.setenv(app.ITEM_VARIABLE, "0.1")
    recommender = Recommender("ncf", "none", threads=1)
    assert recommender.pace == pytest.approx((0.02, 1e-4))
    started = time.perf_counter()
    recommender([Recommender.example_input(200), Recommender.example_input(100)])
    assert time.perf_counter() - started >= 0.05


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "inf", ""])
def test_a_pace_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv(app.BASE_VARIABLE, text)
    with pytest.raises(ValueError, match=rf"SIMULATED_BASE_MS: got '{text}', wanted milliseconds"):
        app.Pace.from_environment()


# --- configs -------------------------------------------------------------------------------------

CONFIGS = sorted((ROOT / "configs").glob("recommender-*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configs_name_what_there_is(config):
    from ray_slo.planning.catalogue import CATALOGUE

    (application,) = yaml.safe_load(config.read_text())["applications"]
    spec = parse_spec(application["args"])
    (model,) = spec.models.values()
    assert model.load() is Recommender
    assert model.max_batch_size == app.MAX_ITEMS
    assert model.kwargs["network"] in train.NAMES
    rented = 0.0
    for kind, worker in spec.workers.items():
        assert worker.instance_type == CATALOGUE[kind]
        rented += worker.num_replicas * worker.instance_type.price_per_hour
        variables = worker.ray_actor_options["runtime_env"]["env_vars"]
        assert set(variables) == {app.BASE_VARIABLE, app.ITEM_VARIABLE}
    assert rented <= spec.planner.kwargs["budget_per_hour"]
