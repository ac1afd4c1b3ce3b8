"""Refusals of gpuhook simulate before any change, and its message if it isn't installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import vendors
from gpuhook import __version__
from gpuhook.base.errors import EngineError, SimulateError
from gpuhook.tools.cli import cli
from gpuhook_simulate import command
from gpuhook_simulate.command import simulate
from gpuhook_simulate.place import MARKER
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import Options
from gpuhook_simulate.vendors.nvidia.machine import make_machine
from gpuhook_simulate.vendors.nvidia.state import BuildState, make

SIMULATOR = "def simulate(tree, count, settings):\n    raise AssertionError('was called')\n"

# Words of the command line -> pattern of the error message.
REFUSED = {
    (
        "--vendor",
        "nobody",
    ): r"no vendor 'nobody'. Use one of these: nvidia, .*bare\.",
    ("--vendor", "a\x1bb"): r"There is no vendor 'a\\x1bb'",
    ("--vendor", "bare"): "The devices of bare can't be simulated",
    ("--set", "a=1"): "NVIDIA's simulator has no setting 'a'. Use some of platform, model, ",
    ("--set", "model"): "'model' is not a setting",
    ("--set", "model=T4", "--set", "model=L4"): "'model=L4' is not a setting",
    ("--set", "model=T4", "--model", "T4"): "'model=T4' is not a setting",
    ("--set", "minors=x"): "'x' is not a number in --minors",
    ("--vendor", "acme", "--model", "H200"): "--model is only for nvidia, not for acme",
    ("--vendor", "acme", "--no-drm"): "--drm is only for nvidia",
    ("--vendor", "acme", "--compat32"): "--compat32 is only for nvidia",
    ("--vendor", "acme", "--mig", "0:"): "--mig is only for nvidia",
    ("--vendor", "acme", "--format", "json"): "--format is only for nvidia",
    ("--vendor", "acme", "--imex-channels", "0"): "--imex-channels is only for nvidia",
    ("--vendor", "acme", "--gpus", "-1"): "-1 devices can't be simulated",
    ("--vendor", "acme", "--set", "a"): "'a' is not a setting",
    ("--vendor", "acme", "--set", "=1"): "'=1' is not a setting",
    ("--vendor", "acme", "--set", "a=1", "--set", "a=2"): "'a=2' is not a setting",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_invalid_simulate_options_are_refused_before_any_change(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    root = tmp_path / "root"
    packages = tmp_path / "packages"
    with (
        vendors.known(packages, "acme", simulate=SIMULATOR),
        vendors.known(packages, "bare"),
        pytest.raises(SimulateError, match=REFUSED[words]),
    ):
        CliRunner().invoke(cli, ["simulate", str(root), *words], catch_exceptions=False)
    assert not root.exists()


SAME = {
    "platform": "wsl", "model": "H100,T4", "driver-version": "570.86.15", "cuda-version": "12.4",
    "minors": "3,1", "lost": "1", "nvlink": "pairs", "unplug": "0", "init-seconds": "0.5",
    "fail": "not-loaded", "driver-files": "/", "drm": "no", "compat32": "yes",
    "imex-channels": "2", "features": "gds", "libdir": "/usr/lib64", "seed": "word",
}  # fmt: skip


def test_nvidia_settings_have_the_same_effect_as_their_options() -> None:
    flags = {"drm": ["--no-drm"], "compat32": ["--compat32"]}
    by_options = [word for name in SAME for word in flags.get(name, [f"--{name}", SAME[name]])]
    by_options += ["--mig=0:1g.10gb,2g.20gb", "--mig=1:"]
    words = [f"{name}={value}" for name, value in SAME.items()]
    words += ["mig=0:1g.10gb,2g.20gb", "mig=1:"]
    by_settings = [f"--set={word}" for word in words]
    with simulate.make_context("simulate", ["DIR", *by_settings]) as context:
        found = command._set_options(context.params["settings"])
    assert {word.partition("=")[0] for word in words} == {*command._SETTINGS}
    with simulate.make_context("simulate", ["DIR", *by_options]) as context:
        assert {name: context.params[name] for name in found} == found
    defaults = simulate.make_context("simulate", ["DIR"]).params
    assert [name for name in found if defaults[name] == found[name]] == []


def test_a_simulator_import_error_is_reported_with_its_cause(tmp_path: Path) -> None:
    words = ["simulate", str(tmp_path / "root"), "--vendor", "acme"]
    with (
        vendors.known(tmp_path, "acme", simulate="import no_such_module"),
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
    ):
        CliRunner().invoke(cli, words, catch_exceptions=False)


def test_remove_is_accepted_for_every_vendor(tmp_path: Path) -> None:
    words = ["simulate", str(tmp_path), "--vendor", "acme", "--remove"]
    with pytest.raises(SimulateError, match="is not a simulated driver root"):
        CliRunner().invoke(cli, words, catch_exceptions=False)


def without(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with a Python that finds gpuhook, but not gpuhook_simulate."""
    code = (
        "import sys, importlib.util; from gpuhook.tools.cli import main\n"
        "sys.path = [each for each in sys.path if not each.endswith('simulate/src')]\n"
        "assert importlib.util.find_spec('gpuhook_simulate') is None\n"
        "main()"
    )
    argv = [sys.executable, "-c", code, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [["DIR", "--gpus", "8"], ["DIR"], [], ["--remove", "DIR"]])
