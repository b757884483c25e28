import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from benchmarks import __main__ as program
from benchmarks.__main__ import SKIPPED, in_words, main
from benchmarks.harness import plots
from benchmarks.harness.registry import PROGRAMS
from benchmarks.own import composition
from ray_slo.simulation import simulate_application


def test_lists_every_program(capsys):
    main([])
    listed = capsys.readouterr().out
    assert all(name in listed for name in PROGRAMS)


@pytest.mark.parametrize("args", [["fig99"], ["symphony-fig5", "--seed", "-1"]])
def test_mistakes_end_with_code_2(args, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert args[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, option", [("live-ceiling", "--policy"), ("policy-grid", "--cell"), ("all", "--but")]
)
def test_help_has_the_programs_own_options(name, option, capsys):
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert exit.value.code == 0
    assert option in shown and "--save" in shown


SHARE = 0.15
"""Of the simulated time of `--quick`."""


def briefly(problem, workloads, *, duration_s=None, **kwargs):
    """`simulate_application` for a fifth of the time."""
    if duration_s is not None:
        duration_s *= 0.2
    return simulate_application(problem, workloads, duration_s=duration_s, **kwargs)


# Names in programs whose quick runs are longer than a look at their code needs.
SHORTER = {
    "costs.scheduler_throughput": {"SIZES": ((1, 8), (10, 20)), "WARMUP_S": 0.05},
    "loki.fig5": {"STEP_S": 1.5},
    "loki.fig6": {"QUICK_STEP_S": 1.0},
    "loki.fig7": {"STEP_S": 1.5},
    "loki.fig8": {"STEP_S": 1.5},
    "own.autoscale_day": {
        **{"STEP_S": 6.0, "INTERVAL_S": 3.0, "PEAK_WORKERS": 4, "MOST": 6},
        "simulate_application": briefly,
    },
    "own.composition": {"QUICK": composition.QUICK[2:], "simulate_application": briefly},
    "own.mutants": {"passes": lambda tests, root: True},
    "own.policy_grid": {"REQUESTS": 800},
    "own.shared_variants": {"SHAPES": {"Poisson": 1.0}},
    "own.split": {"simulate_application": briefly},
    "shepherd.fig9": {"RATE": 1000},
    "shepherd.fig10": {"PER_WORKER": 100.0, "PER_SCHEDULER": 15_000.0},
    "symphony.fig9": {"GPUS": 24},
    "symphony.fig10": {"RATE": 4000},
    "symphony.fig15": {"QUICK_GPUS": 24},
}


def shorten():
    """In this process, searches for a goodput end as soon as they have it between two rates, and
    runs are shorter than even `--quick` has them: what is printed is not looked at here. Bars are
    plotted of two metrics, and no plot is laid out.

    To be called before a program is imported.
    """
    from ray_slo import simulation
    from ray_slo.simulation import search, simulator

    def simulate(policy, cluster, workload, *, duration_s=None, warmup_s=0.0, **kwargs):
        if duration_s is None and warmup_s:
            duration_s = workload.length_s
        if duration_s is not None:
            duration_s *= SHARE
        kwargs |= {"duration_s": duration_s, "warmup_s": SHARE * warmup_s}
        return simulator.simulate(policy, cluster, workload, **kwargs)

    def goodput_search(*args, growth=2.0, tolerance=0.01, **kwargs):
        return search.goodput_search(*args, growth=max(1.3, growth), tolerance=0.99, **kwargs)

    def two_bars(rows, directory):
        metrics = list(dict.fromkeys(row.metric for row in rows))[:2]
        return plots.plot_bars([row for row in rows if row.metric in metrics], directory)

    def saved(figure, directory, title, save=plots.saved):
        figure.set_layout_engine("none")
        return save(figure, directory, title)

    search.simulate = simulation.simulate = simulate
    simulation.goodput_search = goodput_search
    program.plot_bars, plots.saved = two_bars, saved
    for name, constants in SHORTER.items():
        module = importlib.import_module(f"benchmarks.{name}")
        for constant, value in constants.items():
            assert hasattr(module, constant)
            setattr(module, constant, value)


def front_door(args):
    """Exit code, stdout and stderr of `python -m benchmarks ARGS`, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as end:
            code = end.code
        except Exception:
            code = 1
            traceback.print_exc()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        code = "it started Ray, and is no live program"
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Every program that a selected test asks for, a core each; by name, as they finish.

    Processes take one program after the other: half a program's time would be its imports.
    """
    directory = tmp_path_factory.mktemp("plots")
    asked = dict.fromkeys(
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "runs" in getattr(item, "fixturenames", ())
    )
    spawn = get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, spawn, initializer=shorten) as pool:
        futures = {}
        for name in asked:
            plots = directory / name
            plots.mkdir()
            args = [name, "--quick", "--json", "-", "--plot", str(plots)]
            futures[name] = pool.submit(front_door, args), plots
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
def test_from_a_shell():
    command = [sys.executable, "-m", "benchmarks", "symphony-fig5", "--quick", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "symphony-fig5"


# Live programs start a Ray of their own and load it for a minute: tests/live covers what they use.
SIMULATED = [name for name, program in PROGRAMS.items() if not program.live]


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.slow
@pytest.mark.timeout(600)  # a busy machine may give them little of its time
def test_every_program_runs_quickly_and_prints_its_rows(name, runs):
    future, plots = runs[name]
    code, out, err = future.result()
    if code == SKIPPED:
        pytest.skip(err.strip())
    assert code == 0, (code, err)
    body = json.loads(out)
    said = {"name", "source", "quick", "seed", "options", "rows", "cpu_s", "wall_s"}
    assert set(body) == said
    assert body["wall_s"] > 0
    assert (body["name"], body["quick"], body["seed"]) == (name, True, 0)
    assert body["rows"]
    for row in body["rows"]:
        assert set(row) == {"case", "metric", "unit", "ours", "paper", "peers"}
    assert any(plots.glob("*.png"))
    assert all(part in err for part in body["rows"][0]["case"].split(" · "))


def test_options_of_a_program_are_written_down():
    given = {"mode": "haproxy", "systems": ["plain", "batch"], "again_all": True, "jobs": 2}
    said = "--mode haproxy --systems plain,batch --again-all --jobs 2"
    assert in_words(given) == said
    assert in_words({}) == ""
