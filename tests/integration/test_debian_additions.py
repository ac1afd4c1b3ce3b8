"""The additions to the Debian package gpuhook: each one, and an upgrade from one package.

The tests install them, like gpuhook, into copies of this Debian: see test_debian_package.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run
from harness.driver import simulate
from harness.installation import Installation
from harness.packages import ADDITIONS, EVERY, UNITS, Debian, as_one, debs, layer, without_gpuhook

from gpuhook.tools import extensions
from gpuhook.tools.cli import _shipped as shipped

PARTS = extensions.PACKAGES
# A command of each addition that works on a machine with two GPUs, and what the command prints.
WORK = {
    "cluster": (["labels"], "nvidia.com/gpu.count=2"),
    "metrics": (["stats", "--no-stream", "--format", "json"], "GPU-"),
    "hpc": (["slurm", "gres"], "Name=gpu"),
}
# The additions' commands that --help lists.
SHOWN = {name for name, row in extensions.commands().items() if row[2]}
WANTS = "etc/systemd/system/multi-user.target.wants"


@pytest.fixture(scope="module")
def packages() -> dict[str, Path]:
    return debs()


@pytest.fixture(scope="module")
def without(workspace: Path, packages: dict[str, Path]) -> Path:
    """The layer with the package files in the root folder, without the host's gpuhook."""
    files = {f"{name}.deb": path for name, path in packages.items()}
    return without_gpuhook(workspace / "deb-additions-without", files)


@pytest.fixture(scope="module")
def with_gpuhook(workspace: Path, without: Path) -> Path:
    """The layer with the package gpuhook installed."""
    with layer(workspace / "deb-additions-with", without) as made:
        made.call("dpkg", "-i", "/gpuhook.deb")
    return made.upper


@pytest.fixture
def bare(workspace: Path, without: Path) -> Iterator[Debian]:
    """A Debian with the package files in its root folder."""
    folder = workspace / "deb-additions-root"
    with layer(folder, without) as made:
        yield made
    run(["rm", "-rf", "--one-file-system", folder]).ok()


@pytest.fixture
def debian(workspace: Path, without: Path, with_gpuhook: Path) -> Iterator[Debian]:
    """A Debian with the package gpuhook installed."""
    folder = workspace / "deb-additions-root"
    with layer(folder, with_gpuhook, without) as made:
        yield made
    run(["rm", "-rf", "--one-file-system", folder]).ok()


@pytest.fixture
def with_gpus(debian: Debian, installation: Installation) -> Debian:
    """A Debian with gpuhook and a simulated driver."""
    simulate(installation, debian.root / "gpus", "--gpus=2")
    debian.call("gpuhook", "config", "set", "nvidia-container-cli.root=/gpus")
    return debian


def listed(debian: Debian) -> set[str]:
    """Return the additions' commands that --help lists."""
    lines = debian.call("gpuhook", "--help").stdout.splitlines()
    return {
        line.split()[0] for line in lines if line.startswith("  ")
    } & extensions.commands().keys()


def checks(debian: Debian) -> set[str]:
    """Return the names of the doctor's findings on a host with a kubelet."""
    folder = debian.root / "var/lib/kubelet/device-plugins"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kubelet.sock").touch()
    said = run(["chroot", debian.root, "/usr/bin/gpuhook", "doctor", "--format", "json"]).stdout
    return {each["check"] for each in json.loads(said)["findings"]}


@pytest.mark.parametrize("part", PARTS)
def test_each_additional_package_works_without_the_others(with_gpus: Debian, part: str) -> None:
    debian, package, before = with_gpus, PARTS[part], with_gpus.changed()
    debian.call("dpkg", "-i", f"/{package}.deb")
    words, prints = WORK[part]
    assert prints in debian.call("gpuhook", *words).stdout
    names = listed(debian)
    for other, every in extensions.COMMANDS.items():
        for name in every:
            assert (name in names) == (other == part and name in SHOWN)
            done = debian.call("gpuhook", name, "--help", fails=other != part)
            wanted = f"in the package {PARTS[other]}, which isn't installed"
            assert (wanted in done.stderr) == (other != part)
    assert ("device-plugin" in checks(debian)) == (part == "cluster")
    compiled = {
        path.parent.parent for path in debian.root.glob("usr/lib/gpuhook/gpuhook/*/*/*.pyc")
    }
    assert debian.root / "usr/lib/gpuhook/gpuhook" / part in compiled
    files = {*debian.call("gpuhook", "files").stdout.split()}
    here = {"gpuhook", package}
    for file in shipped.files("/usr/bin/gpuhook"):
        if path := file.path(shipped.OF_ADMINISTRATOR):
            assert (path in files) == (file.package in here)
    run(["rm", "-r", debian.root / "var/lib/kubelet"]).ok()
    debian.call("dpkg", "-P", package)
    run(["rm", "-rf", debian.root / "run/gpuhook"]).ok()
    assert debian.changed() == before


def test_commands_of_missing_packages_name_the_package(debian: Debian) -> None:
    assert not listed(debian)
    for part, every in extensions.COMMANDS.items():
        for name in every:
            said = debian.call("gpuhook", name, "--anything", fails=True).stderr
            assert said == (
                f"gpuhook: gpuhook {name} is in the package {PARTS[part]}, which isn't installed. "
                f"Install {PARTS[part]}.\n"
            )
    folders = {path.name for path in (debian.root / "usr/lib/gpuhook/gpuhook").iterdir()}
    assert not folders & PARTS.keys()
    assert checks(debian) >= {"launchers", "configuration"}


