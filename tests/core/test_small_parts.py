"""Parts of a few lines: texts and names in messages, bounded dictionaries, wrappers, requests."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from ray_slo.core.decisions import Dispatch
from ray_slo.core.hints import bounds, choices, parts_of, wanted, wanted_bounds
from ray_slo.core.names import import_attr, listed, nearest
from ray_slo.core.pages import anchor_of, see
from ray_slo.core.policy import InFlight, PolicyWrapper, unwrapped, wrapper
from ray_slo.core.recent import Recent
from ray_slo.core.requests import Request
from ray_slo.core.text import clipped, quoted
from ray_slo.simulation.spec import SimulationSpec


def test_a_long_text_is_cut_and_any_text_can_be_encoded():
    assert clipped("four", 4) == "four"
    assert clipped("longer", 4) == "long… (6 characters)"
    assert clipped("\ud800", 4) == "\\ud800"
    assert quoted("ä") == r"'\xe4'"
    assert quoted("x" * 100) == f"'{'x' * 79}… (102 characters)"
    assert quoted(10**5000) == "a huge int"
    assert quoted({"a": [(1,), {2}], "b": {}}) == "{'a': [(1,), {2}], 'b': {}}"
    assert quoted([1] * 999) == f"[{'1, ' * 26}1…"


def test_a_value_is_read_no_further_than_it_is_shown():
    for one in (lambda v: [v] * 9, lambda v: {"a": v, "b": v}, lambda v: (v, v)):
        nested = 0
        for _ in range(40):  # 2⁴⁰ items and more
            nested = one(nested)
        assert len(quoted(nested)) == 81
    itself = []
    itself.append(itself)
    assert quoted(itself).startswith("[[")

    class Shy:
        def __repr__(self):
            raise RuntimeError

    assert quoted(Shy()) == "a Shy"


def test_names_are_imported_listed_and_suggested():
    assert import_attr("math:pi") == pytest.approx(3.14159, abs=1e-5)
    for wrong in ("math:pie", "nowhere_at_all:x", "math"):
        with pytest.raises(ValueError, match=f"cannot import '{wrong}'"):
            import_attr(wrong)
    assert listed([]) == "none"
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b, … (3 in all)"
    assert nearest("Eagr", ["flex", "eager"]) == " (did you mean 'eager'?)"
    assert nearest("Eagr", ["Flex"]) == ""


@pytest.mark.parametrize(
    ("hint", "words", "limits"),
    [
        (bool, "true or false", ""),
        (float | None, "a number or null", ""),
        (Annotated[int, Field(ge=1, le=8)], "a whole number from 1 to 8", "from 1 to 8"),
        (Annotated[float, Field(gt=0)], "a number above 0", "above 0"),
        (Annotated[float, Field(ge=0)], "a number of at least 0", "at least 0"),
        (
            Annotated[float, Field(gt=0, lt=1)],
            "a number above 0 and below 1",
            "above 0 and below 1",
        ),
        (Annotated[float, Field(gt=0, lt=float("inf"))], "a number above 0", "above 0"),
        (Literal["a", "b"], "one of a, b", ""),
        (Literal["a"], "'a'", ""),
        (list[int] | tuple[int, ...], "a list", ""),
        (dict[str, int], "a mapping", ""),
        (int | object, "", ""),
    ],
)
def test_what_a_hint_allows_in_words(hint, words, limits):
    assert wanted(hint) == words
    assert wanted_bounds(hint) == limits


def test_choices_and_bounds_of_a_union():
    hint = Literal["a"] | Annotated[int, Field(ge=2)] | Literal["b"]
    assert choices(hint) == ["a", "b"]
    assert [bounds(about) for part, about in parts_of(hint) if part is int] == ["at least 2"]


def test_a_section_is_named_once_and_three_at_most():
    anchor = anchor_of(SimulationSpec)
    assert anchor == "a-simulation" and anchor_of(int) is None
    assert see([None]) == []
    assert see([anchor, None, anchor]) == ["See docs/reference/config.md#a-simulation"]
    assert see("abcd")[0].count(" and ") == 2


def test_the_entries_that_were_set_last_are_kept():
    recent = Recent(2)
    recent["a"], recent["b"] = 1, 2
    assert list(recent) == ["a", "b"]
    recent["a"] = 3  # set again, so b is older
    recent["c"] = 4
    assert dict(recent) == {"a": 3, "c": 4}


def test_a_request_says_its_task_if_it_is_not_its_model():
    assert repr(Request(1, "m", 0.0, 1.0)) == (
        "Request(id=1, model='m', arrival=0, deadline=1, size=1)"
    )
    assert "task='t'" in repr(Request(1, "m", 0.0, 1.0, task="t"))


def test_the_time_of_a_batch_in_flight():
    dispatch = Dispatch(1, "w", "v", (), 2.0, 2.5)
    assert InFlight(dispatch, 2.0, 2.5).latency_s == pytest.approx(0.5)


def test_wrappers_are_found_and_taken_off():
    class Inner:
        serves_late = True

    class Outer(PolicyWrapper):
        pass

    class Other(PolicyWrapper):
        pass

    inner = Inner()
    both = Outer(Other(inner))
    assert both.serves_late and unwrapped(both) is inner
    assert wrapper(both, Other) is both.policy and wrapper(both, Outer) is both
    assert wrapper(inner, Outer) is None and wrapper(Outer(inner), Other) is None
