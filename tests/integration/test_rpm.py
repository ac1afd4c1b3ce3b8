"""RPM packages, which are made from Debian's.

The tests install them with rpm into a copy of this Debian system, because no distribution that
uses them can be reached from everywhere. The tests compare the dependencies with Debian's and
don't resolve them.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from harness.commands import run
from harness.driver import simulate
from harness.installation import Installation
from harness.packages import (
    ADDRESS,
    EVERY,
    MAINTAINER,
    UNITS,
    Debian,
    debs,
    layer,
    leave_stale_module,
    without_gpuhook,
)

from gpuhook import __version__
from gpuhook.tools import extensions

DAEMON_JSON = '{\n  "log-level": "warn"\n}\n'


@cache
def rpm() -> tuple[str, ...]:
    """Return the words that call rpm without dependency checks.

    rpm doesn't count installed Debian packages as dependencies.
    """
    # Debian's rpm before version 6 refuses to install, and suggests to convert packages.
    force = ["--force-debian"] if "--force-debian" in run(["rpm", "--help"]).ok().stdout else []
    return ("rpm", *force, "--dbpath=/var/lib/rpm", "--nodeps")


@pytest.fixture(scope="module")
def packages() -> dict[str, Path]:
    return debs()


@pytest.fixture(scope="module")
def rpms(packages: dict[str, Path]) -> dict[str, Path]:
    return {
        name: path.with_name(
            f"{name}-{__version__}-1.{os.uname().machine if name == 'gpuhook' else 'noarch'}.rpm"
        )
        for name, path in packages.items()
    }


@pytest.fixture(scope="module")
def without(workspace: Path, rpms: dict[str, Path]) -> Path:
    files = {f"{name}.rpm": path for name, path in rpms.items()}
    return without_gpuhook(workspace / "rpm-without", files)


@pytest.fixture
def system(workspace: Path, without: Path) -> Iterator[Debian]:
    """A system with the packages in its root folder, and with rpm's database in /var/lib/rpm."""
    folder = workspace / "rpm-root"
    with layer(folder, without) as made:
        (made.root / "var/lib/rpm").mkdir(exist_ok=True)
        yield made
    run(["rm", "-rf", "--one-file-system", folder]).ok()


def _changed(system: Debian) -> set[str]:
    return {path for path in system.changed() if not path.startswith("var/lib/rpm")}


def test_rpm_has_the_files_of_the_debian_package(
    packages: dict[str, Path], rpms: dict[str, Path]
) -> None:
    for name, package in packages.items():
        rpm = rpms[name]
        listed = run(["dpkg-deb", "--contents", package]).ok().stdout.splitlines()
        modes = {line.split()[5][1:]: line[:10] for line in listed if not line.startswith("d")}
        ours = run(["rpm", "-qp", "--qf", "[%{FILENAMES} %{FILEMODES:perms}\n]", rpm]).ok().stdout
        found = dict(line.split() for line in ours.splitlines())
        found = {path: mode for path, mode in found.items() if not mode.startswith("d")}
        differ = {path for path, mode in modes.items() if found.get(path) != mode}
        assert {path for path in differ if "changelog.gz" not in path} <= {
            f"/usr/share/python3/runtime.d/{name}.rtupdate",
            "/usr/share/zsh/vendor-completions/_gpuhook",
            "/usr/share/lintian/overrides/gpuhook",
        }
        assert found.keys() - modes.keys() <= {
            "/usr/lib/systemd/system-preset/80-gpuhook.preset",
            "/usr/share/licenses/gpuhook/LICENSE",
            "/usr/share/zsh/site-functions/_gpuhook",
        }


