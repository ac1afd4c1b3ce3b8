"""What NVIDIA's things are called is spelled in NVIDIA's folders alone.

Elsewhere it comes from ``vendors.nvidia``, so that the same code serves every vendor.
"""

import re
from pathlib import Path

import gpuhook

PACKAGE = Path(gpuhook.__file__).parent
NVIDIAS = re.compile(r"NVIDIA_|/dev/nvidia|/proc/driver/nvidia")
FOLDERS = ("vendors/nvidia/", "nvidia_cli/")


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
    assert spelling() == {}


def test_what_is_found() -> None:
    for line in ('env["NVIDIA_GDS"]', 'f"/dev/nvidia{minor}"', "/proc/driver/nvidia-caps"):
        assert NVIDIAS.search(line)
    assert not NVIDIAS.search("nvidia_names = vendors.nvidia")
