"""The frontend shows a policy's or plan's prediction beside its own measurement."""

from types import SimpleNamespace

from ray_slo.core.policy import Expected
from tests.serve.fakes import Impatient
from tests.serve.loops import in_loop


class Sure(Impatient):
    def expected(self):
        return {"m": Expected(90.0, 0.01), "other": Expected(10.0, 1.0)}


class Unsure(Impatient):
    def expected(self):
        raise ArithmeticError("no idea")


async def told(front):
    await front._workers.refresh(is_waited_for=False)
    return (await front.slo_status())["expected"]


@in_loop
async def test_of_the_policy(app):
    async with app(policy=Sure) as (front, _):
        assert await told(front) == {"m": {"accuracy": 90.0, "bad_rate": 0.01}}


@in_loop
async def test_of_a_policy_that_does_not_say(app):
    async with app() as (front, _):
        assert await told(front) == {}


@in_loop
async def test_a_policy_that_fails_to_say_goes_on(app, caplog):
    async with app(policy=Unsure) as (front, _):
        assert await told(front) == {}
        assert "cannot say what it expects" in caplog.text
        assert await front(("item", 1)) == "item"


@in_loop
async def test_a_plan_knows_better(app):
    async with app(policy=Sure) as (front, _):
        await told(front)
        for planned in ({"m": Expected(80.0, 0.2)}, {"": Expected(80.0, 0.2), "x": Expected(1, 1)}):
            front._plan = SimpleNamespace(expected=planned, close=lambda: None)
            assert front._expected() == {"m": (80.0, 0.2)}