def test_a_purge_of_all_packages_leaves_no_files(bare: Debian) -> None:
    before = bare.changed()
    bare.call("dpkg", "-i", *(f"/{name}.deb" for name in EVERY))
    for unit in UNITS:
        bare.call("systemctl", "enable", unit)
    bare.call("dpkg", "-P", *EVERY)
    assert bare.changed() == before
    assert not (bare.root / "usr/lib/gpuhook").exists()


@pytest.fixture(scope="module")
def one_package(packages: dict[str, Path], workspace: Path) -> Path:
    return as_one(packages.values(), workspace / "deb-one")


@pytest.fixture
def with_one(bare: Debian, one_package: Path) -> Debian:
    """A Debian with the older single package, whose metrics and device plugin are enabled."""
    run(["cp", one_package, bare.root / "run/one.deb"]).ok()
    bare.call("dpkg", "-i", "/run/one.deb")
    for unit in ("gpuhook-metrics.service", "gpuhook-device-plugin.service"):
        bare.call("systemctl", "enable", unit)
    bare.call("dpkg", "-i", "/run/one.deb")  # this upgrade records that the units are enabled
    return bare


@pytest.mark.parametrize("names", [EVERY, EVERY[::-1]], ids=["additions first", "gpuhook first"])
def test_an_upgrade_from_one_package_keeps_enabled_units(
    with_one: Debian, names: tuple[str, ...]
) -> None:
    files = [f"/{name}.deb" for name in names]
    done = with_one.call("dpkg", "--auto-deconfigure", "-i", *files)  # as apt calls it
    assert "enabled here" not in done.stderr
    for unit, package in UNITS.items():
        owners = with_one.call("dpkg", "-S", f"*/{unit}").stdout
        assert {line.partition(":")[0] for line in owners.splitlines()} == {package}
        state = run(["chroot", with_one.root, "systemctl", "is-enabled", unit]).stdout.strip()
        assert state == ("disabled" if "nri" in unit else "enabled")
    assert listed(with_one) == SHOWN
    assert with_one.call("dpkg", "--audit").stdout == ""
    assert with_one.call("dpkg", "--verify", *EVERY).stdout == ""


def test_an_upgrade_of_gpuhook_alone_names_packages_of_enabled_units(with_one: Debian) -> None:
    done = with_one.call("dpkg", "-i", "/gpuhook.deb")
    for unit in ("gpuhook-metrics.service", "gpuhook-device-plugin.service"):
        package = UNITS[unit]
        assert (
            f"{unit} is enabled here, and is now in the package {package}: install {package}\n"
            in (done.stderr)
        )
    assert "gpuhook-nri.service" not in done.stderr
    assert "gpuhook-hpc" not in done.stderr
    with_one.call("dpkg", "-i", "/gpuhook-metrics.deb")
    assert with_one.call("systemctl", "is-enabled", "gpuhook-metrics.service").stdout == "enabled\n"
    again = with_one.call("dpkg", "-i", "/gpuhook.deb").stderr
    assert "gpuhook-metrics.service is enabled" not in again
    assert "gpuhook-device-plugin.service is enabled" in again


def test_a_purge_after_an_upgrade_without_additions_leaves_no_files(
    with_one: Debian, packages: dict[str, Path]
) -> None:
    del packages
    with_one.call("dpkg", "-i", "/gpuhook.deb")
    assert (with_one.root / WANTS / "gpuhook-metrics.service").is_symlink()
    with_one.call("dpkg", "-P", "gpuhook")
    assert {path for path in with_one.changed() if "gpuhook" in path} == set()


def test_an_upgrade_of_gpuhook_alone_names_what_slurm_and_engines_need(with_one: Debian) -> None:
    settings = with_one.root / "etc/slurm/slurm.conf"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("Prolog=/usr/libexec/gpuhook/slurm/prolog\n")
    done = with_one.call("dpkg", "-i", "/gpuhook.deb")
    says = "/etc/slurm/slurm.conf needs the package gpuhook-hpc: install gpuhook-hpc\n"
    assert says in done.stderr
    with_one.call("dpkg", "-i", "/gpuhook-hpc.deb")
    with_one.call("gpuhook", "install", "--engine", "enroot")
    assert "gpuhook-hpc" not in with_one.call("dpkg", "-i", "/gpuhook.deb").stderr
    hook = with_one.root / "etc/enroot/hooks.d/98-gpuhook.sh"
    assert hook.exists()
    with_one.call("dpkg", "-r", "gpuhook-hpc")
    assert not hook.exists()


def test_removal_of_the_hpc_package_restores_machine_settings(with_gpus: Debian) -> None:
    debian = with_gpus
    debian.call("dpkg", "-i", "/gpuhook-hpc.deb")
    root = debian.root / "var/lib/machines/one"
    for name in ("etc", "usr/lib", "lib/x86_64-linux-gnu"):
        (root / name).mkdir(parents=True)
    before = debian.changed()
    words = ["--engine=nspawn", "--machine=one", "--device=nvidia.com/gpu=0"]
    debian.call("gpuhook", "install", *words)
    assert any("one.nspawn" in path for path in debian.changed())
    done = debian.call("dpkg", "-r", "gpuhook-hpc")
    assert "one.nspawn" in done.stdout
    assert not any("one.nspawn" in path for path in debian.changed() - before)
    debian.call("dpkg", "-r", "gpuhook")


def test_every_addition_is_only_suggested(packages: dict[str, Path]) -> None:
    fields = {
        field: run(["dpkg-deb", "--field", packages["gpuhook"], field]).ok().stdout
        for field in ("Depends", "Recommends", "Suggests")
    }
    for name in ADDITIONS:
        assert [field for field, text in fields.items() if name in text] == ["Suggests"]
        assert run(["dpkg-deb", "--field", packages[name], "Architecture"]).ok().stdout == "all\n"
