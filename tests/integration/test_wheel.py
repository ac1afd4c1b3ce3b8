"""Contents of wheel and sdist: all of the package, the programs, and nothing else."""

import json
import os
import shutil
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from build_launcher import NAMES
from harness.commands import run
from harness.images import REPOSITORY
from harness.installation import Installation

SOURCES = REPOSITORY / "src"
DEFAULT = REPOSITORY / "config/config.toml"


def pip(command: str, *words: str | Path) -> None:
    quietly = ["--quiet", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", command, *quietly, *words], timeout=600.0).ok()


def build(target: str, source: Path, folder: Path) -> Path:
    python = run([REPOSITORY / "scripts/lib/builder"], timeout=600.0).ok().stdout.strip()
    words = (python, "-m", "hatchling", "build", "--target", target, "--directory", folder)
    run(words, cwd=source, timeout=600.0).ok()
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", REPOSITORY, tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", REPOSITORY, tmp_path_factory.mktemp("sdist"))


def members(wheel: zipfile.ZipFile, under: str) -> dict[str, zipfile.ZipInfo]:
    """Return the members whose path contains ``under``, by the rest of the path after it."""
    found = {}
    for member in wheel.infolist():
        _, marker, name = member.filename.partition(under)
        if marker:
            found[name] = member
    return found


def test_the_wheel_has_exactly_the_files_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = {
        str(path.relative_to(SOURCES))
        for path in (SOURCES / "gpuhook").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {
        name for name in wheel.namelist() if ".data/" not in name and ".dist-info/" not in name
    }
    assert names == package
    for name in (
        "py.typed", "tools/config/config.toml", "tools/cli/doctor.py",
        "tools/cdi/units/gpuhook-cdi-refresh.service", "tools/cli/man/gpu-py.8",
        "tools/cli/units/gpuhook-watch.service",
    ):  # fmt: skip
        assert f"gpuhook/{name}" in names
    assert not any(name.endswith(".c") for name in names)


def test_the_simulator_is_built_as_a_separate_wheel(tmp_path: Path) -> None:
    package = REPOSITORY / "simulate/src"
    wheel = zipfile.ZipFile(build("wheel", REPOSITORY / "simulate", tmp_path))
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == {
        str(path.relative_to(package))
        for path in (package / "gpuhook_simulate").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "gpuhook_simulate/vendors/nvidia/c/nvml.h" in wheel.namelist()
    assert "licenses/LICENSE" in members(wheel, ".dist-info/")


def test_the_default_configuration_in_the_wheel_is_the_repositorys(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("gpuhook/tools/config/config.toml") == DEFAULT.read_bytes()


def test_an_sdist_holds_the_sources_and_builds_the_same_wheel(
    sdist: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        default = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/config/config.toml")
        assert default is not None
        assert default.read() == DEFAULT.read_bytes()
    assert {"README.md", "LICENSE", "launchers/launcher.c", "tests/unit/conftest.py"} <= names
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, sdist)
    [built] = tmp_path.iterdir()
    crc = {member.filename: member.CRC for member in wheel.infolist()}
    members_of_built = zipfile.ZipFile(built).infolist()
    assert {member.filename: member.CRC for member in members_of_built} == crc


def test_the_launchers_are_executable_and_the_compiled_ones_equal(wheel: zipfile.ZipFile) -> None:
    scripts = members(wheel, ".data/scripts/")
    assert set(scripts) == {"gpuhook", *NAMES}
    assert wheel.read(scripts["gpuhook"]) == (REPOSITORY / "launchers/gpuhook").read_bytes()
    compiled = {wheel.read(scripts[name]) for name in NAMES}
    assert len(compiled) == 1
    assert compiled.pop().startswith(b"\x7fELF")
    for member in scripts.values():
        assert stat.S_IMODE(member.external_attr >> 16) & 0o111 == 0o111


def test_the_wheel_has_exactly_the_documented_entry_points(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(members(wheel, ".dist-info/")["entry_points.txt"]).decode()
    commands = {line.partition(" = ")[0] for line in text.splitlines() if " = " in line}
    assert commands == {"gpu-docker", "gpuhook-ctk"}


def test_a_moved_virtual_environment_still_works(
    installation: Installation, tmp_path: Path
) -> None:
    """The command is called by its own path and by a link, and PYTHONPATH affects neither."""
    moved, link = tmp_path / "moved to here", tmp_path / "gpuhook"
    shutil.copytree(installation.bin.parent, moved, symlinks=True)
    link.symlink_to(moved / "bin/gpuhook")
    (tmp_path / "click.py").write_text("broken\n")
    for command in (moved / "bin/gpuhook", link):
        env = {"PYTHONPATH": str(tmp_path)}
        done = run([command, "doctor", "--format=json"], env=env, cwd=tmp_path)
        said = {each["check"]: each["message"] for each in json.loads(done.stdout)["findings"]}
        assert f"from {moved}/bin/python" in said["python"]
        assert f"are in {moved}/bin" in said["launchers"]
        assert run([command, "no-such-command"]).status == 2


def test_the_wheel_is_tagged_for_the_building_machine(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(members(wheel, ".dist-info/")["WHEEL"]).decode()
    assert f"Tag: py3-none-linux_{os.uname().machine}\n" in text
    assert "Root-Is-Purelib: true\n" in text  # next to bin, where the launcher looks


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_without_a_compiler_pip_says_what_to_install(compiler: str, tmp_path: Path) -> None:
    words = ("-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, REPOSITORY)
    done = run([sys.executable, *words], env={"CC": compiler}, timeout=600.0).failed()
    said = f"gpuhook: {compiler} can't compile gpu-py: "
    assert [line for line in done.stderr.splitlines() if said in line]
    assert "Install gcc and the headers of the C library" in done.stderr
    assert not list(tmp_path.iterdir())


def test_wheel_metadata_names_python_version_and_dependencies(wheel: zipfile.ZipFile) -> None:
    info = members(wheel, ".dist-info/")
    text = wheel.read(info["METADATA"]).decode()
    assert "Requires-Python: >=3.11\n" in text
    for name in ("nvidia-ml-py", "toml", "click", "pyroute2"):
        assert f"Requires-Dist: {name}>=" in text
    assert "licenses/LICENSE" in info


def test_wheel_paths_stay_inside_the_installation(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        assert not name.startswith("/")
        assert ".." not in Path(name).parts
