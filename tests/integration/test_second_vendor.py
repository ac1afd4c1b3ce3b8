"""The vendor of tests/vendors in an installed gpuhook, with its NPUs in real containers."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import second_vendor
from harness import vendors
from harness.bundles import Bundle, Spec
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation
from harness.prefork import ONE, Site
from harness.vendor_contract import Case, Contract
from harness.vendors import MODES, Devices, Seen, in_mode, nodes_seen

GROUP = second_vendor.GROUP
KNOW = """

from gpuhook.vendors.acme import names as acme

BUILT_IN[acme.NAME] = complete(acme)
"""
ASK = "ACME_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def acme(installation: Installation, workspace: Path) -> Iterator[Installation]:
    """A copy of the installation with ACME added: its files, an import and an entry."""
    old, copy = installation.bin.parent, workspace / "acme-installed"
    shutil.copytree(old, copy, symlinks=True)
    [package] = copy.glob("lib/python3*/site-packages/gpuhook")
    folder, tools = package / "vendors", package / "tools/vendors"
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(second_vendor.FOLDER / "acme", folder / "acme", ignore=unneeded)
    shutil.copytree(second_vendor.FOLDER / "tools/acme", tools / "acme", ignore=unneeded)
    simulators = package.parent / "gpuhook_simulate/vendors"
    shutil.copy(second_vendor.FOLDER / "simulate/acme.py", simulators)
    with (folder / "registry.py").open("a") as registry:
        registry.write(KNOW)
    run([copy / "bin/python3", "-m", "compileall", "-q", package]).ok()
    yield Installation(copy / "bin")
    shutil.rmtree(copy)


@pytest.fixture(scope="class")
def devices(
    request: pytest.FixtureRequest, acme: Installation, workspace: Path
) -> Iterator[Devices]:
    """Devices of ACME's machine, which that installation simulates."""
    with request.cls.case.machine(acme, workspace) as found:
        yield found


