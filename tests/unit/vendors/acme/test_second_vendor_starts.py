"""A second vendor: absent drivers, saved inventories, and containers' starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import second_vendor
import steps
from click.testing import CliRunner
from isolated_starts import SOURCES, started
from second_vendor import GROUP, Inventories, resolved, spec_with
from steps import resolve

from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError
from gpuhook.base.oci.spec import Spec
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Inventory
from gpuhook.tools.cli import cli
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import discover as nvidia_discover
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA

NO_GROUPS = "[features]\nno-additional-gids-for-device-nodes = true\n"
SPEC_MODE = '[nvidia-container-runtime]\nmode = "spec"\n'
PLUGINS = "/opt/acme/plugins"


# A vendor that isn't there -------------------------------------------------------------------


@pytest.fixture
def absent(tmp_path: Path) -> Config:
    """A configuration without ACME's driver, which ignores missing drivers."""
    text = f'driver-roots = ["acme={tmp_path}/nothing"]\nstate-dir = "{tmp_path}/state"\n'
    return loads(f'[gpuhook]\n{text}missing-driver = "ignore"\n')


@pytest.mark.parametrize("word", ["all", "ALL", "none", "acme.example/npu=all"])
def test_an_absent_driver_is_ignored_for_all_or_none_with_a_warning(
    both: Inventories, absent: Config, word: str
) -> None:
    spec = spec_with(f"ACME_VISIBLE_DEVICES={word}", "NVIDIA_VISIBLE_DEVICES=0")
    answer = resolved(spec, {"nvidia": both["nvidia"]}, absent)
    assert [grant.request.vendor for grant in answer.grants] == ["nvidia"]
    assert "ACME's driver root" in answer.warnings()[0]
    alone = resolved(spec_with(f"ACME_VISIBLE_DEVICES={word}"), {}, absent)
    assert alone.grants == []
    assert alone.warnings() == answer.warnings()[:1]


@pytest.mark.parametrize("beside", [[], ["NVIDIA_VISIBLE_DEVICES=0"]])
@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("ignore", "0"),
        ("ignore", "1-2"),
        ("ignore", "acme.example/npu=0"),
        ("fail", "0"),
        ("fail", "all"),
        ("fail", "none"),
    ],
)
def test_an_absent_driver_is_refused_for_named_devices_or_by_setting(
    both: Inventories, absent: Config, setting: str, word: str, beside: list[str]
) -> None:
    """A request for devices of another vendor makes no difference."""
    absent.missing_driver = setting
    spec = spec_with(f"ACME_VISIBLE_DEVICES={word}", *beside)
    with pytest.raises(DriverError, match=r"ACME's driver root .* can't be read"):
        resolve(spec, absent, inventories={"nvidia": both["nvidia"]})


