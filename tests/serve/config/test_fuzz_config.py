"""Configs with mistakes are refused with a message, whatever the mistake: no crash, no hang."""

import copy
import math
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_slo.cli import _describe
from ray_slo.core.documents import read_yaml
from ray_slo.core.profiles import LatencyProfile, load_profiles, save_profiles
from ray_slo.load.workload import Recorded
from ray_slo.papers.ramsis.spec import SolveSpec
from ray_slo.papers.ramsis.table import PolicySet
from ray_slo.planning.catalogue import load_catalogue
from ray_slo.serve.config.resolve import parse_spec
from ray_slo.simulation.application_spec import ApplicationSpec
from ray_slo.simulation.report import Report
from ray_slo.simulation.sizing import PlanSpec
from ray_slo.simulation.spec import SimulationSpec

ROOT = Path(__file__).parents[3]
REFUSED = (ValueError, OSError)  # the command line says these without a traceback
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), ROOT / "policies" / "digits.yaml"])
LONGEST = timedelta(seconds=20)  # nothing below takes a second; the machine may be busy
FEW = settings(
    max_examples=12,
    derandomize=True,
    deadline=LONGEST,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def read(document, path):
    """What `serve run`, `ray-slo plan`, `simulate` and `solve` make of a document."""
    if "applications" in document:
        for application in document["applications"]:
            spec = parse_spec(application["args"])
            assert spec.models
            spec.variants()
            assert spec.workers
    elif path.parent.name == "policies":
        SolveSpec.model_validate(document).problem(ROOT / "policies")
    elif path.name.startswith("plan-"):
        PlanSpec.model_validate(document).build(ROOT / "configs")
    elif path.stem == "simulate-application":
        ApplicationSpec.model_validate(document).problem(ROOT / "configs")
    else:
        spec = SimulationSpec.model_validate(document)
        spec.make_policy()
        spec.options(spec.cluster.build(ROOT / "configs"))


def arguments(document):
    """The part of a document that is ours to read."""
    return document["applications"][0]["args"] if "applications" in document else document


def paths(value, before=()):
    yield before
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*before, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ODD = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, "", " ", "\x00", "\ud800", "é" * 300, "no", "a:b", "../../x", ":"),
            *(0, -1, 1, 2**31, 2**63, 10**30, -(10**400), 0.0, -0.0, 1e-320, 1e308, math.nan),
            *(math.inf, -math.inf, [], {}, [[]], [None], {"": None}, {1: 2}, {None: {}}, {"a": {}}),
            *(b"\xff", nested(50), {"kind": "x"}, {"name": "x"}, {"name": ["x"]}, "os:system"),
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
)
HOW = st.sampled_from(["replace", "replace", "replace", "drop", "rename", "wrap", "add", "swap"])


