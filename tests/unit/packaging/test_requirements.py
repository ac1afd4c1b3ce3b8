"""The Debian package and the wheel ask for the same versions of the same libraries."""

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
# A library's name on the package index -> Debian's, where that isn't python3-NAME.
DEBIAN_NAMES = {"pyyaml": "python3-yaml", "prometheus_client": "python3-prometheus-client"}
# pynvml, which the package brings along.
PACKED_IN = {"nvidia-ml-py"}
_REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)")
_DEPENDENCY = re.compile(r"(python3(?:-[a-z0-9-]+)?)(?: \(>= ([\d.]+)\))?")


def wanted() -> dict[str, dict[str, str]]:
    """Return what the wheel asks for, by the field of the package: Debian's name -> version."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return {
        "Depends": {"python3": project["requires-python"].removeprefix(">=")}
        | in_debian(project["dependencies"]),
        "Suggests": in_debian([*extras["kubernetes"], *extras["metrics"]]),
    }


def in_debian(requirements: list[str]) -> dict[str, str]:
    found = {}
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        assert match is not None, f"{requirement} has no lowest version, or more than that"
        name, version = match[1].lower(), match[2]
        if name == "protobuf":
            # Debian counts as the C++ library does, which is the same release: 4.21 is 3.21.
            version = f"3.{version.partition('.')[2]}"
        if name not in PACKED_IN:
            found[DEBIAN_NAMES.get(name, f"python3-{name}")] = version
    return found


def test_wheel_and_package_want_the_same_versions() -> None:
    control = (REPOSITORY / "packaging/debian/gpuhook/control").read_text()
    for field, libraries in wanted().items():
        [line] = re.findall(rf"^{field}: (.*)$", control, re.MULTILINE)
        matches = [_DEPENDENCY.fullmatch(word) for word in line.split(", ")]
        assert {match[1]: match[2] for match in matches if match} == libraries