def expected(npus: Devices, *labels: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    found = npus.nodes("/dev/acmectl")
    for label in labels:
        found |= npus.nodes(f"/dev/acme{label}", opened=opened)
        found[f"/dev/acme/dma{label}"] = npus.node(f"/dev/acme_dma{label}", opened)
    return found


def absent(config: Path, setting: str) -> None:
    """Configure a missing driver root for ACME, and the setting for missing drivers."""
    text = re.sub(r"acme=[^\"]*", "acme=/nonexistent", config.read_text())
    config.write_text(text.replace("[gpuhook]\n", f'[gpuhook]\nmissing-driver = "{setting}"\n'))


class TestAcme(Contract):
    """Containers with ACME's four NPUs on two boards; NPU 1 is split, NPU 3 is being reset."""

    case = Case(
        vendor="acme",
        count=4,
        settings={"boards": 2, "split": 1, "reset": 3},
        made=["NPU 2: A-0002 on board B0", "part 1.1"],
        kind="acme.example/npu",
        patterns=["/dev/acme*"],
        expected=expected,
        groups=frozenset({GROUP}),
        asked=([f"{ASK}=2,0", "ACME_PLUGIN_PATH=/mine", "ACME_DEVICES=7"], [0, 2]),
        beginnings=["ACME_"],
        variables=[f"{ASK}=2,0", "ACME_DEVICES=2,0", "ACME_PLUGIN_PATH=/opt/acme/plugins:/mine"],
        other=[
            (
                f"{ASK}=1.0",
                [f"/dev/acme{name}" for name in ("0", "1", "2", "1.0", "1.1")],
                ["/dev/acme1.0"],
            )
        ],
        beside=("ACME_VISIBLE_BOARDS=B0", [0, 2]),
        refused={
            f"{ASK}=9": (
                r"This host has no NPU or part of one '9': "
                r"it has 0 \(A-0000\), 1 \(A-0001\), .*"
            ),
            f"{ASK}=3": r"NPU 3 can't be used: it is in reset\. Wait until its reset is over.*",
            f"{ASK}=0,1": (
                r"NPUs of the boards B0 and B1 can't work in one container\. Ask for .*"
            ),
        },
        by_hook=(f"{ASK}=0", [0]),
        undone=[
            f"put the process in the host's group {GROUP}",
            "set ACME_DEVICES=0",
            "put /opt/acme/plugins in front of ACME_PLUGIN_PATH",
        ],
        listed=(f"{ASK}=1.0", ["1.0"], [0, 1, "1.0", "1.1", 2, 3]),
        explained=(f"{ASK}=0", ["A-0000"]),
        info=r"^3 +ACME NPU 100 +0000:44:00\.0 +A-0003 +it is in reset$",
        findings=(
            "acme-devices",
            [("ok", ""), ("warning", "NPU 3 (A-0003) can't be used: it is in reset")],
        ),
        by_podman=(f"{ASK}=2", [2]),
        by_document=[(["2"], [2])],
        in_document=[f"{ASK}=void", "ACME_PLUGIN_PATH=/opt/acme/plugins"],
    )

    @ONE
    def test_the_runtime_leaves_no_operation_undone(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        bundle.environ(f"{ASK}=0")
        devices.started(bundle, config).ok()
        entry = vendors.logged(config)
        assert entry["undone"] == []
        assert entry["devices"] == ["A-0000"]

    @ONE
    def test_the_prefork_server_gives_npus_and_sees_their_state_change(
        self, bundle: Bundle, driver: Driver, devices: Devices, tmp_path: Path
    ) -> None:
        """The NPU goes into reset after the first container, so the second container fails."""
        site = Site(bundle, devices.installation, driver, bundle.runtime, tmp_path)
        state = devices.root / "sys/class/acme/acme0/state"
        try:
            devices.configured(site.config)
            site.settle()
            site.serves(f"{ASK}=0")
            assert "ACME_DEVICES=0" in bundle.spec()["process"]["env"]
            state.unlink()
            state.write_text("in reset\n")
            assert "NPU 0 can't be used" in site.run().failed().stdout
        finally:
            state.unlink(missing_ok=True)
            state.write_text("ready\n")
            site.clear()

    @ONE
    def test_an_ignored_absent_vendor_does_not_block_other_vendors(
        self, bundle: Bundle, config: Path, devices: Devices, driver: Driver
    ) -> None:
        absent(config, "ignore")
        bundle.environ(f"{ASK}=all", "NVIDIA_VISIBLE_DEVICES=5")
        bundle.command(*vendors.look("/dev/acme*", driver=driver))
        done = devices.started(bundle, config)
        assert vendors.gpus_seen(done, driver) == {5}
        assert nodes_seen(done) == {}
        assert (
            "ACME's driver root /nonexistent can't be read" in vendors.logged(config)["warnings"][0]
        )

    @ONE
    @pytest.mark.parametrize("setting", ["ignore", "fail"])
    def test_a_request_for_all_of_an_absent_vendor_follows_the_setting(
        self, bundle: Bundle, config: Path, devices: Devices, setting: str
    ) -> None:
        """The setting applies to the runtime and to the hook that podman adds."""
        absent(config, setting)
        bundle.environ(f"{ASK}=all")
        bundle.command(*self.case.look)
        by_runtime = devices.started(bundle, config)
        devices.hook(bundle, config)
        by_hook = bundle.run(bundle.runtime)
        if setting == "fail":
            for done in (by_runtime, by_hook):
                assert "ACME's driver root /nonexistent can't be read" in done.failed().stderr
            return
        assert nodes_seen(by_runtime) == nodes_seen(by_hook) == {}
        entries = map(json.loads, vendors.debug_log(config).read_text().splitlines())
        words = ["ACME's driver root /nonexistent can't be read: No such file or directory"]
        assert [entry["warnings"] for entry in entries] == [words, words]

    @ONE
    def test_a_single_driver_root_setting_applies_to_every_vendor(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        """NVIDIA's root setting applies to each vendor, and gpuhook's own setting precedes it."""
        text = re.sub(r"driver-roots = .*\n", "", config.read_text())
        own = f'root = "{devices.root}"\n'
        bundle.environ(f"{ASK}=0")
        bundle.command(*self.case.look)
        for wanted in (
            re.sub(r'root = ".*"\n', own, text),
            text.replace("[gpuhook]\n", f"[gpuhook]\n{own}"),
        ):
            config.write_text(wanted)
            assert nodes_seen(devices.started(bundle, config)) == expected(devices, 0)
        explained = devices.ask(config, "explain", "-e", f"{ASK}=0")
        assert explained["inventory"]["driver_root"] == str(devices.root)

    @ONE
    @MODES
    def test_a_device_node_already_in_config_json_is_not_duplicated(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        """An engine adds the node for ``--device``, in addition to the request in the variable."""
        in_mode(config, mode)
        major, minor = (int(word, 16) for word in devices.numbers("/dev/acme0").split(":"))
        node = {
            "path": "/dev/acme0",
            "type": "c",
            "major": major,
            "minor": minor,
            "fileMode": 0o600,
        }
        rule = {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}

        def give(spec: Spec) -> None:
            spec["linux"]["devices"] = [node]
            spec["linux"]["resources"]["devices"].append(rule)

        bundle.change(give)
        bundle.environ(f"{ASK}=0")
        bundle.command(*self.case.look)
        for _ in range(2):
            assert nodes_seen(devices.started(bundle, config)) == expected(devices, 0)
        spec = bundle.spec()
        paths = [each["path"] for each in spec["linux"]["devices"]]
        assert paths.count("/dev/acme0") == 1
        numbers = [
            (each["major"], each["minor"])
            for each in spec["linux"]["resources"]["devices"]
            if "major" in each
        ]
        assert len(numbers) == len(set(numbers))
        assert (major, minor) in numbers
