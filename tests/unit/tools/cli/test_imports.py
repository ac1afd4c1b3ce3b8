"""Imports of interactive commands, because each further module delays them."""

import subprocess
import sys

import pytest

SLOW = {
    "asyncio", "email", "grpc", "http", "prometheus_client", "pynvml", "pyroute2", "rich", "toml",
    "tomlkit", "xml", "yaml",
}  # fmt: skip
CODE = """
import atexit, sys
from gpuhook.tools.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main()
"""
# Words of the command line, limit of loaded modules: the number with Python 3.14, and a few more.
CALLS = [
    (["--help"], 140),
    (["info", "--help"], 175),
    (["list", "--help"], 265),
    (["explain", "--help"], 270),
    (["apply", "--help"], 265),
]


@pytest.mark.parametrize(("words", "most"), CALLS, ids=[call[0][0] for call in CALLS])
def test_a_command_stays_within_its_import_limit(words: list[str], most: int) -> None:
    argv = [sys.executable, "-c", CODE, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = done.stderr.splitlines()[-1].split()
    assert {name.partition(".")[0] for name in loaded} & SLOW == set()
    assert len(loaded) <= most, sorted(loaded)
