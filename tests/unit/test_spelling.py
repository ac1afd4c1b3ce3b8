"""What NVIDIA's things are called is spelled in NVIDIA's folders alone.

Elsewhere it comes from ``vendors.nvidia``, so that the same code serves every vendor.
"""

import re
from pathlib import Path

import gpuhook

PACKAGE = Path(gpuhook.__file__).parent
NVIDIAS = re.compile(r"NVIDIA_|/dev/nvidia|/proc/driver/nvidia")
FOLDERS = ("vendors/nvidia/", "nvidia_cli/")

# Files that spell it still, to be taken out of here one by one.
NOT_YET = {
    "cli/list.py",
    "config/loader.py",
    "inventory/freshness.py",
    "inventory/model.py",
    "inventory/selection.py",
    "plan/operations.py",
    "plan/spec_edits.py",
    "request/reader.py",
}


def spelling() -> dict[str, list[str]]:
    """Return the files outside of NVIDIA's folders that spell its names, with the lines."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        lines = [line for line in path.read_text().splitlines() if NVIDIAS.search(line)]
        if lines and not name.startswith(FOLDERS):
            found[name] = lines
    return found


def test_nvidias_names_are_spelled_in_its_folders_alone() -> None:
    assert {name: lines for name, lines in spelling().items() if name not in NOT_YET} == {}


def test_every_exception_is_still_needed() -> None:
    assert NOT_YET - set(spelling()) == set()


def test_what_is_found() -> None:
    for line in ('env["NVIDIA_GDS"]', 'f"/dev/nvidia{minor}"', "/proc/driver/nvidia-caps"):
        assert NVIDIAS.search(line)
    assert not NVIDIAS.search("nvidia_names = vendors.nvidia")
