"""What commands print on narrow terminals: names, UUIDs and paths stay whole, to be copied."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fabricated import Tree
from machines import gpu, machine, mig

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import NoDriverError
from gpuhook.start import contract
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.cli import _screen, cli
from gpuhook.tools.doctor import Case, examine
from gpuhook.tools.doctor.finding import failure, note, ok, warning
from gpuhook.tools.running.holders import Container, Running
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA

NAME = "my-training-job-of-a-team-with-a-long-name"
POD = Container("p" * 64, "kubernetes", 2, "python", {(195, 4)}, "trainer-0", "research", "main")
Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tree: Tree) -> Call:
    """Run a command on a machine with eight GPUs, some in parts, and containers that have them."""
    found = machine(
        *(gpu(n, n) for n in range(7)), gpu(7, 7, (mig(0, 1, 12, 13), mig(1, 2, 21, 22)))
    )

    def look(vendor: contract.Vendor, _: Config) -> Inventory:
        if vendor is not NVIDIA:
            raise NoDriverError("?", "?")
        return found

    for names in registry.KNOWN.values():
        monkeypatch.setattr(type(contract.load(names)), "discover", look)
    listing = importlib.import_module("gpuhook.tools.cli.list")
    named = Container(NAME, "docker", 1, "python", {node.numbers for node in found.nodes})
    monkeypatch.setattr(listing, "running", lambda *_: Running([named, POD], ()))
    findings = [
        ok("a", "Found " + "/opt/a/very/long/path/that/nobody/breaks/" * 2),
        note("b", "The GPU-00000000-1111-2222-3333-444444444444 is here", "Take " + NAME),
        warning("c", "x " * 60, "y " * 60),
        failure("d", "No /dev/nvidia-caps/nvidia-cap12345, and no /dev/dri/renderD128", "Make it"),
    ]
    doctor = importlib.import_module("gpuhook.tools.cli.doctor")
    monkeypatch.setattr(doctor, "examine", lambda case: examine(case, [lambda _: findings]))
    config = tmp_path / "config.toml"
    config.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n')
    monkeypatch.setattr(Case, "of_this_machine", lambda *_: tree.case)
    monkeypatch.setattr("gpuhook.tools.cli.cdi_generate.our_program", lambda *_: "/bin/true")

    def run(width: int, *words: str) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr(_screen, "_ENDLESS", width)  # there is no terminal, which has one
            return CliRunner().invoke(cli, [*words, "--config", str(config)])

    return run


@pytest.mark.parametrize("width", [80, 60, 40, 20])
@pytest.mark.parametrize(
    "words",
    [["info"], ["list"], ["list", "--files"], ["doctor"], ["explain", "--gpus=all"],
     ["explain", "-e", "NVIDIA_VISIBLE_DEVICES=9"], ["device-plugin", "--dry-run"]],
    ids=" ".join,
)  # fmt: skip
def test_no_word_is_broken(call: Call, words: list[str], width: int) -> None:
    wide, narrow = call(1000, *words), call(width, *words)
    assert wide.exit_code == narrow.exit_code
    assert {*narrow.stdout.split()} <= {*wide.stdout.split()}
    uuids = {word for word in wide.stdout.split() if word.startswith(("GPU-", "MIG-"))}
    assert uuids <= {*narrow.stdout.split()}


@pytest.mark.parametrize("width", [80, 60])
def test_containers_are_named_whole(call: Call, width: int) -> None:
    words = call(width, "list").stdout.replace(",", " ").split()
    assert f"docker:{NAME}" in words
    assert "research/trainer-0/main" in words
