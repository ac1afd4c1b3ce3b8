"""Malformed JSON is an ordinary error in an interpreter that has loaded nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

import gpuhook

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from gpuhook.ground.oci import jsontext
assert "json.decoder" not in sys.modules
for call in (jsontext.loads, lambda text: list(jsontext.members(text, 0))):
    try:
        call(sys.argv[2])
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("text", ["{", '{"a', '{"a": "b', '{"a": [1,', "{'a': 1}", '{"a": "\\x"}'])
def test_malformed_text(text: str) -> None:
    folder = str(Path(gpuhook.__file__).parents[1])
    words = [sys.executable, "-I", "-S", "-c", PROGRAM, folder, text]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2