def test_simulate_without_its_package_names_the_package_to_install(words: list[str]) -> None:
    done = without("simulate", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gpuhook: gpuhook simulate needs the package gpuhook-simulate, which isn't installed. Run "
        "pip install 'gpuhook[simulate]', or install the package gpuhook-simulate.\n"
    )


def test_simulate_help_says_that_the_package_is_missing() -> None:
    for words in (["simulate", "--help"], ["help", "simulate"]):
        assert "needs the package gpuhook-simulate, which" in without(*words).stdout
    assert "simulate " in without("--help").stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [(["simulate", "DIR"], 1), (["files"], 0), (["help", "simulate"], 0)],
)
def test_a_simulate_package_of_another_version_is_refused(
    words: list[str], status: int, tmp_path: Path
) -> None:
    """pip upgrades one of the two packages, and only reports that the other no longer fits."""
    package = tmp_path / "gpuhook_simulate"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (package / "command.py").write_text("from gpuhook.base.errors import WasThereOnce\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from gpuhook.tools.cli import main; main()"
    )
    argv = [sys.executable, "-c", code, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    said = f"gpuhook: gpuhook-simulate has version 0.0.1, and gpuhook has version {__version__}. "
    assert done.stderr.startswith(said) if status else not done.stderr


CHANGES = (
    ["--xid=79", "--gpu=0"],
    ["--process=0,99,1"],
    ["--end=7"],
    ["--lost=0"],
    ["--mig=0:1g.18gb"],
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Files of a simulated machine that a change reads or writes, without its libraries."""
    root = tmp_path / "root"
    options = Options(root=str(root), gpus=1, models=("H200",))
    built = make_machine(options, "580.105.08")
    made = BuildState(options, "580.105.08", "/usr/lib")
    make(Tree(str(root)), made, built)
    (root / MARKER).touch()
    (root / "simulate/activity").write_text("0 0 process 7 compute 1 0 0 0 0\n")
    return root


def put_a_link(path: Path, outside: Path) -> None:
    """Move a file or folder outside, and put a link to it in its place."""
    path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
@pytest.mark.parametrize("name", ["simulate", "simulate/events", "simulate/activity"])
def test_links_in_a_simulated_root_are_not_followed(
    machine: Path, tmp_path: Path, name: str, change: list[str]
) -> None:
    outside = tmp_path / "outside"
    put_a_link(machine / name, outside)
    at = outside / "events" if name == "simulate" else outside
    before = at.read_bytes()
    CliRunner().invoke(simulate, [str(machine), *change])
    assert at.read_bytes() == before


def test_writing_through_a_link_out_of_the_tree_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/in").mkdir(parents=True)
    (tmp_path / "root/to-in").symlink_to("in")
    (tmp_path / "root/out").symlink_to(tmp_path / "outside")
    (tmp_path / "root/up").symlink_to("../outside")
    tree = Tree(str(tmp_path / "root"))
    tree.text("to-in/new/file", "text")
    assert (tmp_path / "root/in/new/file").read_text() == "text"
    for way in ("out", "up", "out/new", "../outside", "in/../../outside"):
        with pytest.raises(EngineError):
            tree.text(f"{way}/file", "text")
    assert [*(tmp_path / "outside").iterdir()] == []
