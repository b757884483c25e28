"""Solvers and rules of the papers, as published: pure functions and their problems.

* `ramsis`: tables that choose a variant and a batch size (RAMSIS).
* `kairos`: which instances of which types for a budget (Kairos).
* `herd`: groups of workers for streams of models (SHEPHERD).
* `partition`: sub-clusters of models (Symphony).
* `groups`: the brain of the planners `herd` and `partition`.
* `routing`: routes from task to task of a pipeline (Loki). Loki's plan is a setting of
  `ray_slo.planning.auto`.

They use the program and the vocabulary of `ray_slo.planning`, which knows nothing of them.
"""
