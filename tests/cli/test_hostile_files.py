"""Files of arrays and of bench runs with any content: one message with the file, or an answer."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ray_slo.cli import app
from ray_slo.core import Cluster, LatencyProfile, Model, Variant, documents
from ray_slo.load.workload import Recorded
from ray_slo.papers.ramsis import Problem, solve_set
from ray_slo.policies import make_policy
from ray_slo.simulation import simulate
from ray_slo.simulation.workloads import Workload

PROFILE = LatencyProfile.linear(0.001, 0.01, 4)
CLUSTER = Cluster.uniform([Model("m", 0.1, (Variant("v", {"default": PROFILE}),))], 2)
WRONG = st.sampled_from(
    [
        *(None, -1, 0, 2, 2**40, 10**400, math.nan, math.inf, -math.inf, 1e300, 1e-300, True),
        *("", "\0", "v", "x" * 3000, [], [None], {}, {"a": 1}, [[0.5, 1]]),
    ]
)
NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e12, 1e300, -(2.0**15)])
CELLS = st.sampled_from(
    ["", "nan", "inf", "-inf", "1e300", "x", "-1", "\0", "True", "é", '"', "ok", "9" * 400]
)
SHOWN = {"report": ("report", "{}", "--out", "{}.html"), "tables": ("policy", "show", "{}")}
SHOWN["stream"] = ("bench", "http://127.0.0.1:9/", "--replay", "{}", "--timeout-s", "0.01")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of arrays of each kind, and the folder of a bench run."""
    folder = tmp_path_factory.mktemp("files")
    run = simulate(make_policy("eager"), CLUSTER, Workload.poisson(200), duration_s=0.2)
    run.save(folder / "report.npz")
    problem = Problem((("v", 70.0, PROFILE),), slo_s=0.15, rate=20, num_workers=1, num_slacks=6)
    solve_set(problem, rates=[10.0, 20.0]).save(folder / "tables.npz")
    Recorded(np.arange(9) * 1e-3, np.zeros(9, int), 1.0, 0.1).save(folder / "stream.npz")
    frame = run.requests[["arrival_s", "latency_s"]].fillna(1.0)
    table = frame.rename(columns={"arrival_s": "intended_s"})
    table = table.assign(sent_s=table["intended_s"], status="ok", measured=True, model="m")
    table = table.assign(variant="v", accuracy=75.0, batch_size=4.0, queue_s=0.01, error=None)
    (folder / "bench").mkdir()
    table.to_csv(folder / "bench" / "requests.csv", index=False)
    known = dict.fromkeys(("offered_rate", "goodput", "bad_rate", "p50_ms", "p99_ms"), 1.0)
    rest = {"mean_batch": 4.0, "accuracy": None, "warnings": ["late"], "requests": 9}
    (folder / "bench" / "summary.json").write_text(json.dumps({"slo_ms": 99.0, **known, **rest}))
    return folder


def told(words, path):
    """What a command says of a file."""
    shown = CliRunner().invoke(app, [word.format(path) for word in words])
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    text = shown.output.replace("\n", "")
    assert shown.exit_code in (0, 1, 2)
    assert shown.exit_code != 2 or str(path) in text or "nothing answers" in text, text
    return shown.exit_code, text


@st.composite
def damaged_json(draw, value):
    """The value, with parts of it lost, doubled or replaced."""
    match draw(st.integers(0, 30)):
        case 0:
            return draw(WRONG)
        case 1 if isinstance(value, dict) and value:
            lost = draw(st.sampled_from(sorted(value)))
            return {k: v for k, v in value.items() if k != lost}
        case 2 if isinstance(value, list):
            return value[1:] + value[1:]
    if isinstance(value, dict):
        return {k: draw(damaged_json(v)) for k, v in value.items()}
    if isinstance(value, list):
        return [draw(damaged_json(v)) for v in value]
    return value


@st.composite
def damaged_text(draw, value):
    text = json.dumps(draw(damaged_json(value)))
    how = draw(st.integers(0, 20))
    return "[" * 5000 if how == 0 else text[: len(text) // 2] if how == 1 else text


@st.composite
def damaged_arrays(draw, arrays, header):
    found = dict(arrays)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(arrays)))
        array = arrays[name]
        how = draw(st.integers(0, 7))
        if how == 0:
            found.pop(name, None)
        elif how <= 2:
            said = json.loads(str(arrays[header]))
            found[header] = np.array(draw(damaged_text(said)).replace("\0", ""))
        elif how == 3:
            found[name] = array.ravel()[: draw(st.integers(0, 3))]
        elif how == 4 and array.dtype.kind in "iuf":
            kind = draw(st.sampled_from(["f4", "i8", "U9", "?", "c16", "M8[s]", "u1"]))
            with np.errstate(all="ignore"):
                found[name] = np.nan_to_num(array).astype(kind)
        elif array.size and array.dtype.kind in "iuf":
            number = draw(NUMBERS)
            if array.dtype.kind == "f" or abs(number) < 2**15:
                found[name] = array.copy()
                found[name].flat[draw(st.integers(0, array.size - 1))] = number
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "header"), [("report", "meta"), ("tables", "header"), ("stream", "header")]
)
def test_files_of_arrays(files, tmp_path_factory, kind, header):
    with np.load(files / f"{kind}.npz") as file:
        arrays = dict(file)
    folder = tmp_path_factory.mktemp("damaged")

    @settings(max_examples=15, deadline=None)
    @given(damaged_arrays(arrays, header))
    def check(found):
        path = folder / f"{kind}.npz"
        with path.open("wb") as file:
            np.savez(file, **found)
        told(SHOWN[kind], path)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHOWN)
