"""Mixed-integer linear programs that HiGHS or Gurobi solves.

Variables have a label and a shape. Constraints are in named blocks, one per equation of a paper:

    >>> m = Milp("max")
    >>> x = m.variables("x", 3, upper=1, integer=True)
    >>> m.block("weight", ([2, 3, 4], x), upper=6)  # one row
    >>> m.objective(([3, 4, 6], x))
    >>> solution = m.solve("highs")
    >>> solution.status, solution.objective, solution[x].round().tolist()
    ('optimal', 9.0, [1.0, 0.0, 1.0])

A term is (coefficients, variables). Its last axis is summed, and the axes before it are the rows of
the block. So `(1, x)` with x of shape (rows, n) is a sum over n in every row. `(1, x[:, None])` is
one variable per row.

SciPy's solver is imported only when a program is built. The import takes 0.4 s, and every replica
imports this module.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from scipy import sparse

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
Cells = tuple[Indices, Indices, Floats]
"""Row, column and value of the entries of a matrix. Entries at the same place are added."""

Backend = Literal["auto", "highs", "gurobi"]
Status = Literal["optimal", "feasible", "infeasible", "unbounded", "unknown"]

# The licence in gurobipy's wheel allows this many variables, and this many constraints.
GUROBI_PIP_LIMIT = 2000


@dataclass(frozen=True)
class Solution:
    """The result of a solver.

    If `status` is "feasible", the time limit ended the search, and a better solution may exist.
    `bound` is a bound on its objective. If it is "unknown", the time limit ended the search before
    there was a solution. Without a solution, `values` is empty.
    """

    status: Status
    objective: float
    bound: float
    values: Floats

    @property
    def found(self) -> bool:
        return self.values.size > 0

    def __getitem__(self, variables: Indices) -> Floats:
        return self.values[variables]


class Milp:
    """A program: minimise or maximise c·x subject to named blocks of rows lower ≤ A·x ≤ upper."""

    def __init__(self, sense: Literal["min", "max"] = "min") -> None:
        self.sense = sense
        self.labels: dict[str, Indices] = {}
        self.blocks: dict[str, tuple[Cells, Floats, Floats]] = {}
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._integer: list[NDArray[np.bool_]] = []
        self._objective: list[tuple[Floats, Indices]] = []
        self.size = 0

    def variables(
        self,
        label: str,
        shape: int | tuple[int, ...] = (),
        lower: ArrayLike = 0.0,
        upper: ArrayLike = math.inf,
        integer: bool = False,
    ) -> Indices:
        """Add variables. Return their indices in the given shape. Bounds are broadcast to it.

        Raises:
            ValueError: there are variables with this label.
        """
        if label in self.labels:
            raise ValueError(f"variables: {label!r} is taken")
        count = int(np.prod(shape, dtype=int))
        indices = np.arange(self.size, self.size + count).reshape(shape)
        for store, value in ((self._lower, lower), (self._upper, upper)):
            store.append(np.broadcast_to(np.asarray(value, float), indices.shape).ravel())
        self._integer.append(np.full(count, integer))
        self.size += count
        self.labels[label] = indices
        return indices

    def block(
        self,
        name: str,
        *terms: tuple[ArrayLike, Indices],
        lower: ArrayLike = -math.inf,
        upper: ArrayLike = math.inf,
    ) -> None:
        """Add rows lower ≤ Σ terms ≤ upper under one name.

        Raises:
            ValueError: there is a block with this name.
        """
        if name in self.blocks:
            raise ValueError(f"block: {name!r} is taken")
        shaped = [(np.broadcast_to(c, v.shape), v) for c, v in terms]
        rows_shape = np.broadcast_shapes(*(v.shape[:-1] for _, v in shaped))
        rows = int(np.prod(rows_shape, dtype=int))
        row, column, value = [], [], []
        for c, v in shaped:
            full = (*rows_shape, v.shape[-1])
            row.append(np.repeat(np.arange(rows), v.shape[-1]))
            column.append(np.broadcast_to(v, full).ravel())
            value.append(np.broadcast_to(c, full).ravel())
        cells = np.concatenate(row), np.concatenate(column), np.concatenate(value).astype(float)
        low, high = (
            np.broadcast_to(np.asarray(limit, float), rows_shape).ravel()
            for limit in (lower, upper)
        )
        self.blocks[name] = (cells, low, high)

    def objective(self, *terms: tuple[ArrayLike, Indices]) -> None:
        self._objective = [
            (np.broadcast_to(np.asarray(c, float), v.shape).ravel(), v.ravel()) for c, v in terms
        ]

    def solve(
        self,
        backend: Backend = "auto",
        time_limit_s: float = math.inf,
        relative_gap: float = 1e-9,
        seed: int = 0,
        without: Collection[str] = (),
        heuristics: bool = True,
    ) -> Solution:
        """Solve the program without the blocks named in `without`.

        Args:
            backend: "highs", "gurobi", or "auto". "auto" is Gurobi if it is installed and its
                licence covers a program of this size, otherwise HiGHS.
            time_limit_s: largest time of the search, in seconds.
            seed: seed of Gurobi. HiGHS has a fixed seed in SciPy.
            heuristics: whether HiGHS searches for first solutions. In a small program this takes
                most of the time, and does not change the optimum.

        Raises:
            ImportError: backend "gurobi" without gurobipy.
            ValueError: an unknown backend, or "gurobi" with a licence that does not cover the size.
        """
        if backend not in ("auto", "highs", "gurobi"):
            raise ValueError(f"backend must be auto, highs or gurobi, got {backend!r}")
        program = self._program(without)
        if backend != "highs":
            try:
                return _gurobi(program, time_limit_s, relative_gap, seed)
            except (ImportError, ValueError):
                if backend == "gurobi":
                    raise
        return _highs(program, time_limit_s, relative_gap, heuristics)

    def duals(self, fixed: Indices, values: Floats) -> dict[str, Floats]:
        """Return the dual values by block: the change of the objective per unit of the right side
        of each row.

        They belong to the linear program in which the variables `fixed` have `values` and no other
        variables are integers. The result is empty if this program has no optimum.
        """
        from scipy import optimize, sparse

        solve: Any = optimize.linprog  # its type hints do not allow sparse matrices
        program = self._program(())
        lower, upper = program.lower.copy(), program.upper.copy()
        lower[fixed] = upper[fixed] = values
        equal = program.row_lower == program.row_upper
        high = ~equal & np.isfinite(program.row_upper)
        low = ~equal & np.isfinite(program.row_lower)
        sign = -1.0 if program.maximise else 1.0
        found = solve(
            sign * program.cost,
            A_ub=sparse.vstack([program.matrix[high], -program.matrix[low]]),
            b_ub=np.concatenate([program.row_upper[high], -program.row_lower[low]]),
            A_eq=program.matrix[equal],
            b_eq=program.row_lower[equal],
            bounds=np.stack([lower, upper], axis=1),
            method="highs",
        )
        if found.status != 0:
            return {}
        worth = np.zeros(len(equal))
        worth[equal] = found.eqlin.marginals
        worth[high] += found.ineqlin.marginals[: high.sum()]
        worth[low] -= found.ineqlin.marginals[high.sum() :]
        ends = np.cumsum([len(rows) for _, rows, _ in self.blocks.values()])
        parts = np.split(sign * worth, ends[:-1]) if len(ends) else []
        return dict(zip(self.blocks, parts, strict=True))

    def conflicts(
        self,
        backend: Backend = "auto",
        time_limit_s: float = math.inf,
        among: Collection[str] | None = None,
    ) -> list[str]:
        """Return the blocks that cause an infeasible program: without one of them, the program is
        feasible. Only blocks in `among` are tried. `time_limit_s` is for each attempt, in
        seconds."""
        return [
            name
            for name in self.blocks
            if (among is None or name in among)
            and self.solve(backend, time_limit_s, relative_gap=1.0, without={name}).status
            not in ("infeasible", "unknown")
        ]

    def _program(self, without: Collection[str]) -> _Program:
        from scipy import sparse

        cost = np.zeros(self.size)
        for c, v in self._objective:
            np.add.at(cost, v, c)
        kept = [block for name, block in self.blocks.items() if name not in without]
        firsts = np.cumsum([0, *(len(lower) for _, lower, _ in kept)])
        none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), _NONE
        rows, columns, values = (
            np.concatenate(parts)
            for parts in zip(
                none,
                *(
                    (row + first, column, value)
                    for ((row, column, value), _, _), first in zip(kept, firsts, strict=False)
                ),
                strict=True,
            )
        )
        cells = values != 0
        matrix = sparse.csr_array(
            (values[cells], (rows[cells], columns[cells])), shape=(int(firsts[-1]), self.size)
        )
        return _Program(
            maximise=self.sense == "max",
            cost=cost,
            matrix=matrix,
            row_lower=np.concatenate([lower for _, lower, _ in kept] or [np.zeros(0)]),
            row_upper=np.concatenate([upper for _, _, upper in kept] or [np.zeros(0)]),
            lower=np.concatenate(self._lower),
            upper=np.concatenate(self._upper),
            integer=np.concatenate(self._integer),
        )


@dataclass(frozen=True)
class _Program:
    maximise: bool
    cost: Floats
    matrix: sparse.csr_array
    row_lower: Floats
    row_upper: Floats
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]


_NONE: Floats = np.zeros(0)


_HEURISTICS = ("feasibility_jump", "rins", "rens", "root_reduced_cost")


def _highs(
    program: _Program, time_limit_s: float, relative_gap: float, heuristics: bool
) -> Solution:
    from scipy.optimize import Bounds, LinearConstraint, milp

    sign = -1.0 if program.maximise else 1.0
    options: Any = {"mip_rel_gap": relative_gap}
    if math.isfinite(time_limit_s):
        options["time_limit"] = time_limit_s
    if not heuristics:
        options |= {f"mip_heuristic_run_{name}": False for name in _HEURISTICS}
    with warnings.catch_warnings():  # SciPy warns about options of HiGHS that it does not know
        warnings.simplefilter("ignore")
        result: Any = milp(
            sign * program.cost,
            integrality=program.integer.astype(int),
            bounds=Bounds(program.lower, program.upper),
            constraints=LinearConstraint(program.matrix, program.row_lower, program.row_upper)
            if program.matrix.shape[0]
            else (),
            options=options,
        )
    if result.x is None:
        statuses: dict[int, Status] = {2: "infeasible", 3: "unbounded"}
        bound = getattr(result, "mip_dual_bound", None)
        known = sign * float(bound) if bound is not None else -sign * math.inf
        return Solution(statuses.get(result.status, "unknown"), math.nan, known, _NONE)
    bound = getattr(result, "mip_dual_bound", None)
    objective = sign * float(result.fun)
    status: Status = "optimal" if result.status == 0 else "feasible"
    return Solution(
        status, objective, objective if bound is None else sign * float(bound), result.x
    )


def _gurobi(
    program: _Program,
    time_limit_s: float,
    relative_gap: float,
    seed: int,
) -> Solution:  # pragma: no cover - where gurobipy is installed
    try:
        gp: Any = import_module("gurobipy")
    except ImportError as error:
        raise ImportError(
            "backend 'gurobi' needs gurobipy: pip install 'ray-slo[gurobi]'"
        ) from error
    sign = -1.0 if program.maximise else 1.0
    try:
        with gp.Env(empty=True) as env:
            env.setParam("OutputFlag", 0)
            env.start()
            with gp.Model(env=env) as model:
                x = _load(model, program)
                model.Params.MIPGap, model.Params.Seed = relative_gap, seed
                if math.isfinite(time_limit_s):
                    model.Params.TimeLimit = time_limit_s
                model.optimize()
                return _solution(gp, model, x, sign)
    except gp.GurobiError as error:
        rows_, columns = program.matrix.shape
        raise ValueError(
            f"Gurobi does not take this model ({columns} variables, {rows_} rows; its pip licence "
            f"takes {GUROBI_PIP_LIMIT} of each): {error}"
        ) from error


def _load(model: Any, program: _Program) -> Any:  # pragma: no cover
    """Return Gurobi's model of a program, and its variables."""
    from scipy import sparse

    sign = -1.0 if program.maximise else 1.0
    model.Params.DualReductions = 0  # otherwise Gurobi may not tell infeasible from unbounded
    kinds = np.where(program.integer, "I", "C")
    x = model.addMVar(program.cost.size, program.lower, program.upper, sign * program.cost, kinds)
    equal = program.row_lower == program.row_upper
    for rows, sense, side in (
        (equal, "=", program.row_lower),
        (~equal & np.isfinite(program.row_lower), ">", program.row_lower),
        (~equal & np.isfinite(program.row_upper), "<", program.row_upper),
    ):
        if rows.any():
            matrix = sparse.csr_matrix(program.matrix[np.flatnonzero(rows)])
            model.addMConstr(matrix, x, sense, side[rows])
    return x


def _solution(gp: Any, model: Any, x: Any, sign: float) -> Solution:  # pragma: no cover
    code = model.Status
    if model.SolCount == 0:
        statuses: dict[int, Status] = {
            gp.GRB.INFEASIBLE: "infeasible",
            gp.GRB.UNBOUNDED: "unbounded",
        }
        return Solution(statuses.get(code, "unknown"), math.nan, -sign * math.inf, _NONE)
    if code == gp.GRB.UNBOUNDED:
        return Solution("unbounded", math.nan, -sign * math.inf, _NONE)
    bound = model.ObjBound if model.IsMIP else model.ObjVal
    return Solution(
        "optimal" if code == gp.GRB.OPTIMAL else "feasible",
        sign * model.ObjVal,
        sign * bound,
        np.asarray(x.X),
    )
