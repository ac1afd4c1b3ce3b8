"""Commands about the whole machine, where one vendor's driver fails beside another's that works."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machines import gpu, machine

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import DriverError, GpuhookError, NoDriverError
from gpuhook.start import contract
from gpuhook.start.inventory.model import Inventory
from gpuhook.tools.cli import cli
from gpuhook.vendors import registry
from gpuhook.vendors.amd.vendor import VENDOR as AMD
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA

Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command on a machine with a GPU of NVIDIA's and a driver of AMD's that fails."""
    found = machine(gpu(0, 0))

    def look(vendor: contract.Vendor, _: Config) -> Inventory:
        if vendor is NVIDIA:
            return found
        raise (DriverError if vendor is AMD else NoDriverError)(f"{vendor.names.TITLE}?", "Mend it")

    for names in registry.KNOWN.values():
        vendor = contract.load(names)
        monkeypatch.setattr(type(vendor), "discover", look)
    config = tmp_path / "config.toml"
    config.write_text(f'[gpuhook]\nstate-dir = "{tmp_path}/state"\n')
    monkeypatch.setattr("gpuhook.tools.cli.cdi_generate.our_program", lambda *_: "/bin/true")
    return lambda *words: CliRunner().invoke(cli, [*words, "--config", str(config)])


def without(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    known = {name: names for name, names in registry.KNOWN.items() if name != vendor}
    monkeypatch.setattr(registry, "KNOWN", known)


@pytest.mark.parametrize(
    "words", [["info"], ["info", "--format=json"], ["list"], ["list", "--format=json"],
              ["refresh"], ["cdi", "generate"]], ids=" ".join,
)  # fmt: skip
def test_the_other_vendor_is_shown_and_the_command_fails(call: Call, words: list[str]) -> None:
    done = call(*words)
    assert re.search("NVIDIA H200|1 GPUs|nvidia.com/gpu", done.output)
    assert isinstance(done.exception, GpuhookError)
    assert "AMD?" in str(done.exception)


def test_a_driver_that_is_not_there_is_nothing_to_speak_of(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "amd")
    assert call("info").exit_code == 0


def test_where_there_is_nothing_else_it_is_the_error(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "nvidia")
    done = call("info")
    assert "AMD?" in str(done.exception)
    assert done.output == ""
