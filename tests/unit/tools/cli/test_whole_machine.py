"""Commands about the whole host: a failing driver, narrow terminals, and the list."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fabricated import Tree
from machines import gpu, machine, mig

from gpuhook.base.errors import GpuhookError
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.monitor.containers.device_users import RunningContainer, RunningContainers
from gpuhook.tools.cli import _screen, cli
from gpuhook.tools.doctor import Case, examine
from gpuhook.tools.doctor.finding import failure, note, ok, warning
from gpuhook.tools.running.names import Names
from gpuhook.vendors import registry
from gpuhook.vendors.amd.vendor import VENDOR as AMD

Call = Callable[..., Result]


@pytest.fixture
def call(finds: Callable[..., None], config: list[str]) -> Call:
    """A function that runs a command on a machine with an NVIDIA GPU and a failing AMD driver."""
    finds(machine(gpu(0, 0)), failing=AMD)
    return lambda *words: CliRunner().invoke(cli, [*words, *config])


def without(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    known = {name: names for name, names in registry.BUILT_IN.items() if name != vendor}
    monkeypatch.setattr(registry, "BUILT_IN", known)


@pytest.mark.parametrize(
    "words", [["info"], ["info", "--format=json"], ["list"], ["list", "--format=json"],
              ["refresh"], ["cdi", "generate"]], ids=" ".join,
)  # fmt: skip
def test_a_failing_driver_fails_the_command_but_other_vendors_are_shown(
    call: Call, words: list[str]
) -> None:
    done = call(*words)
    assert re.search("NVIDIA H200|1 GPUs|nvidia.com/gpu", done.output)
    assert isinstance(done.exception, GpuhookError)
    assert "AMD?" in str(done.exception)


def test_info_succeeds_without_the_driver_of_a_second_vendor(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "amd")
    assert call("info").exit_code == 0


def test_the_error_of_the_only_driver_fails_the_command(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "nvidia")
    done = call("info")
    assert "AMD?" in str(done.exception)
    assert done.output == ""


# Narrow terminals -----------------------------------------------------------------------------


NAME = "my-training-job-of-a-team-with-a-long-name"
POD = RunningContainer(
    "p" * 64, "kubernetes", 2, "python", {(195, 4)}, "trainer-0", "research", "main"
)


@pytest.fixture
def narrow(
    monkeypatch: pytest.MonkeyPatch, finds: Callable[..., None], config: list[str], tree: Tree
) -> Call:
    """A function that runs a command on a machine with eight GPUs, MIG devices and containers."""
    found = machine(
        *(gpu(n, n) for n in range(7)), gpu(7, 7, (mig(0, 1, 12, 13), mig(1, 2, 21, 22)))
    )
    finds(found)
    listing = importlib.import_module("gpuhook.tools.cli.list")
    named = RunningContainer(NAME, "docker", 1, "python", {node.numbers for node in found.nodes})
    monkeypatch.setattr(listing, "running", lambda *_: RunningContainers([named, POD], ()))
    findings = [
        ok("a", "Found " + "/opt/a/very/long/path/that/nobody/breaks/" * 2),
        note("b", "The GPU-00000000-1111-2222-3333-444444444444 is here", "Take " + NAME),
        warning("c", "x " * 60, "y " * 60),
        failure("d", "No /dev/nvidia-caps/nvidia-cap12345, and no /dev/dri/renderD128", "Make it"),
    ]
    doctor = importlib.import_module("gpuhook.tools.cli.doctor")
    monkeypatch.setattr(doctor, "examine", lambda case: examine(case, [lambda _: findings]))
    monkeypatch.setattr(Case, "of_this_machine", lambda *_: tree.case)

    def run(width: int, *words: str) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr(_screen, "_ENDLESS", width)  # the width without a terminal, as here
            return CliRunner().invoke(cli, [*words, *config])

    return run


EVERY_TABLE = (
    ["info"], ["list"], ["list", "--files"], ["device-plugin", "--dry-run"], ["doctor"],
    ["explain", "--gpus=all"], ["explain", "-e", "NVIDIA_VISIBLE_DEVICES=9"],
)  # fmt: skip


@pytest.mark.parametrize("width", [120, 80, 60, 40, 20])
@pytest.mark.parametrize("words", EVERY_TABLE, ids=" ".join)
def test_narrow_terminals_break_no_word(narrow: Call, words: list[str], width: int) -> None:
    """Only a word on a line of its own may be longer than the terminal's width."""
    whole, cut = narrow(1000, *words), narrow(width, *words)
    assert whole.exit_code == cut.exit_code
    printed = [word for word in cut.stdout.split() if "…" not in word]
    assert {*printed} <= {*whole.stdout.split()}
    if width >= 60:
        assert "…" not in cut.stdout
    if words[0] != "device-plugin":  # this command also prints a response for programs
        assert not [
            line for line in cut.stdout.splitlines() if len(line) > width and " " in line.strip()
        ]