def mutate(document, data):
    """Make one mistake; returns the names that a message may name it by."""
    ours = arguments(document)
    path = data.draw(st.sampled_from([p for p in paths(ours) if p]), label="where")
    owner, key = at(ours, path[:-1]), path[-1]
    names = {str(k) for k in path if isinstance(k, str)}
    names |= {"slo_s"} if "latency_slo_ms" in names else set()  # of a problem, in seconds
    how = data.draw(HOW, label="how")
    if how == "drop":
        names |= set(map(str, owner[key])) if isinstance(owner[key], dict) else {str(owner[key])}
        del owner[key]
    elif how == "wrap":
        owner[key] = data.draw(st.sampled_from([[owner[key]], {"x": owner[key]}, str(owner[key])]))
    elif how in ("rename", "add") and isinstance(owner, dict):
        name = data.draw(st.text(max_size=6) | st.sampled_from([f"{key}s", *map(str, ours)]))
        names |= {name, name.strip(), "input"}
        owner[name] = owner.pop(key) if how == "rename" else data.draw(ODD, label="value")
    elif how == "swap":
        other = data.draw(st.sampled_from(list(paths(ours))), label="with")
        owner[key] = copy.deepcopy(at(ours, other))
    else:
        owner[key] = data.draw(ODD, label="value")
    return names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_as_it_is(path):
    read(read_yaml(path), path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_mistake_is_refused_by_name(path):
    original = read_yaml(path)

    @FEW
    @given(st.data())
    def one(data):
        document = copy.deepcopy(original)
        made = [mutate(document, data) for _ in range(data.draw(st.integers(1, 2), label="many"))]
        try:
            read(document, path)
        except REFUSED as error:
            said = _describe(error)
            assert said and len(said) < 20_000
            if len(made) == 1:
                assert any(name[:5] in said for name in made[0]), said

    one()


# -- files ---------------------------------------------------------------------------------------

YAML_ODDITIES = [
    b"[" * 5000,
    b"{a: " * 3000,
    b"a: &a [*a]",
    b"a: &a [x]\n" + b"".join(b"b%d: &b%d [*a, *a, *a]\n" % (i, i) for i in range(60)),
    b"a: !!python/object/apply:os.system [true]",
    b"a: !!python/name:os.system",
    b"a: 2020-13-45",
    b"a: !!int x",
    b"a: !!float [1]",
    b"a: !!binary '*'",
    b"{[1, 2]: 3}",
    b"? {a: 1}\n: 2",
    b"a: \x00",
    b"\xff\xfe",
    b"a: '\xed\xa0\x80'",
    b"--- a\n--- b",
    b"a: 1\na: 2",
    b"<<: 3",
    b"<<: [{a: 1}, 2]",
    b"=: =",
    b"%YAML 9.9\n---\n{}",
    b"\ta: 1",
    b"a: " + b"9" * 10_000,
    b"0: 0",
    b"",
    b"null",
]


@pytest.mark.slow
@pytest.mark.parametrize("content", YAML_ODDITIES, ids=lambda c: repr(c[:20]))
def test_yaml_that_is_none_of_ours(content, tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    for reader in (lambda p: read(read_yaml(p), p), load_catalogue, config_targets_of):
        with pytest.raises(REFUSED) as refused:
            reader(path)
        assert len(_describe(refused.value)) < 20_000


def config_targets_of(path):
    from ray_slo.cli.profile import config_targets

    return config_targets(path, {})


@given(st.sampled_from(CONFIGS), st.data())
@settings(FEW, max_examples=60)
def test_a_slip_in_the_text(path, data):
    """Characters lost, doubled or replaced: another valid config, or a refusal."""
    text = path.read_text(encoding="utf-8")
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(text) - 1))
        slip = data.draw(
            st.sampled_from(["", "\t", ":", "[", "&a ", "*a", "'", "- ", "\n", "!", "9"])
        )
        text = text[:i] + slip + text[i + data.draw(st.integers(0, 3)) :]
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return  # `read_yaml` says so: test_yaml_that_is_none_of_ours
    if not isinstance(document, dict):
        return
    try:
        read(document, path)
    except REFUSED as error:
        assert _describe(error)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A good file of every kind that the command line reads, and its reader."""
    folder = tmp_path_factory.mktemp("files")
    save_profiles(folder / "profiles.json", {"a": LatencyProfile.linear(0.001, 0.005, 8)})
    (folder / "catalogue.yaml").write_text("a: {price_per_hour: 0.5}\n", encoding="utf-8")
    times = np.array([0.1, 0.2])
    Recorded(times, np.array([0, 0]), duration_s=1.0).save(folder / "workload.npz")
    document = read_yaml(ROOT / "configs" / "simulate-resnet50.yaml")
    document |= {"duration_s": 0.05, "warmup_s": 0.0}
    SimulationSpec.model_validate(document).run().save(folder / "report.npz")
    shutil.copy(ROOT / "policies" / "digits.npz", folder / "tables.npz")
    readers = {
        "profiles.json": load_profiles,
        "catalogue.yaml": load_catalogue,
        "workload.npz": Recorded.load,
        "report.npz": Report.load,
        "tables.npz": PolicySet.load,
    }
    for name, reader in readers.items():
        assert reader(folder / name)
    return folder, readers


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # NumPy's, of headers
@given(data=st.data())
@settings(FEW, max_examples=80, suppress_health_check=list(HealthCheck))
def test_a_damaged_file(files, data):
    folder, readers = files
    name = data.draw(st.sampled_from(sorted(readers)))
    content = (folder / name).read_bytes()
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            i = data.draw(st.integers(0, len(content) - 1))
            content = content[:i] + data.draw(st.binary(max_size=3)) + content[i + 1 :]
    damaged = folder / f"damaged-{name}"
    damaged.write_bytes(content)
    try:
        readers[name](damaged)
    except ValueError as error:
        assert str(damaged) in str(error)


def test_nothing_in_a_file_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    bomb = np.empty(1, dtype=object)
    bomb[0] = Bomb()
    path = tmp_path / "bomb.npz"
    np.savez(path, header=bomb, meta=bomb, times_s=bomb)
    for reader in (Recorded.load, Report.load, PolicySet.load):
        with pytest.raises(ValueError, match="allow_pickle"):
            reader(path)