@pytest.mark.parametrize("name", EVERY)
def test_rpm_requires_the_libraries_of_the_debian_package(
    name: str, packages: dict[str, Path], rpms: dict[str, Path]
) -> None:
    """RPM names a library python3dist(NAME) or python3-NAME, in the same version as Debian."""
    depends = run(["dpkg-deb", "--field", packages[name], "Depends"]).ok().stdout
    wanted = dict(re.findall(r"python3-([a-z0-9-]+) \(>= ([0-9.]+)\)", depends))
    if "yaml" in wanted:
        wanted["pyyaml"] = wanted.pop("yaml").removesuffix(".0")
    if "protobuf" in wanted:  # Debian uses the C++ library's version numbers
        wanted["protobuf"] = wanted["protobuf"].replace("3.", "4.", 1)
    lines = run(["rpm", "-qp", "--requires", rpms[name]]).ok().stdout.splitlines()
    found = [
        re.match(r"\(python3dist\(([\w-]+)\) >= ([0-9.]+) or python3-\w+ >= \2\)", line)
        for line in lines
    ]
    assert {each[1]: each[2] for each in found if each} == wanted
    if name == "gpuhook":
        assert "python3 >= 3.11" in lines
    else:
        assert f"gpuhook = {__version__}-1" in lines
    assert (
        run(["rpm", "-qp", "--qf", "%{PACKAGER}", rpms[name]]).ok().stdout
        == f"{MAINTAINER} <{ADDRESS}>"
    )


def test_rpm_is_installed_and_removed_without_leftovers(system: Debian) -> None:
    before = _changed(system)
    said = system.call(*rpm(), "-i", "/gpuhook.rpm").stdout
    assert "run gpuhook install (/usr/share/doc/gpuhook/README.md)" in said
    assert f"version {__version__}" in system.call("gpuhook", "--version").stdout
    assert system.call("gpu-py", "--version").stdout == run(["runc", "--version"]).ok().stdout
    compiled = {path.name for path in (system.root / "usr/lib/gpuhook").rglob("*.pyc")}
    assert any(name.startswith("runtime_shim.cpython-") for name in compiled)
    wants = system.root / "etc/systemd/system/multi-user.target.wants"
    expected = ["gpuhook-cdi-refresh.path", "gpuhook-cdi-refresh.service", "gpuhook-watch.service"]
    assert sorted(path.name for path in wants.glob("gpuhook-*")) == expected
    system.call(*rpm(), "-i", "/gpuhook-simulate.rpm")
    assert system.call("gpuhook", "simulate", "/gpus", "--gpus", "2").stdout
    system.call("gpuhook", "simulate", "/gpus", "--remove")
    system.call(*rpm(), "-e", "gpuhook-simulate")
    assert not (system.root / "usr/lib/gpuhook/gpuhook_simulate").exists()
    system.call(*rpm(), "-e", "gpuhook")
    assert _changed(system) == before
    assert not (system.root / "usr/lib/gpuhook").exists()
    assert not (system.root / "run/gpuhook").exists()


@pytest.mark.parametrize("part", extensions.PACKAGES)
def test_each_additional_package_is_installed_and_removed_completely(
    system: Debian, part: str
) -> None:
    package, [name, *_] = extensions.PACKAGES[part], extensions.COMMANDS[part]
    system.call(*rpm(), "-i", "/gpuhook.rpm")
    before = _changed(system)
    missing = system.call("gpuhook", name, "--help", fails=True).stderr
    assert f"in the package {package}, which isn't installed" in missing
    system.call(*rpm(), "-i", f"/{package}.rpm")
    for each in extensions.COMMANDS[part]:
        assert f"gpuhook {each}" in system.call("gpuhook", each, "--help").stdout
    for unit in [unit for unit, owner in UNITS.items() if owner == package]:
        system.call("systemctl", "enable", unit)
    modules = system.root / "usr/lib/gpuhook/gpuhook" / part
    assert any(modules.rglob("*.pyc"))
    system.call(*rpm(), "-e", package)
    assert not modules.exists()
    assert _changed(system) == before


