"""scripts/release builds everything twice, with checksums and a bill of materials.

The image is left out: that it is the same each time is shown with the image itself.
"""

import json
from pathlib import Path

import pytest
from harness.commands import run
from harness.images import REPOSITORY
from harness.packages import released

from gpuhook import __version__

FILES = {
    f"gpuhook-{__version__}-py3-none-any.whl",
    f"gpuhook-{__version__}.tar.gz",
    f"gpuhook_{__version__}_all.deb",
    f"gpuhook_simulate-{__version__}-py3-none-any.whl",
    f"gpuhook_simulate-{__version__}.tar.gz",
    f"gpuhook-simulate_{__version__}_all.deb",
    f"gpuhook-{__version__}-1.noarch.rpm",
    f"gpuhook-simulate-{__version__}-1.noarch.rpm",
    f"gpuhook-{__version__}.cdx.json",
}


@pytest.fixture(scope="module")
def said() -> str:
    return released()[0]


@pytest.fixture(scope="module")
def made() -> Path:
    return released()[1]


def test_two_builds_are_the_same(said: str, made: Path) -> None:
    same = {line.split()[1].rstrip(",") for line in said.splitlines() if line.startswith("same: ")}
    assert same == FILES
    assert {path.name for path in made.iterdir()} == FILES | {"SHA256SUMS"}


def test_the_checksums_are_those_of_the_files(made: Path) -> None:
    done = run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made).ok()
    assert done.stdout.splitlines() == [f"{name}: OK" for name in sorted(FILES)]


def test_the_bill_names_every_file(made: Path) -> None:
    document = json.loads((made / f"gpuhook-{__version__}.cdx.json").read_text())
    sums = dict(line.split()[::-1] for line in (made / "SHA256SUMS").read_text().splitlines())
    listed = {each["name"]: each["hashes"][0]["content"] for each in document["components"]}
    assert listed == {name: sums[name] for name in FILES if not name.endswith(".json")}


def test_nothing_else_is_changed_or_promised(said: str) -> None:
    assert "git tag" not in said
    assert run([REPOSITORY / "scripts/release", "--without-image"]).failed().stderr == (
        "release: --without-image is for --dry-run: a release has all parts\n"
    )
