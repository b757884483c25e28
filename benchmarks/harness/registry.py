"""Every program by name, with what it answers. A module has `run(quick, seed) -> list[Row]` and may
have its own `plot(rows, directory) -> list[Path]`."""

from __future__ import annotations


def is_live(name: str) -> bool:
    """Whether a program starts Ray and takes its time."""
    return name.startswith("live-") or name == "shipped"


# name: (module, source, what it shows)
PROGRAMS: dict[str, tuple[str, str, str]] = {
    "simulator-throughput": (
        "benchmarks.costs.simulator_throughput",
        "ray-slo",
        "simulated requests per second of CPU time on one core, policy included",
    ),
    "scheduler-throughput": (
        "benchmarks.costs.scheduler_throughput",
        "ray-slo",
        "requests per second of CPU time that the scheduling core alone decides on",
    ),
    "deferred-objectives": (
        "benchmarks.own.deferred_objectives",
        "Symphony §3.3, §5.3, Table 2",
        "objectives and gathering rules of `deferred` against eager and the staggered bound",
    ),
    "flat-top": (
        "benchmarks.own.flat_top",
        "Symphony §3.3, ray-slo",
        "the drop-head target by load against the best fixed one, at the edge and in overload",
    ),
    "responsive-grid": (
        "benchmarks.own.responsive_grid",
        "Symphony Table 1",
        "`responsive` against consolidate's goodput and eager's latency, over the grid",
    ),
    "symphony-table2": (
        "benchmarks.symphony.table2",
        "Symphony Table 2, Figure 1",
        "one model on 8 GPUs: goodput and batch sizes of every system, and overload",
    ),
    "symphony-fig1": (
        "benchmarks.symphony.fig1",
        "Symphony Figure 1",
        "batch sizes of every system at its goodput",
    ),
    "symphony-fig2": (
        "benchmarks.symphony.fig2",
        "Symphony Figure 2",
        "goodput and busy GPUs against the offered load, every system",
    ),
    "symphony-fig16": (
        "benchmarks.symphony.fig16",
        "Symphony §4.4, Appendix A, Figure 16",
        "how even sub-clusters are in rate and memory, against the random solver",
    ),
    "symphony-fig6": (
        "benchmarks.symphony.fig6",
        "Symphony Figure 6",
        "deferred beside eager over the batching effect, and beside timeouts",
    ),
    "symphony-fig9": (
        "benchmarks.symphony.fig9",
        "Symphony Figure 9",
        "the model zoos on 64 emulated GPUs, every system",
    ),
    "symphony-fig10": (
        "benchmarks.symphony.fig10",
        "Symphony Figure 10",
        "GPUs needed for 15,000 requests per second, every system",
    ),
    "symphony-fig11": (
        "benchmarks.symphony.fig11",
        "Symphony Figure 11",
        "goodput over SLO, popularity and burstiness, every system",
    ),
    "symphony-fig12": (
        "benchmarks.symphony.fig12",
        "Symphony Figure 12",
        "queueing delay of every system at its goodput",
    ),
    "symphony-fig13": (
        "benchmarks.symphony.fig13",
        "Symphony Figure 13 (right)",
        "goodput against the number of GPUs",
    ),
    "symphony-fig14": (
        "benchmarks.symphony.fig14",
        "Symphony §5.6, Appendix B, Figure 14",
        "goodput against the latency of the network and its tail",
    ),
    "symphony-fig15": (
        "benchmarks.symphony.fig15",
        "Symphony §3.5, §5.7, Figure 15",
        "a changing workload: busy GPUs, advice to scale, bad requests",
    ),
    "symphony-fig7": (
        "benchmarks.symphony.fig7",
        "Symphony §3.4, Table 1, Figure 7",
        "deferred over eager on a sample of the synthetic workloads",
    ),
    "symphony-fig5": (
        "benchmarks.symphony.fig5",
        "Symphony §3.3, Figures 4 and 5",
        "the worked example: staggered execution, and three missing requests",
    ),
    "shepherd-fig7": (
        "benchmarks.shepherd.fig7",
        "SHEPHERD §7.1, Figure 7",
        "goodput and busy GPUs against the offered load, with Clockwork and Nexus",
    ),
    "shepherd-fig8": (
        "benchmarks.shepherd.fig8",
        "SHEPHERD §7.1, Figure 8",
        "latency distributions at low and at high load, with Clockwork and Nexus",
    ),
    "shepherd-fig9": (
        "benchmarks.shepherd.fig9",
        "SHEPHERD §7.1, Figure 9",
        "goodput against the SLO, with Clockwork and Nexus",
    ),
    "shepherd-fig10": (
        "benchmarks.shepherd.fig10",
        "SHEPHERD §7.1, Figure 10",
        "goodput against the number of workers, where schedulers have a speed",
    ),
    "shepherd-fig11": (
        "benchmarks.shepherd.fig11",
        "SHEPHERD §7.2, Figure 11",
        "large batches first and preemption on two streams; HERD's limit of a group",
    ),
    "shepherd-fig12": (
        "benchmarks.shepherd.fig12",
        "SHEPHERD §6, §7.3, Figure 12",
        "preemption delay and slowdown over the number of exit points, torch on this CPU",
    ),
    "gpu-preemption": (
        "benchmarks.shepherd.gpu_preemption",
        "SHEPHERD Table 4, Figure 12, §7.2",
        "profiles, exit points and FLEX on a real GPU (skipped where there is none)",
    ),
    "shepherd-fig2": (
        "benchmarks.shepherd.fig2",
        "SHEPHERD §2.2, §3.1, Figures 2 and 5",
        "variation of the requests in a window, of streams and of groups of streams",
    ),
    "shepherd-table5": (
        "benchmarks.shepherd.table5",
        "SHEPHERD §4, Table 5",
        "time of a HERD plan up to a million streams, its gap, and the ILP by each solver",
    ),
    "ramsis-fig5": (
        "benchmarks.ramsis.fig5",
        "RAMSIS §7.1, Figure 5, Table 3",
        "accuracy against workers under the Twitter trace, with Jellyfish+ and ModelSwitching",
    ),
    "ramsis-fig6": (
        "benchmarks.ramsis.fig6",
        "RAMSIS §7.2, Figure 6, Table 4",
        "accuracy against constant load, with Jellyfish+, ModelSwitching and greedy",
    ),
    "ramsis-fig7": (
        "benchmarks.ramsis.fig7",
        "RAMSIS §7.3.1, Figure 7",
        "what tables promise, and what comes of it",
    ),
    "ramsis-fig8": (
        "benchmarks.ramsis.fig8",
        "RAMSIS §7.3.2, Figure 8",
        "9 models against 60, with ModelSwitching",
    ),
    "ramsis-fig10": (
        "benchmarks.ramsis.fig10",
        "RAMSIS Appendix C, Figure 10",
        "how finely slack is told apart",
    ),
    "ramsis-fig11": (
        "benchmarks.ramsis.fig11",
        "RAMSIS Appendix D, Figure 11",
        "all that waits in one batch, or any part of it",
    ),
    "ramsis-fig12": (
        "benchmarks.ramsis.fig12",
        "RAMSIS Appendix E, Figure 12",
        "3 models instead of 9, with Jellyfish+",
    ),
    "ramsis-price": (
        "benchmarks.ramsis.price",
        "ray-slo, RAMSIS §7.2",
        "one shared queue with prices against per-worker queues with tables, and the fluid limit",
    ),
    "ramsis-robustness": (
        "benchmarks.ramsis.robustness",
        "ray-slo, RAMSIS §7.2",
        "price and RAMSIS where latencies vary, profiles err or arrivals come in bursts",
    ),
    "loki-solver": (
        "benchmarks.loki.solver",
        "Loki §4, §6.5, Figure 1",
        "time of a plan and of routing tables; where hardware and accuracy scaling end",
    ),
    "loki-fig1": (
        "benchmarks.loki.fig1",
        "Loki §1, Figure 1",
        "accuracy and servers as demand grows: hardware scaling, accuracy scaling, shedding",
    ),
    "loki-fig5": (
        "benchmarks.loki.fig5",
        "Loki §6.2, Figure 5",
        "a day of traffic analysis end to end, with InferLine and Proteus",
    ),
    "loki-fig6": (
        "benchmarks.loki.fig6",
        "Loki §6.2, Figure 6",
        "a day of the social media pipeline end to end, with InferLine and Proteus",
    ),
    "loki-fig7": (
        "benchmarks.loki.fig7",
        "Loki §6.3, Figure 7",
        "what becomes of late requests: the paper's four rules, and ours",
    ),
    "loki-fig8": (
        "benchmarks.loki.fig8",
        "Loki §6.4, Figure 8",
        "accuracy and violations under SLOs from 100 to 400 ms",
    ),
    "loki-restless": (
        "benchmarks.loki.restless",
        "ray-slo, Loki §4.2",
        "how often plans change at a few requests per second, by average and swap cost",
    ),
    "kairos-matching": (
        "benchmarks.kairos.matching",
        "Kairos §5.1, §6",
        "time of a matching, scipy alone and end to end in the policy",
    ),
    "kairos-bounds": (
        "benchmarks.kairos.bounds",
        "Kairos §5.2",
        "time to score all configurations; Equation 15 beside dual bounds",
    ),
    "kairos-fig8": (
        "benchmarks.kairos.fig8",
        "Kairos Figure 8",
        "throughput of the chosen pool over the best homogeneous one, five models",
    ),
    "kairos-fig9": (
        "benchmarks.kairos.fig9",
        "Kairos Figure 9",
        "every scheme at its best configuration, and ORACLE",
    ),
    "kairos-fig1": (
        "benchmarks.kairos.fig1",
        "Kairos Figure 1",
        "mixed pools beside the best homogeneous one, under first come, first served",
    ),
    "kairos-fig2": (
        "benchmarks.kairos.fig2",
        "Kairos Figure 2",
        "exploring configurations by simulated annealing: how many are worse than homogeneous",
    ),
    "kairos-fig3": (
        "benchmarks.kairos.fig3",
        "Kairos Figure 3",
        "four pools under every query distribution, and ORACLE",
    ),
    "kairos-fig13": (
        "benchmarks.kairos.fig13",
        "Kairos Figure 13",
        "upper bounds beside the throughput reached, of the highest bounds",
    ),
    "kairos-fig14": (
        "benchmarks.kairos.fig14",
        "Kairos Figure 14",
        "the same pools under every query distribution",
    ),
    "kairos-fig15": (
        "benchmarks.kairos.fig15",
        "Kairos Figure 15",
        "four times the budget; SLOs 20 % longer",
    ),
    "kairos-fig16": (
        "benchmarks.kairos.fig16",
        "Kairos Figure 16",
        "Gaussian sizes; noisy latencies, learned online",
    ),
    "kairos-fig10": (
        "benchmarks.kairos.fig10",
        "Kairos Figure 10",
        "evaluations that every scheme needs to find its best configuration",
    ),
    "kairos-fig11": (
        "benchmarks.kairos.fig11",
        "Kairos Figure 11",
        "Kairos+ beside random, genetic, annealing and Bayesian search",
    ),
    "kairos-fig12": (
        "benchmarks.kairos.fig12",
        "Kairos Figure 12",
        "the size distribution changes: throughput over the first 20 evaluations",
    ),
    "kairos-batching": (
        "benchmarks.kairos.batching",
        "ray-slo",
        "beyond Kairos: batches across requests inside the matching",
    ),
    "kairos-spot": (
        "benchmarks.kairos.spot",
        "ray-slo",
        "beyond Kairos: spot beside on-demand instances, with interruptions",
    ),
    "kairos-accuracy": (
        "benchmarks.kairos.accuracy",
        "ray-slo",
        "beyond Kairos: hardware and variants in one plan, beside hardware first",
    ),
    "preemption-gain": (
        "benchmarks.own.preemption_gain",
        "ray-slo",
        "deferred batching with preemption where it gains, beside `deferred` and `flex`",
    ),
    "ramsis-table2": (
        "benchmarks.ramsis.table2",
        "RAMSIS Table 2",
        "CPU time to solve one table, by discretisation, batching and number of models",
    ),
    "live-preemption": (
        "benchmarks.live.preemption",
        "SHEPHERD §7.2, Figure 11",
        "live on Ray Serve: two streams on one worker, FLEX with and without preemption",
    ),
    "live-groups": (
        "benchmarks.live.groups",
        "ray-slo, SHEPHERD §4",
        "live on Ray Serve: a model moved between two serving groups under load",
    ),
    "live-heterogeneous": (
        "benchmarks.live.heterogeneous",
        "Kairos §8, live",
        "live on Ray Serve: queries of unlike sizes on unlike workers, Kairos, FCFS, a new budget",
    ),
    "live-replay": (
        "benchmarks.live.replay",
        "ray-slo",
        "live on Ray Serve, recorded: the same decisions again, and what the other policy would do",
    ),
    "decision-log-cost": (
        "benchmarks.costs.decision_log_cost",
        "ray-slo",
        "what writing the decision log costs per decision, on the event loop and in all",
    ),
    "tracing-cost": (
        "benchmarks.costs.tracing_cost",
        "ray-slo",
        "what OpenTelemetry spans cost per request: off, not sampled, sampled",
    ),
    "live-variants": (
        "benchmarks.live.variants",
        "ray-slo, RAMSIS §7",
        "live on Ray Serve, real images: price, ramsis, every network alone, and as simulated",
    ),
    "live-pipeline": (
        "benchmarks.live.pipeline",
        "Loki Figure 5",
        "live on Ray Serve, real pages: demand goes up and down, workers and variants follow",
    ),
    "shipped": (
        "benchmarks.live.shipped",
        "ray-slo",
        "live on Ray Serve: every file of configs/ that serves: start, answers, refusals, memory",
    ),
    "live-soak": (
        "benchmarks.live.soak",
        "ray-slo",
        "live on Ray Serve: ten minutes at 110 % of capacity with callers that leave; what grows",
    ),
    "live-chaos": (
        "benchmarks.live.chaos",
        "ray-slo",
        "live on Ray Serve: faults under load, and what callers see: lost, duplicated, recovery",
    ),
    "live-attack": (
        "benchmarks.live.attack",
        "ray-slo",
        "live on Ray Serve: attacks of clients and models, and what good clients see beside them",
    ),
}
