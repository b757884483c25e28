"""Files are whole, whatever ends their writing."""

import errno

import pytest

from ray_slo.core.files import HALF, whole, write_text


def test_the_new_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "page.html"
    write_text(path, "one")
    path.chmod(0o640)
    with whole(path) as half:
        half.write_text("two")
        assert path.read_text() == "one"
        assert (half.parent, half.suffix) == (path.parent, HALF)
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), OSError(28, "full")])
def test_what_was_there_stays(tmp_path, error):
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(type(error)) as caught, whole(path) as half:
        half.write_text("ha")
        raise error
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    if isinstance(error, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    path = tmp_path / "page.html"
    path.symlink_to(tmp_path / "there" / "real.html")
    write_text(path, "text")
    assert path.is_symlink()
    assert (tmp_path / "there" / "real.html").read_text() == "text"


def test_what_is_no_file_is_itself_written(tmp_path):
    write_text("/dev/null", "text")
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path, "text")
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(OSError, match="No space left") as full:
        write_text("/dev/full", "text")
    assert full.value.filename == "/dev/full"


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    path = tmp_path / ("é" * 125 + ".html")
    write_text(path, "text")
    assert path.read_text() == "text"
    assert list(tmp_path.iterdir()) == [path]
