"""Intel Gaudi's devices, simulated, in real containers."""

from pathlib import Path

from harness import vendors
from harness.bundles import Bundle
from harness.commands import run
from harness.driver import Driver
from harness.prefork import ONE, RUNTIMES, Site
from harness.vendor_contract import Case, Contract
from harness.vendors import MODES, Devices, Seen, in_mode, nodes_seen

DEVICES, MODULES = "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"


def nodes(*numbers: int | str) -> list[str]:
    found = []
    for number in numbers:
        found += [f"/dev/accel/accel{number}", f"/dev/accel/accel_controlD{number}"]
        found += [f"/dev/infiniband/uverbs{number}"] if number in (0, 2, 10) else []
    return found


def expected(found: Devices, *numbers: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    return found.nodes(*nodes(*numbers), opened=opened)


class TestGaudi(Contract):
    """Gaudi with eleven devices: number 3 is missing, and number 12 has another driver.

    Device 1 is in reset; device 2 has network ports.
    """

    case = Case(
        vendor="gaudi",
        count=12,
        settings={"gap": 3, "reset": 1, "net": 2, "uverbs": "0,2,10"},
        made=["Gaudi 2: 0000:1b:00.0, module 1"],
        kind="habana.ai/gaudi",
        patterns=["/dev/accel/*", "/dev/infiniband/*"],
        expected=expected,
        asked=([f"{DEVICES}=10, 0", f"{MODULES}=5", f"{MODULES}=6"], [0, 10]),
        beginnings=["HABANA_"],
        variables=[f"{DEVICES}=10, 0", f"{MODULES}=3,9"],
        other=[(f"{MODULES}=1", [*nodes(0, 1, 2, 10), "/dev/accel/accel12"], nodes(2))],
        beside=("HABANA_VISIBLE_PCI_BUS_IDS=0000:1b:00.0", [2]),
        refused={
            f"{DEVICES}=12": r"This host has no Gaudi '12': it has 0 \(0000:19:00\.0\), .*",
            f"{DEVICES}=1": r"Gaudi 1 can't be used: its status is In reset\. Wait until .*",
            f"{MODULES}=0": r"This host has no Gaudi '0': it has 1, 2, 3, .*",
        },
        by_hook=(f"{DEVICES}=2", [2]),
        undone=[f"set {MODULES}=1"],
        listed=(f"{DEVICES}=7", [7], [number for number in range(12) if number != 3]),
        explained=(f"{MODULES}=3", ["0000:19:00.0"]),
        info=r"^10 +9 +Gaudi2 +0000:23:00\.0 +-$",
        findings=(
            "gaudi-devices",
            [
                ("ok", ""),
                ("warning", "Gaudi 1 (0000:1a:00.0) can't be used: its status is In reset"),
                ("note", "The network ports of Gaudi 2 are moved into no container"),
            ],
        ),
        by_podman=(f"{DEVICES}=4,10", [4, 10]),
        by_document=[(["10", "2"], [2, 10])],
        in_document=[f"{DEVICES}=void"],
    )

    @RUNTIMES
    def test_the_hook_warns_that_network_ports_are_not_moved(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        devices.hook(bundle, config)
        bundle.environ(f"{DEVICES}=2")
        bundle.command("true")
        bundle.run(bundle.runtime).ok()
        [text] = vendors.logged(config)["warnings"]
        assert text.startswith("The network ports of Gaudi 2 aren't moved into the container")

    @MODES
    @ONE
    def test_all_selects_only_operational_devices(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        in_mode(config, mode)
        bundle.environ(f"{DEVICES}=all")
        bundle.command(*self.case.look)
        done = devices.started(bundle, config)
        numbers = [number for number in range(12) if number not in (1, 3)]
        assert nodes_seen(done) == devices.nodes(*nodes(*numbers))
        [seats] = vendors.variables_seen(done, MODULES)
        assert seats == f"{MODULES}=1,3,4,5,6,7,8,9,10,11"

    @MODES
    @ONE
    def test_the_module_variable_narrows_all_to_the_named_modules(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        in_mode(config, mode)
        bundle.environ(f"{DEVICES}=all", f"{MODULES}=4-5")
        bundle.command(*self.case.look)
        done = devices.started(bundle, config)
        assert nodes_seen(done) == devices.nodes(*nodes(6, 7))
        assert vendors.variables_seen(done, MODULES) == [f"{MODULES}=4,5"]

    @ONE
    def test_a_node_with_wrong_numbers_is_refused(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        """gpuhook compares a node's numbers with those that the driver reports."""
        shown = devices.root / "sys/bus/pci/drivers/habanalabs/0000:1d:00.0/accel/accel4/dev"
        before = shown.read_text()
        bundle.environ(f"{DEVICES}=4")
        try:
            shown.unlink()
            shown.write_text("1:3\n")
            # This change doesn't occur on real machines, so the test refreshes the inventory.
            # gpuhook checks a node's numbers at every start.
            run([devices.installation.command, "refresh", "--config", config])
            said = devices.refused(bundle, config)
            assert "/dev/accel/accel4 is another device (the driver's is 1:3)" in said
        finally:
            shown.unlink(missing_ok=True)
            shown.write_text(before)

    @ONE
    def test_prefork_server_notices_a_device_that_needs_a_reset(
        self, bundle: Bundle, driver: Driver, devices: Devices, tmp_path: Path
    ) -> None:
        site = Site(bundle, devices.installation, driver, bundle.runtime, tmp_path)
        status = devices.root / "sys/bus/pci/drivers/habanalabs/0000:19:00.0/status"
        try:
            devices.configured(site.config)
            site.settle()
            site.serves(f"{DEVICES}=0")
            assert f"{MODULES}=3" in bundle.spec()["process"]["env"]
            status.unlink()
            status.write_text("Needs reset\n")
            assert "Gaudi 0 can't be used: its status is Needs reset" in site.run().failed().stdout
        finally:
            status.unlink(missing_ok=True)
            status.write_text("Operational\n")
            site.clear()
