"""A vendor's own options of the device plugin: flags, variables, file and help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import second_vendor

from gpuhook.base.config.model import Config
from gpuhook.cluster.device_plugin.resources import resources
from gpuhook.cluster.device_plugin.settings import Settings
from gpuhook.cluster.vendor_parts import PluginModule
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory

KNOWS = f"""
import json, os, sys
import gpuhook.cluster.vendors, gpuhook.tools.vendors, gpuhook.vendors
gpuhook.vendors.__path__.append({str(second_vendor.FOLDER)!r})
gpuhook.cluster.vendors.__path__.append({str(second_vendor.FOLDER / "cluster")!r})
gpuhook.tools.vendors.__path__.append({str(second_vendor.FOLDER / "tools")!r})
from gpuhook.vendors import registry
from gpuhook.vendors.acme import names
registry.BUILT_IN["acme"] = registry.complete(names)
"""
READ = """
from gpuhook.cluster.device_plugin import configure
settings, said = configure.read(json.loads(sys.argv[1]), os.environ)
print(json.dumps([settings.vendors["acme"].whole, settings.vendors["nvidia"].mig_strategy, said]))
"""
HELP = """
from gpuhook.cluster.commands.device_plugin import device_plugin
device_plugin.main(["--help"])
"""


def run(code: str, *words: str, **environ: str) -> str:
    argv = [sys.executable, "-c", KNOWS + code, *words]
    env = {**os.environ, **environ}
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout


def test_a_vendor_option_is_read_from_flag_variable_and_file(tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text("acme: {whole: true}\nflags: {migStrategy: mixed}\n")
    assert json.loads(run(READ, "{}")) == [False, "none", []]
    assert json.loads(run(READ, '{"acme-whole": "true"}')) == [True, "none", []]
    assert json.loads(run(READ, "{}", GPUHOOK_ACME_WHOLE="1")) == [True, "none", []]
    assert json.loads(run(READ, "{}", CONFIG_FILE=str(file))) == [True, "mixed", []]
    [said] = json.loads(run(READ, '{"acme-whole": "1", "device-list-strategy": "cdi-cri"}'))[2]
    assert said.startswith("acme-whole keeps parts")


def test_a_vendor_option_is_in_the_device_plugin_help() -> None:
    last = run(HELP).partition("--xid N=ACTION")[2]
    assert "--acme-whole true|false" in last
    assert "Hand out no part of an NPU." in last


def test_the_acme_whole_option_omits_partitions(npus: Inventory) -> None:
    names = second_vendor.part("names")
    plugin: PluginModule = second_vendor.part("plugin")
    found = [(contract.load(names), npus)]
    ids = {}
    for whole in (False, True):
        settings = Settings(vendors={"acme": plugin.settings({"whole": whole}, {})})
        [resource] = resources(found, settings, Config())[0].resources
        ids[whole] = [unit.id for unit in resource.units]
    parts = {device.id for device in npus.devices if device.parent}
    assert parts
    assert {*ids[False]} - {*ids[True]} == parts


def test_an_unknown_vendor_section_causes_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text("acne: {whole: true}\n")
    [said] = json.loads(run(READ, "{}", CONFIG_FILE=str(file)))[2]
    assert "acne" in said
    assert "unknown" in said


@pytest.mark.parametrize("text", ["maybe", ""])
def test_an_invalid_plugin_option_value_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text(f"acme: {{whole: '{text}'}}\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(READ, "{}", CONFIG_FILE=str(file))
    assert "acme.whole is" in caught.value.stderr
