"""Spelling of a vendor's names, which only that vendor's folders contain.

Other code reads them from the vendor's names, so that the same code serves every vendor.
"""

import re
from pathlib import Path

import pytest
from samples import SAMPLES

import gpuhook
import gpuhook_simulate

OF_COMMANDS = re.compile(r"^(monitor|tools|cluster|metrics)/(?=vendors/)")
PACKAGES = [Path(str(each.__file__)).parent for each in (gpuhook, gpuhook_simulate)]
# Folders of gpuhook, of its parts or of the simulators -> pattern that may occur only there.
SPELLED = {
    ("vendors/nvidia/", "nvidia_cli/"): r"NVIDIA_|/dev/nvidia|/proc/driver/nvidia",
    ("vendors/gaudi/", "vendors/intel_npu/"): r"/dev/accel",
    **{
        (f"vendors/{name}/", *sample.spelled_in): sample.spelled for name, sample in SAMPLES.items()
    },
}


def spelling(folders: tuple[str, ...], pattern: str) -> dict[str, list[str]]:
    """Return the files outside a vendor's folders that spell its names, with the lines."""
    found = {}
    # A vendor's simulator may be a file instead of a folder (vendors/amd.py).
    places = (*folders, *(f"{folder.rstrip('/')}.py" for folder in folders))
    every = ((path, package) for package in PACKAGES for path in sorted(package.rglob("*.py")))
    for path, package in every:
        name = str(path.relative_to(package))
        lines = [line for line in path.read_text().splitlines() if re.search(pattern, line)]
        if lines and not OF_COMMANDS.sub("", name).startswith(places):
            found[name] = lines
    return found


@pytest.mark.parametrize("folders", SPELLED, ids=" ".join)
def test_vendor_names_appear_only_in_vendor_folders(folders: tuple[str, ...]) -> None:
    assert spelling(folders, SPELLED[folders]) == {}
    assert spelling(("nowhere",), SPELLED[folders])


def test_vendor_names_are_detected() -> None:
    nvidias = SPELLED["vendors/nvidia/", "nvidia_cli/"]
    for line in ('env["NVIDIA_GDS"]', 'f"/dev/nvidia{minor}"', "/proc/driver/nvidia-caps"):
        assert re.search(nvidias, line)
    assert not re.search(nvidias, "nvidia_names = vendors.nvidia")
