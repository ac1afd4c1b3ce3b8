"""Every group of shared cases about requests, configuration, CDI and vendors is some test's."""

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WHOLE = [
    "image", "hook", "capabilities", "requirements", "config", "mode", "params_file",
    "cuda_compat", "application_profile", "cdi", "cdi_annotations", "cdi_apply", "cdi_cache",
    "cdi_generate", "cdi_names", "cdi_transform", "cdi_validate", "cdi_versions", "vendor_amd",
]  # fmt: skip
# What gpuhook has nothing of: leases of devices.
WITHOUT = {"amd.lease"}


def used(file: str) -> set[str]:
    pattern = re.compile(rf'@pytest\.mark\.vectors\("{file}", ([^)]+)\)')
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    return {name for text in texts for names in pattern.findall(text) for name in
            re.findall(r'"([^"]+)"', names)}  # fmt: skip


@pytest.mark.parametrize("file", WHOLE)
def test_every_group_is_used(file: str) -> None:
    vectors = json.loads((TESTS.parent / "vectors" / f"{file}.json").read_text())["vectors"]
    groups = {case["group"].removesuffix(".derived_from_code") for case in vectors}
    assert groups - WITHOUT <= used(file)
