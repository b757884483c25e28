"""Values of environment variables that are not valid are refused by name."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.core import environment
from ray_slo.core.environment import FAST, FRONTEND_WAIT_S, GRPC_HOST, MAX_BODY_BYTES

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "ray_slo").rglob("*.py"), *(ROOT / "deployments").rglob("*.py")]


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (FAST, "0", False),
        (FAST, "1", True),
        (FRONTEND_WAIT_S, "2.5", 2.5),
        (FRONTEND_WAIT_S, "86400", 86_400.0),
        (GRPC_HOST, "0.0.0.0", "0.0.0.0"),
        (GRPC_HOST, "::1", "[::1]"),
        (GRPC_HOST, "[::]", "[::]"),
        (GRPC_HOST, "node-3.cluster.local", "node-3.cluster.local"),
        (MAX_BODY_BYTES, "1", 1),
        (MAX_BODY_BYTES, str(2**31 - 1), 2**31 - 1),
    ],
)
def test_valid_values(variable, text, value):
    assert variable.read({variable.name: text}) == value
    assert variable.read({variable.name: ""}) == variable.read({}) == variable.default


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        (FAST, ["yes", "2", " 1", "true"]),
        (FRONTEND_WAIT_S, ["0", "-1", "soon", "nan", "inf", "1e400", "86401", "9" * 40, "5s"]),
        (GRPC_HOST, ["300.1.1.1", "a b", "x:1", "-a", "1.2.3", "http://a", "é", "a" * 300]),
        (MAX_BODY_BYTES, ["0", "-1", "1e6", "many", str(2**31), "9" * 5000, "١٢", "1.5", "1 MB"]),
    ],
)
def test_what_is_not_valid_is_refused(variable, texts):
    for text in texts:
        with pytest.raises(ValueError) as refused:
            variable.read({variable.name: text})
        said, see = str(refused.value).splitlines()
        assert said.startswith(f"{variable.name}: must be {variable.wanted}, got ")
        assert see == f"See {environment.PAGE}"
        assert len(said) < 300
        with pytest.raises(ValueError, match=variable.name):
            environment.check({variable.name: text})


@given(st.sampled_from(environment.CHECKED), st.text(max_size=40))
@settings(max_examples=200)
def test_any_text(variable, text):
    try:
        variable.read({variable.name: text})
    except ValueError as error:
        assert str(error).startswith(f"{variable.name}: must be ")


def test_a_name_that_nothing_reads_is_told():
    assert environment.check({"RAY_SLO_FAST": "1", "PATH": "x", "RAY_SLO_WEIGHTS": "none"}) == []
    (line,) = environment.check({"RAY_SLO_MAX_BODY_BYTE": "5"})
    assert line.startswith("RAY_SLO_MAX_BODY_BYTE is not a variable of ray-slo")
    assert "RAY_SLO_MAX_BODY_BYTES" in line


def test_the_page_lists_every_variable_that_the_code_names():
    page = (ROOT / environment.PAGE).read_text(encoding="utf-8")
    named = set()
    for path in SOURCES:
        named |= set(re.findall(r"\bRAY_SLO_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    assert named == set(environment.NAMES)
    for name in named:
        assert f"| `{name}` |" in page
    for variable in environment.CHECKED:
        if variable.default is not None:
            assert str(variable.default).removesuffix(".0") in page
