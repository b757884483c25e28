import numpy as np
import pytest

from ray_slo.core.documents import load_arrays, load_yaml


def test_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: 1, c: {d: 1}}\ne: &x {f: [1, {g: 2}]}\nh: *x\n")
    assert load_yaml(path) == {
        "a": {"b": 1, "c": {"d": 1}},
        "e": {"f": [1, {"g": 2}]},
        "h": {"f": [1, {"g": 2}]},
    }
    path.write_text("a: {b: 1}\ne: [{f: 1,\n  f: 2}]\n")
    with pytest.raises(ValueError, match=r"a.yaml: not YAML: line 3: the key 'f' was there before"):
        load_yaml(path)
    path.write_text("")
    assert load_yaml(path) is None


def test_arrays_of_another_file_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    assert load_arrays(tmp_path / "a.npz", "a table", "x")["x"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"a.npz: not a table: it has no y, z$"):
        load_arrays(tmp_path / "a.npz", "a table", "z", "x", "y")
    with pytest.raises(IsADirectoryError):
        load_arrays(tmp_path, "a table")