@pytest.mark.parametrize("width", range(40, 201, 20))
@pytest.mark.parametrize("command", ["info", "list"])
def test_a_device_takes_one_line_at_any_width(narrow: Call, command: str, width: int) -> None:
    """gpuhook list also prints container names, so it needs more than 80 columns for this."""
    lines = narrow(width, command).stdout.splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith("INDEX")]
    table = lines[start : start + 11] if command == "info" or width > 80 else []
    indexes = ["INDEX", *map(str, range(8)), "7:0", "7:1"]
    assert [line.split()[0] for line in table] == (indexes if table else [])
    assert max(map(len, table or lines[start : start + 11])) <= width
    titles = lines[start].split()
    assert ("UUID" in titles) is (width >= (60 if command == "info" else 140))


@pytest.mark.parametrize("width", range(40, 201, 20))
def test_a_cdi_device_takes_one_line_at_any_width(narrow: Call, tmp_path: Path, width: int) -> None:
    folder = tmp_path / "a-folder-with-a-long-name"
    folder.mkdir()
    names = ["0", "GPU-00000000-1111-2222-3333-444444444444"]
    devices = [{"name": name, "containerEdits": {"env": ["A=1"]}} for name in names]
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (folder / "gpus.json").write_text(json.dumps(document))
    lines = narrow(width, "cdi", "list", f"--spec-dir={folder}").stdout.splitlines()[:3]
    assert [line.split()[0] for line in lines[:2]] == ["NAME", "nvidia.com/gpu=0"]
    assert max(map(len, lines)) <= width
    assert f"nvidia.com/gpu={names[1]}" in lines[2].split() or width < 60


@pytest.mark.parametrize("width", [80, 60])
def test_container_names_are_shown_in_full(narrow: Call, width: int) -> None:
    words = narrow(width, "list").stdout.replace(",", " ").split()
    assert f"docker:{NAME}" in words
    assert "research/trainer-0/main" in words


# gpuhook list ---------------------------------------------------------------------------------


listing = importlib.import_module("gpuhook.tools.cli.list")


def devices(vendor: str, *models: str) -> Inventory:
    """Return a vendor's inventory with devices of these models."""
    every = tuple(
        Device(f"id-{n}", str(n), {"index": (str(n),)}, (f"/dev/x{n}",), "", model)
        for n, model in enumerate(models)
    )
    return Inventory(vendor, "/", "1", every, ())


@pytest.mark.parametrize("vendor", [name for name in registry.BUILT_IN if name != "nvidia"])
@pytest.mark.parametrize("models", [(), ("X100",), ("X100", "")])
def test_listing_names_the_vendor_when_device_names_do_not(
    vendor: str, models: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A vendor may have no device, or devices whose model is empty or lacks the vendor's name."""
    title = registry.BUILT_IN[vendor].TITLE
    for inventories in ([devices(vendor, *models)], [machine(gpu(0, 3)), devices(vendor, *models)]):
        listing._show(inventories, registry.BUILT_IN, [], Names())
        assert title in capsys.readouterr().out
    listing._show([devices(vendor, f"{title} X100")], registry.BUILT_IN, [], Names())
    assert capsys.readouterr().out.startswith("INDEX")


@pytest.mark.parametrize(("user", "sign"), [(0, "-"), (1000, "?")])
def test_device_users_are_shown_as_unknown_without_root(
    user: int, sign: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    listing._show([machine(gpu(0, 3))], registry.BUILT_IN, [], Names())
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == sign


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ((), ""),
        ((1,), "GPU 1 has fallen off the bus (lost).\n"),
        ((0, 4), "GPUs 0, 4 have fallen off the bus (lost).\n"),
    ],
)
def test_lost_gpus_are_marked(
    capsys: pytest.CaptureFixture[str], lost: tuple[int, ...], sentence: str
) -> None:
    """The table, the sentence below it and the JSON output all show them."""
    there = machine(gpu(2, 3, (mig(0, 1, 12, 13),)), gpu(3, 4))
    there.lost = lost
    listing._show([there], registry.BUILT_IN, [], Names())
    printed = capsys.readouterr().out
    header, *rows = (line.split() for line in printed.removesuffix(sentence).splitlines())
    assert ("STATE" in header) is bool(lost)
    marked = {row[0]: row[1] == "lost" for row in rows}
    assert [int(label) for label, is_lost in marked.items() if is_lost] == [*lost]
    assert [*marked] == sorted(["2", "2:0", "3", *map(str, lost)])
    assert printed.endswith(sentence)
    as_json = listing._as_json([there], [], Names(), {})
    assert as_json["lost"] == [{"vendor": "nvidia", "index": index} for index in lost]


def test_an_unusable_device_is_marked_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = devices("amd", "X100", "X200")
    found.devices[1].__dict__["state"] = "the driver refuses it"
    listing._show([found], registry.BUILT_IN, [], Names())
    first, second, sentence = capsys.readouterr().out.splitlines()[-3:]
    assert (first.split()[1], second.split()[1]) == ("-", "unusable")
    assert sentence == "AMD GPU 1 can't be used: the driver refuses it."
