"""Results of scripts/release: everything built twice, checksums and a bill of materials.

The image is left out. The tests of the image itself show that it is the same each time.
"""

import hashlib
import json
import os
import re
import zipfile
from pathlib import Path

import pytest
from build_launcher import MACHINES, NAMES
from harness.commands import run
from harness.images import REPOSITORY
from harness.packages import ADDITIONS, released

from gpuhook import __version__

LINUX = "manylinux_2_17_{0}.manylinux2014_{0}.musllinux_1_1_{0}"
WHEELS = {
    machine: f"gpuhook-{__version__}-py3-none-{LINUX.format(machine)}.whl" for machine in MACHINES
}
FILES = {
    *WHEELS.values(),
    f"gpuhook-{__version__}.tar.gz",
    f"gpuhook_{__version__}_amd64.deb",
    f"gpuhook_{__version__}_arm64.deb",
    f"gpuhook_simulate-{__version__}-py3-none-any.whl",
    f"gpuhook_simulate-{__version__}.tar.gz",
    *(f"{name}_{__version__}_all.deb" for name in ADDITIONS),
    f"gpuhook-{__version__}-1.x86_64.rpm",
    f"gpuhook-{__version__}-1.aarch64.rpm",
    *(f"{name}-{__version__}-1.noarch.rpm" for name in ADDITIONS),
    f"gpuhook-{__version__}.cdx.json",
}
E_MACHINES = {"x86_64": 62, "aarch64": 183}  # elf.h


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


def test_the_bill_of_materials_names_every_file(made: Path) -> None:
    document = json.loads((made / f"gpuhook-{__version__}.cdx.json").read_text())
    sums = dict(line.split()[::-1] for line in (made / "SHA256SUMS").read_text().splitlines())
    listed = {each["name"]: each["hashes"][0]["content"] for each in document["components"]}
    assert listed == {name: sums[name] for name in FILES if not name.endswith(".json")}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_launcher_is_static_for_each_machine(made: Path, machine: str, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(made / WHEELS[machine])
    scripts = [name for name in wheel.namelist() if "/scripts/" in name]
    contents = {name.rpartition("/")[2]: wheel.read(name) for name in scripts}
    assert len({contents[name] for name in NAMES}) == 1
    program = tmp_path / "gpu-py"
    program.write_bytes(contents["gpu-py"])
    program.chmod(0o755)
    head = contents["gpu-py"][:20]
    assert head[:4] == b"\x7fELF"
    assert int.from_bytes(head[16:18], "little") == 3, "it is position-independent"
    assert int.from_bytes(head[18:20], "little") == E_MACHINES[machine]
    headers = run(["readelf", "--wide", "--segments", "--dynamic", program]).ok().stdout
    assert "INTERP" not in headers
    assert "NEEDED" not in headers
    assert "GNU_RELRO" in headers
    if machine == os.uname().machine:
        done = run([program, "--version"])
        # If this host has a configuration, the program starts Python, which has no gpuhook here.
        is_python = "No module named 'gpuhook'" in done.stderr
        assert is_python or done.ok().stdout == run(["runc", "--version"]).ok().stdout


@pytest.mark.parametrize("package", ["deb", "rpm"])
def test_packages_have_the_wheels_launcher(made: Path, package: str, tmp_path: Path) -> None:
    names = {"deb": ("amd64", "arm64"), "rpm": MACHINES}[package]
    for machine, name in zip(MACHINES, names, strict=True):
        [file] = made.glob(f"gpuhook[_-]{__version__}*[._]{name}.{package}")  # no addition's
        if package == "deb":
            run(["dpkg-deb", "--extract", file, tmp_path / name]).ok()
            digest = hashlib.sha256((tmp_path / name / "usr/bin/gpu-py").read_bytes()).hexdigest()
        else:
            words = ("-qp", "--qf", "[%{FILENAMES} %{FILEDIGESTS}\n]", file)
            [digest] = re.findall(
                "^/usr/bin/gpu-py (.*)$", run(["rpm", *words]).ok().stdout, re.MULTILINE
            )
        wheel = zipfile.ZipFile(made / WHEELS[machine])
        [script] = [each for each in wheel.namelist() if each.endswith("/scripts/gpu-py")]
        assert digest == hashlib.sha256(wheel.read(script)).hexdigest()


def test_leaving_out_the_image_is_refused_except_in_a_dry_run(said: str) -> None:
    assert "git tag" not in said
    assert run([REPOSITORY / "scripts/release", "--without-image"]).failed().stderr == (
        "release: --without-image is for --dry-run: a release has all parts\n"
    )
