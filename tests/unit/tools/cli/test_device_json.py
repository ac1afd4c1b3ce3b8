"""Devices in the JSON of list, info and stats, which have the same keys."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from machines import gpu, machine, mig

from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.metrics.commands import stats_view
from gpuhook.metrics.model import Accelerator as Measured
from gpuhook.metrics.model import Snapshot
from gpuhook.tools.cli import _device_json, cli

KEYS: dict[str, type | tuple[type, ...]] = {
    "vendor": str, "id": str, "uuid": (str, type(None)), "index": (int, type(None)), "label": str,
    "model": str, "parent": str, "mig_profile": str, "minor": (int, type(None)), "bus_id": str,
    "memory_total_bytes": (int, type(None)),
}  # fmt: skip
PAGE = (Path(__file__).parents[4] / "docs/json.md").read_text()


def of_stats(inventory: Inventory) -> list[dict[str, Any]]:
    devices = [
        Measured(inventory.vendor, each.id, each.label, model=each.model, parent=each.parent)
        for each in inventory.devices
    ]
    found: list[dict[str, Any]] = stats_view.as_json(Snapshot(tuple(devices)), 0.0)["devices"]
    return found


@pytest.mark.parametrize("command", ["list", "info", "stats"])
def test_device_entries_have_the_same_keys_in_every_command(
    finds: Callable[..., None], config: list[str], command: str
) -> None:
    found = machine(gpu(0, 0), gpu(1, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22))))
    finds(found)
    if command == "stats":
        devices = of_stats(found)
    else:
        done = CliRunner().invoke(cli, [command, "--format=json", *config])
        devices = json.loads(done.stdout)["devices"]
    for each in devices:
        assert {key for key in KEYS if not isinstance(each[key], KEYS[key])} == set()
        assert each["parent"] or each["uuid"] == each["id"]  # parts have short UUIDs in this test
    labels = [(each["index"], each["label"], each["parent"]) for each in devices]
    gpus = [each.uuid for each in found.gpus]
    assert labels == [(0, "0", ""), (1, "1", ""), (0, "1:0", gpus[1]), (1, "1:1", gpus[1])]


def test_earlier_json_keys_of_list_and_info_are_kept(
    finds: Callable[..., None], config: list[str]
) -> None:
    finds(machine(gpu(1, 3, (mig(0, 1, 12, 13),))))
    listed, info = (
        json.loads(CliRunner().invoke(cli, [command, "--format=json", *config]).stdout)
        for command in ("list", "info")
    )
    for each in (listed, info):
        assert (each["gpus"][0]["index"], each["gpus"][0]["mig"][0]["index"]) == (1, 0)
        assert each["gpus"][0]["uuid"] == each["devices"][0]["uuid"]
        assert each["devices"][0]["minor"] == 3
        assert each["devices"][1]["mig_profile"] == each["gpus"][0]["mig"][0]["name"].split()[-1]
    assert {"root", "driver_version", "nodes", "files"} <= {*info}
    assert info["drivers"] == [
        {"vendor": "nvidia", "driver_version": info["driver_version"], "root": info["root"]}
    ]


def test_devices_of_other_vendors_have_the_same_keys() -> None:
    device = Device("serial-1", "dev", {"name": ("dev",)}, ("/dev/x0",), "", "X100", state="broken")
    [found] = _device_json.described(Inventory("acme", "/", "1", (device,), ()))
    assert {*KEYS} <= {*found}
    assert (found["uuid"], found["index"], found["label"]) == (None, None, "dev")
    assert (found["state"], found["nodes"], found["names"]) == (
        "broken", ["/dev/x0"], {"name": ["dev"]},
    )  # fmt: skip
    assert {**found, **json.loads(json.dumps(device.to_json()))} == found


def test_uuids_are_distinguished_from_other_ids() -> None:
    number = "4ae1a0c4-7cf7-2d02-6c36-2f0a9d8a6f8b"
    for prefix in ("GPU-", "MIG-", ""):
        assert _device_json.identity("x", prefix + number, "0")["uuid"] == prefix + number
    for other in ("0x4ae1a0c47cf72d02", "0000:1b:00.0", "dev0", f"MIG-GPU-{number}/1/0"):
        assert _device_json.identity("x", other, "0")["uuid"] is None


def test_memory_in_list_has_the_keys_of_stats() -> None:
    listing = importlib.import_module("gpuhook.tools.cli.list")
    found = SimpleNamespace(used=1, limit=2, source="dmem", _asdict=lambda: {"used": 1})
    memory = listing._memory_json("GPU-1", found)
    assert {"memory_used_bytes": 1, "memory_limit_bytes": 2, "memory_source": "dmem"}.items() <= (
        memory.items()
    )


def test_the_docs_list_every_device_key() -> None:
    assert {*KEYS} <= {*re.findall(r"^\| `([a-z_]+)`", PAGE, re.MULTILINE)}
