"""Everything that names gpuhook's version names the same."""

import re
import tomllib
from pathlib import Path

import gpuhook_simulate
from gpuhook import __version__

REPOSITORY = Path(__file__).parents[3]
_NAMED = re.compile(r"(?:gpuhook[:-]|gpuhook/versions/|newTag: \")(\d+\.\d+\.\d+)")


def test_pages_and_manifests_name_this_version() -> None:
    paths = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    paths += (REPOSITORY / "packaging").rglob("*.yaml")
    named = {(path.name, found) for path in paths for found in _NAMED.findall(path.read_text())}
    assert {name for name, _ in named} >= {"deploy.md", "ansible.md", "kustomization.yaml"}
    assert {found for _, found in named} == {__version__}


def test_what_simulates_is_of_this_version_and_wants_it() -> None:
    assert gpuhook_simulate.__version__ == __version__
    project = tomllib.loads((REPOSITORY / "simulate/pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"gpuhook=={__version__}"]
    licence = (REPOSITORY / "LICENSE").read_bytes()
    assert (REPOSITORY / "simulate/LICENSE").read_bytes() == licence


def test_the_changelog_has_it_with_its_date_and_groups() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    groups = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", text, re.MULTILINE)} <= groups
