"""The screen that shows a status."""

import json

import pytest

from ray_slo.serve.watch.screen import screen
from tests.serve.watch.states import EVIL, state


def section(found, key):
    return next(s for s in found.sections if s.key == key)


def cells(found, key, column):
    of = section(found, key)
    place = [c.removeprefix("#") for c in of.columns].index(column)
    return {row.cells[0]: row.cells[place] for row in of.rows}


def test_models_beside_what_is_expected():
    found = screen("app", state())
    assert cells(found, "models", "asked /s") == {
        **{"find": "125.0", "spell": "0.0", "join": "0.0", "read": "0.0"}
    }
    assert cells(found, "models", "not in time %")["find"] == "25.0 (expected 1.0)"
    assert cells(found, "models", "p99 ms") == {"find": "97.0", "spell": "", "join": "", "read": ""}
    assert cells(found, "models", "queued") == {"find": "7", "spell": "0", "join": "0", "read": ""}
    assert [row.warn for row in section(found, "models").rows] == [True, False, False, False]
    assert "1 of 2 frontends heard" in found.head
    assert "100 granted, 12 refused, 40 granted on their frontend's node" in found.head
    assert found.opens == ["read", "find", "spell", "join"]


def test_a_queue_whose_length_is_unknown_comes_after_an_empty_one():
    told = state()
    del told["queued"]["spell"]
    rows = {row.cells[0]: row for row in section(screen("app", told), "models").rows}
    place = list(rows["spell"].cells).index("?")
    assert rows["spell"].keys[place] < rows["join"].keys[place] == 0


@pytest.mark.parametrize(
    ("bad", "expected", "warn"),
    [
        (None, None, False),
        (0.01, None, False),
        (0.011, None, True),
        (0.011, 0.005, True),
        (0.05, 0.025, False),
        (0.051, 0.025, True),
    ],
)
def test_more_than_one_percent_and_twice_what_is_expected_needs_attention(bad, expected, warn):
    seen = state() | {"bad_rate": {"find": bad}, "expected": {"find": {"bad_rate": expected}}}
    rows = {row.cells[0]: row for row in section(screen("app", seen), "models").rows}
    assert rows["find"].warn is warn


def on_nodes(frontends, workers, schedulers, cluster):
    told = [{"node": n, "state": s} for n, s in zip(schedulers, ["leads", "spare"], strict=False)]
    one = next(iter(state()["workers"].values()))
    return state() | {
        "nodes": {"cluster": list(cluster), "frontends": list(frontends)},
        "workers": {f"w{i}": one | {"node": node} for i, node in enumerate(workers)},
        "schedulers": told,
        "plan": {"node": cluster[-1]},
    }


def test_where_each_process_is():
    found = screen("app", on_nodes("ab", "bbc", "ab", "abc"))
    assert cells(found, "nodes", "runs") == {
        "a": "1 × frontend, 1 × scheduler",
        "b": "1 × frontend, 2 × worker, 1 × scheduler (spare)",
        "c": "1 × worker, 1 × planner",
    }
    assert section(found, "nodes").lines == []


def test_a_node_that_nothing_replaces_is_named():
    found = screen("app", on_nodes("aa", "bb", "bb", "ab"))
    assert [(line.text, line.level) for line in section(found, "nodes").lines] == [
        ("single point of failure: all frontends are on node a", "warn"),
        ("single point of failure: all workers are on node b", "warn"),
        ("single point of failure: all schedulers are on node b", "warn"),
    ]
    only = screen("app", on_nodes("a", "a", "aa", "a"))  # there is no other node
    assert not any(s.key == "nodes" for s in only.sections)


def test_variants_in_use_and_what_was_predicted():
    found = screen("app", state())
    rows = {row.cells[1]: row.cells for row in section(found, "variants").rows}
    assert rows["f"] == [
        *("find", "f", "75", "90.0", "10.0", "9.0", "20.0", "22.0", "23.5"),
    ]
    assert rows["f/join"][4:6] == ["", ""]  # a pipeline has no batches of its own


def test_workers_by_kind_with_what_they_run():
    found = screen("app", state())
    kinds = {row.cells[0]: row for row in section(found, "kinds").rows}
    assert kinds["gpu"].cells == ["gpu", "1", "2", "1", "1 × f"]
    assert kinds["cpu"].cells == ["cpu", "1", "1", "0", "spell"]
    assert (kinds["gpu"].warn, kinds["cpu"].warn) == (True, False)  # one is missing
    assert cells(found, "workers", "runs now")["w0"] == "8 × f for 3 of 22 ms"
    assert [row.warn for row in section(found, "workers").rows] == [False, True]  # w1 is silent


