"""Trees of tasks, and streams of demand."""

import pickle

import pytest

from ray_slo.core.trees import Tree, TreeTask, root_and_class, stream_of, tree_of_task

TASKS = (
    TreeTask("plates", "ocr", "cars"),
    TreeTask("find", "find", None, {"big": {"cars": 3.0}, "small": {"cars": 2.0, "faces": 0.0}}),
    TreeTask("faces", "faces", "find"),
    TreeTask("cars", "cars", "find"),
)


def street(**kwargs) -> Tree:
    return Tree(**{"name": "street", "tasks": TASKS, "slos_s": {"": 0.2, "gold": 0.1}, **kwargs})


def test_parents_come_before_children():
    tree = street()
    assert tree.root == "find"
    assert list(tree.parents.items()) == [
        ("find", None),
        ("faces", "find"),
        ("cars", "find"),
        ("plates", "cars"),
    ]
    assert tree.children("find") == ("faces", "cars")
    assert tree.path("plates") == ("find", "cars", "plates")
    assert tree.models == ("find", "faces", "cars", "ocr")
    assert tree["plates"].model == "ocr"
    assert "plates" in tree and "ocr" not in tree


def test_a_factor_that_is_not_given_is_one():
    find = street()["find"]
    assert [find.factor("big", "cars"), find.factor("big", "faces")] == [3.0, 1.0]
    assert [find.factor("small", "faces"), find.factor("other", "cars")] == [0.0, 1.0]


def test_a_model_alone_is_a_tree_of_one():
    tree = Tree.of_model("digits", {"": 0.05})
    assert (tree.root, tree.models, tree.slo_s) == ("digits", ("digits",), 0.05)
    assert dict(tree.parents) == {"digits": None}


def test_streams():
    assert list(street().streams()) == [("street", 0.2), ("street@gold", 0.1)]
    for root, slo_class in [("street", ""), ("street", "gold")]:
        assert root_and_class(stream_of(root, slo_class)) == (root, slo_class)


def test_trees_travel():
    tree = street()
    assert tree.root  # a cached property does not get in the way
    assert pickle.loads(pickle.dumps(tree)) == street()


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"name": ""}, "name of a tree"),
        ({"tasks": ()}, "tasks of 'street' must not be empty.*one root"),
        ({"tasks": (TreeTask("a", "a"), TreeTask("a", "b", "a"))}, "two are named 'a'"),
        ({"tasks": (TreeTask("a", "a"), TreeTask("b", "b"))}, "a, b have no parent"),
        ({"tasks": (TreeTask("a", "a", "x"),)}, "tasks.a.parent: no task 'x'; the tasks are a"),
        (
            {"tasks": (TreeTask("r", "r"), TreeTask("a", "a", "b"), TreeTask("b", "b", "a"))},
            "a, b .*no cycle",
        ),
        (
            {"tasks": (TreeTask("r", "r", None, {"v": {"x": 1.0}}),)},
            "tasks.r.factors.v: 'x' is no child of 'r'; its children are none",
        ),
        ({"slos_s": {"gold": 0.1}}, "default class ''; it has 'gold'"),
        ({"slos_s": {"": 0.1, "gold": 0.0}}, "slos_s.gold of 'street' must be positive, got 0"),
        ({"path_accuracies": {("a", "b"): 101.0}}, "path_accuracies.a/b.*got 101"),
    ],
)
def test_refuses_what_is_no_tree(kwargs, said):
    with pytest.raises(ValueError, match=said):
        street(**kwargs)


def test_refuses_a_bad_task():
    with pytest.raises(ValueError, match="name of a task"):
        TreeTask("", "m")
    with pytest.raises(ValueError, match="model of a task"):
        TreeTask("t", "")
    with pytest.raises(ValueError, match=r"tasks.t.factors.v.c must be at least 0, got -1"):
        TreeTask("t", "t", None, {"v": {"c": -1.0}})


def test_tasks_are_unique_in_an_application():
    trees = {"street": street(), "ocr": Tree.of_model("ocr", {"": 1.0})}
    assert tree_of_task(trees)["plates"].name == "street"
    assert tree_of_task(trees)["ocr"].name == "ocr"
    trees["cars"] = Tree.of_model("cars", {"": 1.0})
    with pytest.raises(ValueError, match="task 'cars' is in 'street' and in 'cars'"):
        tree_of_task(trees)
