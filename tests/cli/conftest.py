"""Run the command line in the test's process."""

import pytest

from ray_slo.cli import main


@pytest.fixture
def run(capsys):
    """Run `ray-slo ARGS`: (exit code, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as exit:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        return exit.value.code, out, err

    return call
