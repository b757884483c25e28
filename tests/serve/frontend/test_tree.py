"""Trees of tasks: the requests of each task, the joined results, cancellation."""

import asyncio

import pytest

from ray_slo import Outputs
from ray_slo.core.requests import Upstream
from ray_slo.errors import BatchResultError
from ray_slo.serve.frontend.answer import joined_answer
from ray_slo.serve.frontend.tree import TreeRunner, Visit, say_task
from tests.serve.loops import in_loop

CHAIN = {"find": None, "spell": "find"}
WIDE = {"cars": None, "kind": "cars", "faces": "cars", "age": "faces"}


class Server:
    """Serves tasks by functions of the item, and notes what it was asked."""

    def __init__(self, **tasks):
        self.tasks, self.asked, self.ended, self.cancelled = tasks, [], [], []

    async def __call__(self, task, item, upstream):
        self.asked.append((task, item, upstream))
        at = float(len(self.asked))
        try:
            value = self.tasks[task](item)
            if asyncio.iscoroutine(value):
                value = await value
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append((task, item))
            raise
        self.ended.append((task, item))
        return value, Visit(f"w-{task}", f"{task}1", 2, 0.25, 0.5, 0.75, done_at=at)


def hook(function):
    async def call(*args):
        return function(*args)

    return call


def words(text):
    return Outputs(len(text), {"spell": text.split()})


@in_loop
async def test_an_item_is_served_by_all_and_joined():
    made = []
    server = Server(find=words, spell=str.upper)
    tree = TreeRunner(CHAIN, made=lambda *said: made.append(said))
    node = await tree.run("to be or", server)
    assert node.joined == {"result": 8, "outputs": {"spell": ["TO", "BE", "OR"]}}
    came = Upstream("w-find", "find1", 0.75)
    assert server.asked[0] == ("find", "to be or", None)
    assert server.asked[1:] == [("spell", word, came) for word in ("to", "be", "or")]
    assert made == [("find", "find1", {"spell": 3}), *[("spell", "spell1", {})] * 3]


@in_loop
async def test_no_items_or_a_plain_result_end_there():
    server = Server(find=lambda text: Outputs(text) if text else None, spell=str.upper)
    for text in ("x", ""):
        node = await TreeRunner(CHAIN).run(text, server)
        assert node.joined == {"result": text or None, "outputs": {"spell": []}}
    assert [task for task, *_ in server.asked] == ["find", "find"]


@in_loop
async def test_a_wide_tree_joins_bottom_up_with_the_users_functions():
    server = Server(
        cars=lambda _: Outputs("road", {"faces": ["f", "g"], "kind": ("k",)}),
        kind=str.upper,
        faces=lambda face: Outputs(face, {"age": [face + face]}),
        age=len,
    )
    tree = TreeRunner(
        WIDE,
        postprocess={"age": hook(lambda age: age + 1), "cars": hook(str.title)},
        join={"faces": hook(lambda face, outputs: (face, *outputs["age"]))},
    )
    node = await tree.run(None, server)
    assert node.joined == {
        "result": "Road",
        "outputs": {"kind": ["K"], "faces": [("f", 3), ("g", 3)]},
    }
    assert sorted(node.paths()) == [
        ("cars1", "faces1", "age1"),
        ("cars1", "faces1", "age1"),
        ("cars1", "kind1"),
    ]
    assert [one.task for one in node.slowest()] == ["cars", "faces", "age"]


@in_loop
async def test_siblings_are_served_at_the_same_time():
    here, everybody = [], asyncio.Event()

    async def spell(word):
        here.append(word)
        if len(here) == 3:
            everybody.set()
        await everybody.wait()
        return word

    node = await TreeRunner(CHAIN).run("a b c", Server(find=words, spell=spell))
    assert node.joined["outputs"] == {"spell": ["a", "b", "c"]}


@in_loop
async def test_the_first_error_cancels_the_rest_and_is_the_answer():
    async def spell(word):
        if word == "bad":
            raise ValueError("bad word")
        await asyncio.Event().wait()

    server = Server(find=words, spell=spell)
    with pytest.raises(ValueError, match="bad word"):
        await TreeRunner(CHAIN).run("a bad c", server)
    assert sorted(server.cancelled) == [("spell", "a"), ("spell", "c")]


