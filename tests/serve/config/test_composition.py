"""Every pair of features, every planner and every policy with every feature: served, or refused
with the reason that the docs give. Nothing is accepted and then ignored."""

import itertools

import pytest
import yaml
from ray.serve.config import RequestRouterConfig

from ray_slo.policies.registry import POLICIES as ALL_POLICIES
from ray_slo.serve.app.build import build_app
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.serve.planner.plugin import PLANNERS as ALL_PLANNERS
from tests.serve.config.composition import (
    FEATURES,
    PLANNERS,
    POLICIES,
    ROOT,
    TABLES,
    config,
    written,
)

PAIRS = list(itertools.combinations(FEATURES.values(), 2))
NAMES = {name: words for words, name in FEATURES.items()}

SHOWS = {  # how a feature is seen in what runs
    "models": lambda spec: {"a", "b"} <= spec.trees.keys(),
    "variants": lambda spec: all(len(model.variants) == 2 for model in spec.models.values()),
    "pipeline": lambda spec: [t.name for t in spec.trees["pages"].order] == ["find", "read"],
    "kinds": lambda spec: len({kind.rpartition("-")[2] for kind in spec.workers}) == 2,
    "budget": lambda spec: (
        spec.planner.kwargs["budget_per_hour"] == 5
        and all(worker.price_per_hour > 0 for worker in spec.workers.values())
    ),
    "groups": lambda spec: {w.group for w in spec.workers.values()} == {"one", "two"},
    "preemption": lambda spec: spec.policy.preempts,
    "autoscaling": lambda spec: {w.replica_bounds for w in spec.workers.values()} == {(1, 4)},
    "sizes": lambda spec: all(hasattr(model.load(), "size") for model in spec.models.values()),
    "classes": lambda spec: all(tree.slos_s["gold"] == 0.1 for tree in spec.trees.values()),
}


def is_served(pair):
    """Whether the page has ✓ for a pair."""
    rows = written("pairs").splitlines()
    columns = [c.strip() for c in rows[0].strip("|").split("|")][1:]
    found = {}
    for row in rows[2:]:
        if not row.startswith("|"):
            break
        name, *cells = [c.strip() for c in row.strip("|").split("|")]
        found |= {
            frozenset((name, column)): c for column, c in zip(columns, cells, strict=True) if c
        }
    return found[frozenset(NAMES[feature] for feature in pair)] == "✓"


@pytest.mark.parametrize("pair", [*filter(is_served, PAIRS)], ids="+".join)
def test_no_feature_of_a_pair_that_the_docs_call_served_is_ignored(pair):
    """The table below is compared with what is built; here is what its ✓ means."""
    spec = parse_spec(config(pair))
    for feature in pair:
        assert SHOWS[feature](spec), f"{feature} is accepted, and ignored"
    for feature in SHOWS.keys() - set(pair):
        if feature in ("variants", "pipeline", "groups", "preemption", "classes", "sizes"):
            assert not _shows(feature, spec), f"{feature} was not asked for: the check is too weak"


def _shows(feature, spec):
    try:
        return SHOWS[feature](spec)
    except (KeyError, AttributeError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_docs_have_the_table_as_it_is(name, monkeypatch):
    # Most of a build's time. Routers say nothing of what is refused.
    monkeypatch.setattr(RequestRouterConfig, "_serialize_request_router_cls", lambda self: None)
    page, made = TABLES[name]
    assert written(name) == made(), (
        f"{page} is out of date: python -m tests.serve.config.composition"
    )


def test_all_planners_and_policies_are_in_the_tables():
    assert set(PLANNERS) == {None, *ALL_PLANNERS}
    assert set(POLICIES) == set(ALL_POLICIES)


def test_all_features_at_once():
    """The showcase, in small."""
    everything = set(FEATURES.values()) - {"preemption", "budget"}
    spec = parse_spec(config(everything | {"budget"}))
    build_app(config(everything | {"budget"}))
    for feature in (*everything, "budget"):
        assert SHOWS[feature](spec), feature


def test_the_showcase_is_what_it_says():
    from examples import one_pool

    (application,) = yaml.safe_load((ROOT / "configs" / "showcase.yaml").read_text())[
        "applications"
    ]
    spec = parse_spec(application["args"])
    assert build_app(application["args"])
    assert [task.model for task in spec.trees["sheet"].order] == ["find", "digit"]
    assert spec.trees["digit"].slos_s == {"": 1.0, "gold": 0.3}
    assert {worker.group for worker in spec.workers.values()} == {"reading", "ranking"}
    assert {k: w.replica_bounds for k, w in spec.workers.items()} == {
        "reading-small": (1, 3),
        "reading-large": (0, 1),
        "ranking-small": (1, 3),
        "ranking-large": (0, 1),
    }
    assert spec.planner.kwargs["budget_per_hour"] == 0.8
    stated = {name: v.accuracy for name, v in spec.models["digit"].variants.items()}
    assert stated == pytest.approx(one_pool.accuracies(), abs=0.5)