def test_an_upgrade_of_gpuhook_alone_names_the_missing_package(system: Debian) -> None:
    """An older gpuhook had the units in its own package, and one of them is enabled."""
    wants = system.root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / "gpuhook-metrics.service").symlink_to(
        "/usr/lib/systemd/system/gpuhook-metrics.service"
    )
    said = system.call(*rpm(), "-i", "/gpuhook.rpm")
    text = "gpuhook-metrics.service is enabled here, and is now in the package gpuhook-metrics"
    assert text in said.stderr + said.stdout
    assert "gpuhook-nri" not in said.stderr + said.stdout
    system.call(*rpm(), "-i", "/gpuhook-metrics.rpm")
    state = system.call("systemctl", "is-enabled", "gpuhook-metrics.service").stdout
    assert state == "enabled\n"
    again = system.call(*rpm(), "-U", "--force", "/gpuhook.rpm")
    assert text not in again.stderr + again.stdout


def test_yaml_is_found_in_site_packages_at_a_container_start(system: Debian) -> None:
    """Debian's system Python has no site-packages, so a container start searches it itself."""
    system.call(*rpm(), "-i", "/gpuhook.rpm")
    where = (
        "import sys; print(f'/usr/{sys.platlibdir}/python3.{sys.version_info[1]}/site-packages')"
    )
    folder = system.call("/usr/bin/python3", "-c", where).stdout.strip()
    system.call("mkdir", "-p", folder)
    packages = "/usr/lib/python3/dist-packages"
    system.call("sh", "-c", f"mv {packages}/yaml {packages}/_yaml {folder}/")
    program = (
        "import sys; sys.path.insert(0, '/usr/lib/gpuhook')\n"
        "from gpuhook.core.cdi import yaml_reader; print(yaml_reader.yaml.__file__)"
    )
    found = system.call("/usr/bin/python3", "-I", "-S", "-c", program).stdout
    assert found == f"{folder}/yaml/__init__.py\n"


def test_an_upgrade_replaces_stale_modules_and_keeps_disabled_units(system: Debian) -> None:
    system.call(*rpm(), "-i", "/gpuhook.rpm")
    system.call("systemctl", "disable", "gpuhook-watch.service")
    leave_stale_module(system)
    system.call(*rpm(), "-U", "--force", "/gpuhook.rpm")
    assert f"version {__version__}" in system.call("gpuhook", "--version").stdout
    wants = system.root / "etc/systemd/system/multi-user.target.wants"
    assert not (wants / "gpuhook-watch.service").is_symlink(), (
        "it stays as the administrator set it"
    )
    assert (wants / "gpuhook-cdi-refresh.path").is_symlink()


def test_removal_unregisters_gpu_py_from_the_engines(system: Debian) -> None:
    system.call(*rpm(), "-i", "/gpuhook.rpm")
    settings = system.root / "etc/docker/daemon.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(DAEMON_JSON)
    system.call("gpuhook", "install", "--engine", "docker")
    assert "gpu-py" in settings.read_text()
    system.call(*rpm(), "-e", "gpuhook")
    assert settings.read_text() == DAEMON_JSON


def test_rpm_removal_is_refused_while_a_cdi_spec_names_the_hook(
    system: Debian, installation: Installation
) -> None:
    simulate(installation, system.root / "gpus", "--gpus=2")
    system.call(*rpm(), "-i", "/gpuhook.rpm")
    system.call("gpuhook", "config", "set", "nvidia-container-cli.root=/gpus")
    system.call("gpuhook", "cdi", "generate", "--output", "/etc/cdi/by-hand.json")
    refused = system.call(*rpm(), "-e", "gpuhook", fails=True)
    assert "Run this first: rm /etc/cdi/by-hand.json" in refused.stderr + refused.stdout
    assert (system.root / "usr/bin/gpuhook-cdi-hook").exists()
    system.call("rm", "/etc/cdi/by-hand.json")
    system.call(*rpm(), "-e", "gpuhook")
    assert not (system.root / "usr/bin/gpuhook-cdi-hook").exists()