def test_bytes_that_are_cut_or_flipped(files, tmp_path, kind):
    whole = (files / f"{kind}.npz").read_bytes()
    rng, path = np.random.default_rng(0), tmp_path / f"{kind}.npz"
    for i in range(16):
        made = bytearray(whole)
        made[rng.integers(len(made))] ^= 1 << int(rng.integers(8))
        path.write_bytes(whole[: rng.integers(len(whole))] if i % 2 else bytes(made))
        told(SHOWN[kind], path)


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        ("report", "r.model", 7, "r.model must be from 0 to 0, got 7"),
        ("report", "r.arrival_s", math.nan, "r.arrival_s must be from -1e+12 to 1e+12, got nan"),
        ("report", "b.worker", -1, "b.worker must be from 0 to 1, got -1"),
        ("report", "r.batch", 10**6, "r.batch must be from -1 to"),
        ("tables", "variant", 5, "variant must be from -1 to 0, got 5"),
        ("tables", "slacks_s", math.inf, "slacks_s must be from"),
        ("stream", "payload", -4, "payload must be from 0 to"),
        ("stream", "times_s", -4.0, "times_s must be from 0 to"),
    ],
)
def test_the_array_and_the_value_are_named(files, tmp_path, kind, name, value, said):
    with np.load(files / f"{kind}.npz") as file:
        arrays = dict(file)
    arrays[name].flat[0] = value
    path = tmp_path / f"{kind}.npz"
    np.savez(path, **arrays)
    code, text = told(SHOWN[kind], path)
    assert code == 2
    assert said in text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("duration_s", "x", "meta.duration_s: must be a number"),
        ("warmup_s", 9e9, "warmup_s must be less than duration_s"),
        ("models", ["m", "m"], "models must be different names"),
        ("slo_s", {}, "slo_s has no 'm'"),
        ("workers", 7, "meta.workers: must be a list"),
    ],
)
def test_the_field_of_a_header_is_named(files, tmp_path, field, value, said):
    with np.load(files / "report.npz") as file:
        arrays = dict(file)
    arrays["meta"] = np.array(json.dumps(json.loads(str(arrays["meta"])) | {field: value}))
    np.savez(tmp_path / "report.npz", **arrays)
    code, text = told(SHOWN["report"], tmp_path / "report.npz")
    assert code == 2
    assert said in text


def test_a_small_file_with_large_arrays_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_ARRAY_BYTES", 100_000)
    path = tmp_path / "report.npz"
    np.savez_compressed(path, meta=np.array("{}"), zeros=np.zeros(100_000))
    assert path.stat().st_size < 5000
    code, text = told(SHOWN["report"], path)
    assert code == 2
    assert "bytes, at most 100000 are read" in text


@pytest.mark.slow
def test_bench_runs(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    summary = json.loads((files / "bench" / "summary.json").read_text())
    whole = (files / "bench" / "requests.csv").read_text()
    head, *lines = [line.split(",") for line in whole.splitlines()]

    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def check(data):
        rows = [list(line) for line in lines]
        at = data.draw(st.integers(0, len(head) - 1))
        if data.draw(st.booleans()):
            rows[0][at] = data.draw(CELLS)
        else:
            cell = data.draw(CELLS)
            for row in rows:
                row[at] = cell
        names = list(head)
        if data.draw(st.integers(0, 5)) == 0:
            names[at] = "x"
        text = "\n".join(",".join(cells) for cells in (names, *rows))
        (folder / "requests.csv").write_text(text)
        said = data.draw(st.one_of(st.just(json.dumps(summary)), damaged_text(summary)))
        (folder / "summary.json").write_text(said)
        told(("report", "{}", "--out", str(folder / "page.html")), folder)

    check()


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("intended_s", "inf", "intended_s must be from"),
        ("latency_s", "x", "Unable to parse string"),
        ("status", "gone", "status must be one of ok, late, "),
        ("measured", "yes", "measured must be True or False"),
    ],
)
def test_the_column_of_a_bench_run_is_named(files, tmp_path, column, cell, said):
    (tmp_path / "summary.json").write_text((files / "bench" / "summary.json").read_text())
    head, first, *rest = (files / "bench" / "requests.csv").read_text().splitlines()
    cells = first.split(",")
    cells[head.split(",").index(column)] = cell
    (tmp_path / "requests.csv").write_text("\n".join([head, ",".join(cells), *rest]))
    code, text = told(("report", "{}", "--out", str(tmp_path / "x.html")), tmp_path)
    assert code == 2
    assert said in text and column in text and "requests.csv" in text
