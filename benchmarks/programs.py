"""Every program by name, with what it answers. A module has `run(quick, seed) -> list[Row]` and may
have its own `plot(rows, directory) -> list[Path]`."""

from __future__ import annotations

# name: (module, source, what it shows)
PROGRAMS: dict[str, tuple[str, str, str]] = {
    "simulator-throughput": (
        "benchmarks.simulator_throughput",
        "ray-slo",
        "simulated requests per second of CPU time on one core, policy included",
    ),
    "deferred-objectives": (
        "benchmarks.deferred_objectives",
        "Symphony §3.3, §5.3, Table 2",
        "objectives and gathering rules of `deferred` against eager and the staggered bound",
    ),
    "symphony-table2": (
        "benchmarks.symphony_table2",
        "Symphony Table 2, Figure 1",
        "one model on 8 GPUs: goodput and batch sizes of every system, and overload",
    ),
    "symphony-fig5": (
        "benchmarks.symphony_fig5",
        "Symphony §3.3, Figures 4 and 5",
        "the worked example: staggered execution, and three missing requests",
    ),
    "shepherd-fig11": (
        "benchmarks.shepherd_fig11",
        "SHEPHERD §7.2, Figure 11(a)",
        "large batches first and preemption on two streams, against Clockwork",
    ),
}