def test_one_model_and_one_pipeline():
    find = screen("app", state(), "find")
    assert list(cells(find, "models", "model")) == ["find"]
    assert list(cells(find, "workers", "kind")) == ["w0"]
    assert len(section(find, "refused").rows) == 1
    spell = screen("app", state(), "spell")
    assert list(cells(spell, "workers", "kind")) == ["w1"]
    assert "refused" not in {s.key for s in spell.sections}
    read = screen("app", state(), "read")
    assert set(cells(read, "models", "model")) == {"find", "join", "read"}
    # Of no model, nothing is left but what is about all of them.
    nothing = screen("app", state(), "gone")
    assert {s.key for s in nothing.sections} == {"plan", "kinds"}


def test_nothing_that_a_user_named_can_write_to_a_terminal():
    text = json.dumps(screen("app\x07", state()).to_json(), ensure_ascii=False)
    shown = json.loads(text)
    assert not [c for c in _texts(shown) if any(ord(x) < 32 or 127 <= ord(x) < 160 for x in c)]
    assert EVIL.replace("\x1b", " ") in text.replace('\\"', '"')
    gone = screen("app", {"unreachable": "no\nanswer\x1b[2J"})
    assert gone.lines[0].text == "no answer [2J"


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "keys":  # by which rows are sorted; never shown
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def test_settings_that_do_not_fit_come_first():
    refused = ["deployments: w: max_ongoing_requests is 5; leave it out", "more\x1b"]
    first, second = screen("app", state() | {"refused_settings": refused}).lines
    assert (first.text, first.level) == (refused[0], "error")
    assert second.text == "more"
    assert screen("app", state()).lines == ()


def told(lines):
    return [(line.text, line.level) for line in lines]


def test_while_it_starts_it_says_what_it_waits_for():
    starting = {
        "models": ["find"],
        "workers": {"w": {"kind": "gpu", "state": "loads f"}},
        "deployments": {"gpu": {"running": 1, "message": "waits for a GPU"}},
    }
    assert told(screen("app", state(starting=starting)).lines) == [
        ("not served yet: find", "warn"),
        ("worker w (gpu): loads f", ""),
        ("gpu: 1 workers run; waits for a GPU", ""),
    ]


def rehearsal(ago_s, measured_bad):
    tried = {
        "price": {"value": 0.8123, "bad": 0.0123, "p50_ms": 21.25, "whole": True},
        "eager": {"value": 0.5, "bad": 0.25, "p50_ms": None, "whole": False},
        "flex": {"error": "it has no profile"},
    }
    return {
        **{"ago_s": ago_s, "setting": "price", "requests": 400, "predicted_bad": 0.0123},
        **{"measured_bad": measured_bad, "tried": tried},
    }


def test_what_auto_runs_why_and_what_it_tried():
    auto = {
        **{"setting": "price", "why": "most value in time", "for_s": 12.4},
        **{"held": 3, "failed": 1, "error": "it broke"},
        "rehearsals": [rehearsal(30.0, 0.0456), rehearsal(20.0, None)],
    }
    of = section(screen("app", state(auto=auto)), "auto")
    assert of.title == "Policy auto: rehearsed 20 s ago with 400 requests"
    assert told(of.lines) == [
        (
            "auto runs 'price', for 12 s: most value in time. 3 rehearsals held, 1 failed",
            "",
        ),
        ("the last rehearsal failed: it broke", "warn"),
        # The last one has no measurement yet.
        (
            "30 s ago: price: not in time 1.23 % predicted, 4.56 % measured until the next",
            "",
        ),
        ("flex could not be tried: it has no profile", "warn"),
    ]
    assert [row.cells for row in of.rows] == [
        ["price", "0.8123", "1.23", "21.2"],
        ["eager", "0.5000 (given up)", "25.00", ""],
    ]


def test_groups_with_models_on_the_move():
    group = {
        **{"models": ["find"], "wanted_models": ["find", "spell"], "draining": ["join"]},
        **{"workers": ["w0", "w1"], "queued": {"find": 3, "join": 1}, "counts": {"granted": 7}},
    }
    (row,) = section(screen("app", state(groups={"g": group})), "groups").rows
    assert row.cells == ["g", "find", "+spell, -join", "2", "4", "7", "?", "90.0"]


def test_what_there_is_no_memory_for():
    workers = state()["workers"]
    workers["w0"]["memory"] = {
        **{"variants": {"f": {"load_mb": 120.0, "batch_mb": 30.0}}, "room_mb": 400.0},
        **{"device": "gpu 0", "largest_batch": {"f": 4}, "left_out": {"x": "too large"}},
    }
    assert told(section(screen("app", state(workers=workers)), "workers").lines) == [
        ("w0: no memory for batches of f of more than 4", "warn"),
        ("w0: x is left out: too large", "error"),
    ]


def test_every_row_fits_its_table():
    found = screen("app", state())
    assert {s.key for s in found.sections} >= {"models", "variants", "refused", "plan", "workers"}
    for of in found.sections:
        for row in of.rows:
            assert len(row.cells) == len(row.keys) == len(of.columns)
        for i in range(len(of.columns)):  # so that they can be sorted
            assert len({isinstance(row.keys[i], str) for row in of.rows}) <= 1