@in_loop
async def test_several_errors_at_once_are_one():
    def spell(word):
        raise ValueError(word)

    with pytest.raises(ValueError, match=r"^a$"):
        await TreeRunner(CHAIN).run("a b c", Server(find=words, spell=spell))


@in_loop
async def test_who_leaves_cancels_everything():
    begun = asyncio.Event()

    async def spell(word):
        if word == "b":
            begun.set()
        await asyncio.Event().wait()

    server = Server(find=words, spell=spell)
    running = asyncio.ensure_future(TreeRunner(CHAIN).run("a b", server))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(server.cancelled) == [("spell", "a"), ("spell", "b")]


@pytest.mark.parametrize(
    ("task", "value", "says"),
    [
        ("find", Outputs(1, {"spel": []}), "items for 'spel'"),
        ("find", Outputs(1, ["a"]), "items that are a list"),
        ("find", Outputs(1, {"spell": "word"}), "a str as items for 'spell'"),
        ("find", Outputs(1, {"spell": 3}), "a int as items for 'spell'"),
        ("find", Outputs(1, {"spell": {"a": 1}}), "a dict as items for 'spell'"),
        ("spell", Outputs(1, {"find": [1]}), "items for 'find'"),
    ],
)
def test_wrong_outputs_are_named(task, value, says):
    with pytest.raises(BatchResultError) as error:
        TreeRunner(CHAIN).split(task, value)
    assert says in str(error.value)
    assert f"(in task {task!r})" in str(error.value)
    wanted = {
        "find": "must return per request a result, or ray_slo.Outputs(result, {'spell': […]})",
        "spell": "must return a plain result: it has no children",
    }
    assert wanted[task] in str(error.value)
    assert error.value.to_body()["task"] == task


@in_loop
async def test_errors_of_the_users_hooks_say_the_task():
    def fail(*_):
        raise KeyError("no")

    server = Server(find=words, spell=str.upper)
    for tree, task in (
        (TreeRunner(CHAIN, join={"find": hook(fail)}), "find"),
        (TreeRunner(CHAIN, postprocess={"spell": hook(fail)}), "spell"),
    ):
        with pytest.raises(KeyError) as error:
            await tree.run("a b", server)
        assert error.value.__notes__ == [f"in task {task!r}"]


def test_the_task_is_noted_once():
    error = ValueError()
    for _ in range(3):
        say_task(error, "t")
    assert error.__notes__ == ["in task 't'"]


@in_loop
async def test_the_answer_names_each_stage():
    server = Server(find=words, spell=str.upper)
    node = await TreeRunner(CHAIN).run("a b c", server)
    accuracies = {("find1", "spell1"): 60.0}
    answer = joined_answer("words", node, accuracies.get, 2000, 1500)
    assert (answer.model, answer.variant, answer.accuracy) == ("words", "find1/spell1", 60.0)
    assert (answer.queue_ms, answer.exec_ms, answer.batch_size) == (500, 1000, 2)
    assert not answer.deadline_met
    find, spell = answer.stages
    assert (find.task, find.requests, find.variants) == ("find", 1, {"find1": 1})
    assert (spell.task, spell.requests, spell.variants) == ("spell", 3, {"spell1": 3})
    assert answer.headers()["x-slo-stages"] == (
        'find;requests=1;variants="find1*1";batch-size=2;queue-ms=250.000;exec-ms=500.000, '
        'spell;requests=3;variants="spell1*3";batch-size=2;queue-ms=250.000;exec-ms=500.000'
    )
    assert joined_answer("words", node, lambda _: None, 1, 2).accuracy is None


@in_loop
async def test_the_number_of_items_counts_for_the_whole_request():
    # Ten items of the root, each with four below: the first two make no more than ten.
    def faces(item):
        return Outputs(item, {"age": [item] * 4})

    server = Server(
        cars=lambda item: Outputs(item, {"faces": range(item)}), faces=faces, age=lambda item: item
    )
    runner = TreeRunner(WIDE, max_outputs={"cars": 10, "faces": 10})
    assert sum(1 for _ in (await runner.run(2, server)).walk()) == 1 + 2 + 2 * 4
    with pytest.raises(BatchResultError, match=r"12 items .* at most 10 .* max_outputs: 12") as e:
        await runner.run(10, server)
    assert e.value.task == "faces"
    with pytest.raises(BatchResultError, match="11 items") as e:
        await runner.run(11, server)
    assert e.value.task == "cars"
