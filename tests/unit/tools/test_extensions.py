"""The command line without some extension packages, and the table of their commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpuhook.tools import extensions
from gpuhook.tools.cli import _shipped as shipped

REPOSITORY = Path(__file__).parents[3]
COMMANDS = [(part, name) for part, every in extensions.COMMANDS.items() for name in every]
ALIASES = ("ps", "top")  # aliases of stats, which have no page of their own
# An import finder that hides the named packages, as if they weren't installed.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.removeprefix("gpuhook.").split(".")[0] in {parts!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def python(parts: tuple[str, ...], code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can't import these parts of gpuhook."""
    program = WITHOUT.format(parts=parts) + code
    argv = [sys.executable, "-c", program, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def gpuhook(parts: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    return python(parts, "from gpuhook.tools.cli import main; main()", *words)


def test_tables_list_the_commands_and_modules_of_every_package() -> None:
    assert len(extensions.installed()) == len(extensions.PACKAGES)
    for part, each in zip(extensions.PACKAGES, extensions.installed(), strict=True):
        assert each.__name__ == f"gpuhook.{part}.extension"
        assert {*extensions.COMMANDS[part]} == {*each.COMMANDS}
        assert {*extensions.MODULES[part]} == {*getattr(each, "MODULES", {})}


@pytest.mark.parametrize(("part", "name"), COMMANDS)
@pytest.mark.parametrize("words", [["{}"], ["{}", "--help"], ["help", "{}"], ["{}", "--all", "x"]])
def test_a_command_of_a_missing_package_names_the_package(
    part: str, name: str, words: list[str]
) -> None:
    package = extensions.PACKAGES[part]
    done = gpuhook((part,), *(word.format(name) for word in words))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"gpuhook: gpuhook {name} is in the package {package}, which isn't installed. "
        f"Install {package}.\n"
    )


@pytest.mark.parametrize("part", extensions.PACKAGES)
def test_only_commands_of_installed_packages_are_listed(part: str) -> None:
    listed = [
        line.split()[0]
        for line in gpuhook((part,), "--help").stdout.splitlines()
        if line.startswith("  ")
    ]
    for other, name in COMMANDS:
        shown = bool(extensions.commands()[name][2])  # --help lists only commands with a group
        assert (name in listed) == (other != part and shown)
    assert {"doctor", "install", "list"} <= {*listed}


def test_a_word_similar_to_a_missing_command_names_no_package() -> None:
    done = gpuhook(("metrics",), "metric")
    assert done.returncode == 2
    assert "No such command 'metric'." in done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--engine=nspawn", "--machine=one"], "Support for systemd-nspawn"),
        (["--engine=lxc", "--container=one"], "Support for LXC"),
        (["--engine=enroot"], "gpuhook apply, which enroot's hook runs,"),
        (["--engine=docker", "--engine=enroot"], "gpuhook apply, which enroot's hook runs,"),
    ],
)
def test_an_engine_needing_a_missing_package_is_refused(
    words: list[str], what: str, tmp_path: Path
) -> None:
    done = gpuhook(("hpc",), "install", *words, "--prefix", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"gpuhook: {what} is in the package gpuhook-hpc, which isn't installed. "
        "Install gpuhook-hpc.\n"
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("part", extensions.PACKAGES)
def test_files_lists_only_files_of_installed_packages(part: str) -> None:
    package = extensions.PACKAGES[part]
    every = [*shipped.files("/usr/bin/gpuhook")]
    theirs = {each.path(shipped.OF_ADMINISTRATOR) for each in every if each.package == package}
    others = {each.path(shipped.OF_ADMINISTRATOR) for each in every if each.package != package}
    assert theirs
    listed = {*gpuhook((part,), "files").stdout.splitlines()}
    assert listed == others - {None}


def test_each_package_has_the_files_of_its_commands() -> None:
    found: dict[str, set[str]] = {}
    for file in shipped.files("/usr/bin/gpuhook"):
        found.setdefault(file.package, set()).add(file.name)
    pages = {
        package: {f"gpuhook-{name}.1" for name in extensions.COMMANDS[part] if name not in ALIASES}
        for part, package in extensions.PACKAGES.items()
    }
    assert found["gpuhook-kubernetes"] == pages["gpuhook-kubernetes"] | {
        "gpuhook-device-plugin.service",
        "gpuhook-nri.service",
    }
    assert found["gpuhook-metrics"] == pages["gpuhook-metrics"] | {"gpuhook-metrics.service"}
    assert found["gpuhook-hpc"] == pages["gpuhook-hpc"] | {"epilog", "prolog"}
    assert {"gpuhook.1", "gpuhook-doctor.1", "gpuhook-mps.service"} <= found["gpuhook"]


def test_core_modules_import_without_the_extension_packages() -> None:
    """The test leaves out programs, because they start when they are imported."""
    sources = REPOSITORY / "src"
    names = [
        ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((sources / "gpuhook").rglob("*.py"))
        if path.relative_to(sources).parts[1] not in extensions.PACKAGES
        and path.name not in ("__main__.py", "_start.py")
    ]
    code = "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = python((*extensions.PACKAGES,), code, *names)
    assert (done.returncode, done.stderr) == (0, "")


# Limit of non-blank lines of Python on a host that has only the package gpuhook.
MOST = 47_000


def test_gpuhook_without_extensions_stays_below_the_line_limit() -> None:
    sources = REPOSITORY / "src/gpuhook"
    lines = sum(
        sum(1 for line in path.read_text().split("\n") if line.strip())
        for path in sources.rglob("*.py")
        if path.relative_to(sources).parts[0] not in extensions.PACKAGES
    )
    assert lines < MOST
