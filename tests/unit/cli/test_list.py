"""gpuhook list: what is said of GPUs that are lost."""

import importlib

import pytest
from machines import gpu, machine

from gpuhook.start.inventory.model import Device, Inventory
from gpuhook.tools.running.names import Names
from gpuhook.vendors import registry

listing = importlib.import_module("gpuhook.tools.cli.list")


def devices(vendor: str, *models: str) -> Inventory:
    """Return a vendor's inventory with devices of these models."""
    every = tuple(
        Device(f"id-{n}", str(n), {"index": (str(n),)}, (f"/dev/x{n}",), "", model)
        for n, model in enumerate(models)
    )
    return Inventory(vendor, "/", "1", every, ())


@pytest.mark.parametrize("vendor", [name for name in registry.KNOWN if name != "nvidia"])
@pytest.mark.parametrize("models", [(), ("X100",), ("X100", "")])
def test_the_vendor_is_named(
    vendor: str, models: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the devices' own names or above them, on machines without NVIDIA's and beside those."""
    title = registry.KNOWN[vendor].TITLE
    for inventories in ([devices(vendor, *models)], [machine(gpu(0, 3)), devices(vendor, *models)]):
        listing._show(inventories, registry.KNOWN, [], Names())
        assert title in capsys.readouterr().out
    listing._show([devices(vendor, f"{title} X100")], registry.KNOWN, [], Names())
    assert capsys.readouterr().out.startswith("INDEX")


@pytest.mark.parametrize(("user", "sign"), [(0, "-"), (1000, "?")])
def test_who_has_it_is_unknown_without_root(
    user: int, sign: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    listing._show([machine(gpu(0, 3))], registry.KNOWN, [], Names())
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == sign


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ((), ""),
        ((1,), "GPU 1 has fallen off the bus (lost).\n"),
        ((1, 2), "GPUs 1, 2 have fallen off the bus (lost).\n"),
    ],
)
def test_lost_gpus_are_named_below_the_table(
    capsys: pytest.CaptureFixture[str], lost: tuple[int, ...], sentence: str
) -> None:
    there = machine(gpu(0, 3))
    there.lost = lost
    listing._show([there], registry.KNOWN, [], Names())
    printed = capsys.readouterr().out
    assert printed.startswith("INDEX")
    assert printed.partition(" -\n")[2] == sentence
    as_json = listing._as_json([there], [], Names())
    assert as_json["lost"] == [{"vendor": "nvidia", "index": index} for index in lost]
