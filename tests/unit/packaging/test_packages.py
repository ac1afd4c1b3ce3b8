"""Packages: requirements, names, maintainer, and reproducible builds."""

import os
import pwd
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import gpuhook_simulate
from gpuhook import __version__
from gpuhook.tools import extensions

REPOSITORY = Path(__file__).parents[3]
# A library's name on the package index -> Debian's, where that isn't python3-NAME.
DEBIAN_NAMES = {"pyyaml": "python3-yaml", "prometheus_client": "python3-prometheus-client"}
# The package includes nvidia-ml-py (pynvml).
PACKED_IN = {"nvidia-ml-py"}
_REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)")
_DEPENDENCY = re.compile(r"(python3(?:-[a-z0-9-]+)?)(?: \(>= ([\d.]+)\))?")


def wanted() -> dict[tuple[str, str], dict[str, str]]:
    """Return what the wheel requires, by package and field, as Debian's names and versions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    kubernetes, metrics = in_debian(extras["kubernetes"]), in_debian(extras["metrics"])
    passwords = {name: metrics.pop(name) for name in ("python3-bcrypt",)}
    return {
        ("gpuhook", "Depends"): {"python3": project["requires-python"].removeprefix(">=")}
        | in_debian(project["dependencies"]),
        ("gpuhook", "Suggests"): {},
        ("gpuhook-hpc", "Depends"): {},
        ("gpuhook-kubernetes", "Depends"): kubernetes,
        ("gpuhook-metrics", "Depends"): metrics,
        ("gpuhook-metrics", "Suggests"): passwords | kubernetes,
    }


def in_debian(requirements: list[str]) -> dict[str, str]:
    found = {}
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        assert match is not None, f"{requirement} has no lowest version, or more than that"
        name, version = match[1].lower(), match[2]
        if name == "protobuf":
            # Debian uses the C++ library's version for the same release: 4.21 is 3.21.
            version = f"3.{version.partition('.')[2]}"
        if name not in PACKED_IN:
            found[DEBIAN_NAMES.get(name, f"python3-{name}")] = version
    return found


def test_wheel_and_debian_package_require_the_same_versions() -> None:
    for (package, field), libraries in wanted().items():
        control = (REPOSITORY / "packaging/debian" / package / "control").read_text()
        [line] = re.findall(rf"^{field}: (.*)$", control, re.MULTILINE)
        matches = [_DEPENDENCY.fullmatch(word) for word in line.split(", ")]
        assert {match[1]: match[2] for match in matches if match} == libraries


@pytest.mark.parametrize("package", extensions.PACKAGES.values())
def test_an_addon_package_replaces_files_of_older_gpuhook_packages(package: str) -> None:
    """dpkg then moves the files. gpuhook suggests every add-on package, and recommends none."""
    control = (REPOSITORY / "packaging/debian" / package / "control").read_text()
    lines = control.splitlines()
    assert {"Breaks: gpuhook (<< @VERSION@)", "Replaces: gpuhook (<< @VERSION@)"} <= {*lines}
    assert re.search(r"^Depends: gpuhook \(= @VERSION@\)", control, re.MULTILINE)
    of_gpuhook = (REPOSITORY / "packaging/debian/gpuhook/control").read_text()
    named = {line.partition(":")[0] for line in of_gpuhook.splitlines() if package in line}
    assert named - {" gpuhook-kubernetes, gpuhook-metrics and gpuhook-hpc."} == {"Suggests"}


# Versions -------------------------------------------------------------------------------------


_NAMED = re.compile(r"(?:gpuhook[:-]|gpuhook/versions/|newTag: \")(\d+\.\d+\.\d+)")


def test_pages_and_manifests_name_this_version() -> None:
    paths = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    paths += (REPOSITORY / "packaging").rglob("*.yaml")
    named = {(path.name, found) for path in paths for found in _NAMED.findall(path.read_text())}
    assert {name for name, _ in named} >= {"deploy.md", "ansible.md", "gpuhook.yaml"}
    assert {found for _, found in named} == {__version__}


def test_gpuhook_simulate_requires_this_gpuhook_version() -> None:
    assert gpuhook_simulate.__version__ == __version__
    project = tomllib.loads((REPOSITORY / "simulate/pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"gpuhook=={__version__}"]
    licence = (REPOSITORY / "LICENSE").read_bytes()
    assert (REPOSITORY / "simulate/LICENSE").read_bytes() == licence


def test_the_changelog_has_this_version_with_a_date_and_known_groups() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    groups = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", text, re.MULTILINE)} <= groups


# Who maintains the package --------------------------------------------------------------------


MAINTAINER = REPOSITORY / "scripts/lib/maintainer"
NO_GIT = dict.fromkeys(("GIT_DIR", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), "/nonexistent")


def maintainer(home: Path, **env: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(home)} | env
    done = subprocess.run([MAINTAINER], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def git_user(home: Path) -> dict[str, str]:
    file = home / "gitconfig"
    file.write_text('[user]\nname = "Grace Hopper"\nemail = grace@navy.example\n')
    return NO_GIT | {"GIT_CONFIG_GLOBAL": str(file)}


def test_the_maintainer_is_taken_from_debians_variables_first(tmp_path: Path) -> None:
    env = {"DEBFULLNAME": "Ada / & Co", "DEBEMAIL": "ada@engine.example"} | git_user(tmp_path)
    assert maintainer(tmp_path, **env) == "Ada / & Co <ada@engine.example>\n"


def test_without_debians_variables_the_maintainer_is_gits_user(tmp_path: Path) -> None:
    assert maintainer(tmp_path, **git_user(tmp_path)) == "Grace Hopper <grace@navy.example>\n"


def test_without_git_the_maintainer_is_the_system_user(tmp_path: Path) -> None:
    name, _, address = maintainer(tmp_path, **NO_GIT).rstrip(">\n").partition(" <")
    user, _, host = address.partition("@")
    assert name
    assert user == pwd.getpwuid(os.geteuid()).pw_name
    assert host
    assert not host.endswith((".invalid", ".example"))


# Two builds -----------------------------------------------------------------------------------


SAME_FILES = REPOSITORY / "scripts/lib/same-files"


@pytest.fixture
def builds(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "one", tmp_path / "another one"
    for folder in folders:
        folder.mkdir()
        (folder / "a wheel").write_bytes(b"PK\0\1")
        (folder / "sdist").write_bytes(b"")
    return folders


def compare(builds: tuple[Path, Path]) -> tuple[int, str]:
    done = subprocess.run([SAME_FILES, *builds], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_identical_builds_are_reported_as_the_same(builds: tuple[Path, Path]) -> None:
    assert compare(builds) == (0, "same: a wheel, 4 bytes\nsame: sdist, 0 bytes\n")


@pytest.mark.parametrize("at", [0, 1])
def test_differing_and_missing_files_of_a_build_are_reported(
    builds: tuple[Path, Path], at: int
) -> None:
    (builds[at] / "a wheel").write_bytes(b"PK\0\2")
    (builds[at] / "sdist").unlink()
    status, said = compare(builds)
    assert status == 1
    assert "differs: a wheel\n" in said
    assert "differs: sdist\n" in said
