"""Commands of `python -m k3lab`, run in this process."""

import json

import pytest

from k3lab.__main__ import main


def run(capsys, *args):
    """Exit status, stdout and stderr of main(); argparse's own exits count as a status."""
    try:
        status = main([str(a) for a in args])
    except SystemExit as e:
        status = e.code
    out, err = capsys.readouterr()
    return status, out, err


def run_json(capsys, *args):
    status, out, _ = run(capsys, *args, "--json")
    return status, json.loads(out, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))


def assert_bad_input(result, *parts):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("k3lab: ")
    for part in parts:
        assert part in err