def test_a_driver_that_fails_is_not_missing(
    absent: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DriverError("ACME's driver doesn't answer", "Reset it")

    monkeypatch.setattr(type(second_vendor.part("vendor").VENDOR), "discover", fail)
    with pytest.raises(DriverError, match="doesn't answer"):
        resolve(spec_with("ACME_VISIBLE_DEVICES=all"), absent)


def test_a_container_that_gets_no_device_is_unchanged(
    absent: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent.runtime_debug = str(tmp_path / "debug.log")
    text = json.dumps(spec_with("ACME_VISIBLE_DEVICES=all"))
    assert steps.edit(Spec("config.json", text), absent, "/opt/gpuhook/bin") is None
    [entry] = (tmp_path / "debug.log").read_text().splitlines()
    assert "ACME's driver root" in json.loads(entry)["warnings"][0]
    assert json.loads(entry)["level"] == "warning"
    assert capsys.readouterr().err == ""


# What is saved -------------------------------------------------------------------------------


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration of a machine with both vendors, whose inventories are saved."""
    config = Config()
    config.state_dir = str(tmp_path / "state")
    config.driver_root = str(tmp_path / "nvidia")
    config.driver_roots = (f"acme={tmp_path}/acme",)
    (tmp_path / "nvidia/proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "nvidia/proc/driver/nvidia/version").write_text("1\n")
    second_vendor.machine(tmp_path / "acme")
    made = NvidiaInventory(config.driver_root, "1", "12.0", (), (), ())
    monkeypatch.setattr(nvidia_discover, "discover", lambda _: made)
    return config


CHANGES: dict[str, tuple[str, str, str]] = {
    "NVIDIA's driver": ("nvidia/proc/driver/nvidia/version", "2\n", "acme"),
    "a new NPU": ("acme/sys/class/acme/acme7/serial", "A-0007\n", "nvidia"),
    "the end of a reset": ("acme/sys/class/acme/acme3/state", "in reset\n", "nvidia"),
    "a node that was missing": ("acme/dev/acme2", "", "nvidia"),
}


@pytest.mark.parametrize(("place", "text", "fresh"), CHANGES.values(), ids=CHANGES.keys())
def test_changes_of_one_vendor_make_only_its_saved_inventory_stale(
    saving: Config, tmp_path: Path, place: str, text: str, fresh: str
) -> None:
    vendors = {name: contract.load(registry.BUILT_IN[name]) for name in ("nvidia", "acme")}
    for vendor in vendors.values():
        cache.get_inventory(saving, vendor)
    files = sorted(path.name for path in Path(saving.state_dir).glob("inventory-*[!k]"))
    assert [name.split("-")[1] for name in files] == ["acme", "nvidia"]
    assert all(cache.saved(saving, vendor) is not None for vendor in vendors.values())
    (tmp_path / place).unlink(missing_ok=True)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(text)
    found = {name: cache.saved(saving, vendor) for name, vendor in vendors.items()}
    assert [name for name, inventory in found.items() if inventory is not None] == [fresh]


# config.json ---------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gpuhook-prestart").touch(mode=0o755)
    (tmp_path / "bundle/rootfs").mkdir(parents=True)
    return tmp_path / "bin"


Edit = Callable[..., Spec]


@pytest.fixture
def edit(both: Inventories, programs: Path, tmp_path: Path) -> Edit:
    """A function that returns a config.json as gpu-py edits it."""

    def run(data: dict[str, Any] | bytes, config: str = "") -> Spec:
        written = data if isinstance(data, bytes) else json.dumps(data).encode()
        text = written.decode("utf-8", "surrogateescape")
        spec = Spec(str(tmp_path / "bundle/config.json"), text)
        edited = steps.edit(spec, loads(config), str(programs), inventories=both)
        assert edited is not None
        return edited

    return run


def _variables(spec: Spec, name: str) -> list[str]:
    env: list[str] = spec.data["process"]["env"]
    return [entry.partition("=")[2] for entry in env if entry.partition("=")[0] == name]


def test_spec_mode_keeps_numbers_mode_and_group_of_nodes(edit: Edit, both: Inventories) -> None:
    edited = edit(spec_with("ACME_VISIBLE_DEVICES=0"), SPEC_MODE)
    made = {node["path"]: node for node in edited.data["linux"]["devices"]}
    assert list(made) == ["/dev/acmectl", "/dev/acme0", "/dev/acme/dma0"]
    dma = both["acme"].node("/dev/acme_dma0")
    assert dma is not None
    assert made["/dev/acme/dma0"] == {
        "path": "/dev/acme/dma0", "type": "c", "major": dma.major, "minor": 0,
        "fileMode": 0o660, "uid": 0, "gid": GROUP,
    }  # fmt: skip
    assert made["/dev/acmectl"]["fileMode"] == 0o666
    assert "hooks" not in edited.data


@pytest.mark.parametrize("config", ["", SPEC_MODE], ids=["hook", "spec"])
def test_a_bundle_started_again_is_unchanged(edit: Edit, config: str) -> None:
    env = ["ACME_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=0", "ACME_PLUGIN_PATH=/mine"]
    once = edit(spec_with(*env), config)
    assert edit(once.text.encode(), config).text == once.text


def test_variables_are_set_replaced_or_prepended(edit: Edit) -> None:
    plain = edit(spec_with("ACME_VISIBLE_DEVICES=0,2"))
    assert _variables(plain, "ACME_DEVICES") == ["0,2"]
    assert _variables(plain, "ACME_PLUGIN_PATH") == [PLUGINS]
    image_sets = ("ACME_DEVICES=7", "ACME_PLUGIN_PATH=/mine", "ACME_DEVICES=8")
    replaced = edit(spec_with(*image_sets, "ACME_VISIBLE_DEVICES=0"))
    assert _variables(replaced, "ACME_DEVICES") == ["0", "0"]
    assert _variables(replaced, "ACME_PLUGIN_PATH") == [f"{PLUGINS}:/mine"]


def test_bytes_that_are_not_utf_8_are_unchanged(edit: Edit) -> None:
    """Text inserted before such bytes must not change them."""
    text = json.dumps(spec_with("ACME_VISIBLE_DEVICES=0", "OTHER=@1", "ACME_PLUGIN_PATH=@2"))
    data = text.encode().replace(b"@1", b"\xff\xc3 \\u00e9").replace(b"@2", b"\xfe\xe9")
    written = edit(data).text.encode("utf-8", "surrogateescape")
    assert b'"OTHER=\xff\xc3 \\u00e9"' in written
    assert f'"ACME_PLUGIN_PATH={PLUGINS}:'.encode() + b'\xfe\xe9"' in written


def _in_a_user_namespace(*mappings: tuple[int, int, int]) -> dict[str, Any]:
    """Return a spec's user namespace; each mapping is inside, outside, size."""
    keys = ("containerID", "hostID", "size")
    return {
        "namespaces": [{"type": "mount"}, {"type": "user"}],
        "gidMappings": [dict(zip(keys, numbers, strict=True)) for numbers in mappings],
    }


GROUPS: dict[str, tuple[dict[str, Any], str, list[int] | None]] = {
    "as on the host": ({}, "", [GROUP]),
    "mapped": ({"linux": _in_a_user_namespace((0, 1000, 65536))}, "", [GROUP - 1000]),
    "not mapped": ({"linux": _in_a_user_namespace((0, 100000, 65536))}, "", None),
    "switched off": ({}, NO_GROUPS, None),
}


@pytest.mark.parametrize(("more", "config", "expected"), GROUPS.values(), ids=GROUPS.keys())
def test_the_group_of_the_device_nodes_is_added_where_mapped(
    edit: Edit, more: dict[str, Any], config: str, expected: list[int] | None
) -> None:
    edited = edit(spec_with("ACME_VISIBLE_DEVICES=0", **more), config)
    assert edited.data["process"]["user"].get("additionalGids") == expected


def test_a_group_that_the_process_is_in_is_not_added(edit: Edit) -> None:
    spec = spec_with("ACME_VISIBLE_DEVICES=0")
    spec["process"]["user"]["additionalGids"] = [7, GROUP]
    edited = edit(spec)
    assert edited.data["process"]["user"]["additionalGids"] == [7, GROUP]


# explain -------------------------------------------------------------------------------------


@pytest.fixture
def explain(
    both: Inventories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    def saved(config: Config, vendor: contract.Vendor, *, save: bool = True) -> Inventory:
        return both[vendor.names.NAME]

    monkeypatch.setattr(cache, "get_inventory", saved)

    def run(*words: str, status: int = 0) -> str:
        config = tmp_path / "config.toml"
        config.touch()
        done = CliRunner().invoke(cli, ["explain", "--config", str(config), *words])
        assert done.exit_code == status, done.output
        return done.stdout

    return run


def test_explain_reports_the_second_vendor_in_text_and_json(explain: Callable[..., str]) -> None:
    words = ("-e", "ACME_VISIBLE_DEVICES=0", "-e", "NVIDIA_VISIBLE_DEVICES=0")
    text = explain(*words, "-v")
    assert "Vendor:          ACME" in text
    assert "Selected:        GPU-00000000-0000-0000-0000-000000000000, A-0000" in text
    assert "set ACME_DEVICES=0\n" in text
    assert f"put {PLUGINS} in front of ACME_PLUGIN_PATH\n" in text
    assert f"put the process in the host's group {GROUP}\n" in text
    assert "on /dev/acme/dma0\n" in text
    assert "undone" not in text
    report = json.loads(explain(*words, "--format", "json"))
    assert [each["vendor"] for each in report["requests"]] == ["nvidia", "acme"]
    assert [each["vendor"] for each in report["inventories"]] == ["nvidia", "acme"]
    assert report["undone"] == []


def test_explain_with_hook_alone_lists_undone_operations(explain: Callable[..., str]) -> None:
    words = ("-e", "ACME_VISIBLE_DEVICES=0", "--hook-alone")
    undone = explain(*words, "-v").partition("because only the runtime gpu-py can do it:\n")[2]
    assert undone.splitlines() == [
        f"      put the process in the host's group {GROUP}",
        "      set ACME_DEVICES=0",
        f"      put {PLUGINS} in front of ACME_PLUGIN_PATH",
    ]
    report = json.loads(explain(*words, "--format", "json"))
    assert [op["kind"] for op in report["undone"]] == ["group", "environment", "environment"]
    assert {op["kind"] for op in report["operations"]} == {"allow-device", "device"}


def test_explain_reports_an_unmapped_group_as_undone(
    explain: Callable[..., str], tmp_path: Path
) -> None:
    linux = _in_a_user_namespace((0, 100000, 65536))
    spec = tmp_path / "config.json"
    spec.write_text(json.dumps(spec_with("ACME_VISIBLE_DEVICES=0", linux=linux)))
    report = json.loads(explain("--spec", str(spec), "--format", "json"))
    assert [op["kind"] for op in report["undone"]] == ["group"]
    assert "environment" in {op["kind"] for op in report["operations"]}


# What a start imports ------------------------------------------------------------------------

BUILT_IN = f"""
import gpuhook.vendors
gpuhook.vendors.__path__.append({str(second_vendor.FOLDER)!r})
from gpuhook.vendors import registry
from gpuhook.vendors.acme import names
registry.BUILT_IN["acme"] = registry.complete(names)
"""


def with_acme(saving: Config, *env: str) -> tuple[str, set[str]]:
    """Start a container with ACME registered; return the output and the loaded modules."""
    return started(saving.state_dir, *saving.driver_roots, *env, before=BUILT_IN)


def test_only_names_of_unrequested_vendors_are_imported(saving: Config) -> None:
    acme = contract.load(registry.BUILT_IN["acme"])
    _, loaded = with_acme(saving, "NVIDIA_VISIBLE_DEVICES=0")
    assert f"{type(NVIDIA).__module__}" in loaded
    assert {name for name in loaded if ".acme." in name} == {"gpuhook.vendors.acme.names"}
    _, loaded = with_acme(saving, "PATH=/bin")
    assert not {name for name in loaded if name.endswith(".vendor")}
    answer, loaded = with_acme(saving, "ACME_VISIBLE_DEVICES=0")
    assert answer.startswith("refused: ACME's driver has no node")  # only root can create nodes
    nvidia = {name for name in loaded if ".nvidia." in name}
    assert nvidia == {"gpuhook.vendors.nvidia.names"}
    assert type(acme).__module__ in loaded
    assert "gpuhook.vendors.acme.discover" in loaded


def test_a_start_with_a_saved_inventory_loads_few_modules(saving: Config) -> None:
    saving.driver_root = "/nonexistent"
    cache.get_inventory(saving, contract.load(registry.BUILT_IN["acme"]))
    _, loaded = with_acme(saving, "ACME_VISIBLE_DEVICES=0")
    assert not {"_ctypes", "re", "json", "gpuhook.vendors.acme.discover"} & loaded


def test_every_vendor_defines_the_same_constants() -> None:
    """Otherwise, a missing constant would fail only at its use, in a container's start."""
    sets = {
        name: {
            word: type(value)
            for word, value in vars(names).items()
            if word.isupper() and word not in contract.OPTIONAL_NAMES
        }
        for name, names in registry.BUILT_IN.items()
    }
    assert all(each == sets["nvidia"] for each in sets.values())


def test_no_source_file_names_the_test_vendor() -> None:
    named = [path.name for path in SOURCES.rglob("*.py") if "acme" in path.read_text().lower()]
    assert named == []
