import doctest
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_slo.planning import milp
from ray_slo.planning.milp import Milp

GUROBI = find_spec("gurobipy") is not None
needs_gurobi = pytest.mark.skipif(
    not GUROBI, reason="gurobipy is not installed: pip install 'ray-slo[gurobi]'"
)
BACKENDS = ["highs", pytest.param("gurobi", marks=needs_gurobi)]


def knapsack(weights, values, capacity):
    m = Milp("max")
    x = m.variables("x", len(weights), upper=1, integer=True)
    m.block("weight", (weights, x), upper=capacity)
    m.objective((values, x))
    return m, x


@pytest.mark.parametrize("backend", BACKENDS)
def test_knapsack(backend):
    m, x = knapsack([2, 3, 4], [3, 4, 6], 6)
    solution = m.solve(backend)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(9)
    assert solution.bound == pytest.approx(9)
    assert solution[x].round().tolist() == [1, 0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_block_are_the_leading_axes(backend):
    """A 2 × 3 transport: rows and columns of one matrix of variables."""
    m = Milp("min")
    x = m.variables("x", (2, 3))
    m.block("supply", (1, x), upper=[3, 4])
    m.block("demand", (1, x.T), lower=[2, 2, 2], upper=[2, 2, 2])
    m.block("first route", (1, x[0, :1]), lower=1)
    m.objective(([[1, 5, 9], [2, 2, 2]], x))
    solution = m.solve(backend)
    assert solution.objective == pytest.approx(2 * 1 + 4 * 2)
    np.testing.assert_allclose(solution[x].sum(axis=0), [2, 2, 2], atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_free_program_and_late_variables(backend):
    m = Milp("max")
    x = m.variables("x", upper=4)
    m.block("x", (1, x[None]), upper=3)
    y = m.variables("y", (), lower=-1, upper=2)  # after the block
    m.objective((1, x), (1, y))
    assert m.solve(backend).objective == pytest.approx(5)
    assert m.solve(backend, without={"x"}).objective == pytest.approx(6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infeasible_names_the_blocks_that_clash(backend):
    m = Milp("min")
    x = m.variables("x", 2, upper=1, integer=True)
    m.block("at most one", (1, x), upper=1)
    m.block("at least two", (1, x), lower=2)
    m.block("harmless", (1, x[:, None]), upper=1)
    solution = m.solve(backend)
    assert (solution.status, solution.found) == ("infeasible", False)
    assert m.conflicts(backend) == ["at most one", "at least two"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unbounded(backend):
    m = Milp("max")
    x = m.variables("x", 1)
    m.block("floor", (1, x), lower=1)
    m.objective((1, x))
    assert m.solve(backend).status == "unbounded"


def test_mistakes_are_named():
    m, _ = knapsack([1], [1], 1)
    with pytest.raises(ValueError, match="'x' is taken"):
        m.variables("x")
    with pytest.raises(ValueError, match="'weight' is taken"):
        m.block("weight", (1, m.labels["x"]))
    with pytest.raises(ValueError, match="backend must be auto, highs or gurobi, got 'cplex'"):
        m.solve("cplex")


def test_without_gurobi_auto_is_highs_and_gurobi_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    m, _ = knapsack([2, 3, 4], [3, 4, 6], 6)
    assert m.solve("auto").objective == pytest.approx(9)
    with pytest.raises(ImportError, match=r"pip install 'ray-slo\[gurobi\]'"):
        m.solve("gurobi")


@needs_gurobi
def test_beyond_the_pip_licence_auto_is_highs_and_gurobi_says_so():
    count = 2001
    m, _ = knapsack([1] * count, [1] * count, 5)
    assert m.solve("auto").objective == pytest.approx(5)
    try:
        m.solve("gurobi")
    except ValueError as error:
        assert "2001 variables" in str(error)
    else:
        pytest.skip("this machine's Gurobi licence has no such limit")


@needs_gurobi
@given(data=st.data(), n=st.integers(1, 8))
@settings(max_examples=20)
def test_both_solvers_have_the_same_optimum(data, n):
    numbers = st.lists(st.integers(1, 20), min_size=n, max_size=n)
    m, _ = knapsack(data.draw(numbers), data.draw(numbers), data.draw(st.integers(0, 60)))
    assert m.solve("gurobi").objective == pytest.approx(m.solve("highs").objective)


def test_the_worked_example_of_the_module():
    assert doctest.testmod(milp).failed == 0


@pytest.mark.slow
def test_what_every_replica_imports_is_light():
    code = (
        "import sys; import ray_slo.serve.watch.log_writer, ray_slo.papers.groups.brain\n"
        "import ray_slo.serve.config.spec\n"
        "print(sorted({'scipy', 'pandas', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("sense", "sign"), [("min", 1.0), ("max", -1.0)])
def test_duals_are_what_one_more_on_the_right_side_changes(sense, sign):
    """At least 4 of x and w, at most 3 of y, and just 5 of z; w is fixed at 1."""
    m = Milp(sense)
    x, y, z = (m.variables(name, 1) for name in "xyz")
    w = m.variables("w", 1, upper=9, integer=True)
    m.block("least", (1, np.array([[x[0], w[0]]])), lower=4)
    m.block("most", (1, y[:, None]), upper=3)
    m.block("just", (1, z[:, None]), lower=5, upper=5)
    m.objective((sign * 2, x), (sign * -1, y), (sign * 3, z), (sign * 7, w))
    found = {name: worth.tolist() for name, worth in m.duals(w, np.array([1.0])).items()}
    assert found == {"least": [2 * sign], "most": [-sign], "just": [3 * sign]}
    m.block("never", (1, w[:, None]), upper=0)
    assert m.duals(w, np.array([1.0])) == {}
