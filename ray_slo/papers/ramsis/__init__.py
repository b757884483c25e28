"""RAMSIS: tables that say which variant takes how many of the queued requests. They are solved
ahead of time (RAMSIS §4–5).

    from ray_slo.papers.ramsis import Problem, solve
    problem = Problem(variants, slo_s=0.150, rate=1200, num_workers=60)
    table = solve(problem)                       # about half a second
    table.lookup(n=3, slack_s=0.080)             # ("resnet18", 3)
    table.expected_accuracy, table.violation_rate

Variants are (name, accuracy in percent, `LatencyProfile`). `solve_set` solves for so many loads
that the accuracies of adjacent tables differ by at most one percentage point.
"""

from ray_slo.papers.ramsis.arrivals import Arrivals, Empirical, Gamma, Poisson
from ray_slo.papers.ramsis.policy_set import solve_set
from ray_slo.papers.ramsis.problem import Problem, VariantProfile, pareto_front, profile_hash
from ray_slo.papers.ramsis.solver import solve
from ray_slo.papers.ramsis.table import DROP, PolicySet, Table

__all__ = [
    "DROP",
    "Arrivals",
    "Empirical",
    "Gamma",
    "Poisson",
    "PolicySet",
    "Problem",
    "Table",
    "VariantProfile",
    "pareto_front",
    "profile_hash",
    "solve",
    "solve_set",
]
