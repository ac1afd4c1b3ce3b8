"""AWS Neuron's devices, simulated, in real containers."""

from pathlib import Path

from harness import vendors
from harness.bundles import Bundle
from harness.prefork import ONE
from harness.vendor_contract import Case, Contract
from harness.vendors import Devices, Seen, nodes_seen

ASK = "AWS_NEURON_VISIBLE_DEVICES"


def nodes(*numbers: int | str) -> list[str]:
    return [f"/dev/neuron{number}" for number in numbers]


def expected(found: Devices, *numbers: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    return found.nodes(*nodes(*numbers), opened=opened)


class TestNeuron(Contract):
    """Neuron with twelve devices, the last one incomplete, and a node without a device."""

    case = Case(
        vendor="neuron",
        count=12,
        settings={"half_made": 11, "stray": 40},
        made=["Neuron device 10: 00a1b2c3d4e5000a, 2 cores"],
        kind="aws.amazon.com/neuron",
        patterns=["/dev/neuron*"],
        expected=expected,
        asked=([f"{ASK}=10, 8-9", "NEURON_RT_VISIBLE_CORES=16-21"], [8, 9, 10]),
        beginnings=["NEURON_", "AWS_"],
        variables=[f"{ASK}=10, 8-9", "NEURON_RT_VISIBLE_CORES=16-21"],
        other=[(f"{ASK}=1-2", nodes(0, 1, 2, 3, 11, 40), nodes(1, 2))],
        beside=(f"{ASK}=ALL", range(11)),
        refused={
            f"{ASK}=12": (
                r"This host has no Neuron device '12': it has 0 \(00a1b2c3d4e50000\), .*"
            ),
            f"{ASK}=0-11": r"Neuron device 11 can't be used: the driver hasn't initialized it .*",
            f"{ASK}=4,6": (
                r"The Neuron devices 4, 6 aren't neighbours: .* without 5\. Request 4-6, .*"
            ),
        },
        by_hook=(f"{ASK}=0,1", [0, 1]),
        undone=[],
        listed=(f"{ASK}=7", [7], range(12)),
        explained=(f"{ASK}=0", ["00a1b2c3d4e50000"]),
        info=r"^10 +Trainium1 +2 +00a1b2c3d4e5000a +-$",
        findings=(
            "neuron-devices",
            [
                ("ok", ""),
                ("warning", "Neuron device 11 (neuron11) can't be used"),
                ("warning", "/dev/neuron40"),
            ],
        ),
        by_podman=(f"{ASK}=4-5", [4, 5]),
        by_document=[(["10", "9"], [9, 10]), (["all"], range(11))],
        in_document=[f"{ASK}=void"],
    )

    @ONE
    def test_a_node_with_wrong_numbers_is_refused(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        """gpuhook compares a node's numbers with those that the driver reports."""
        shown = devices.root / "sys/class/neuron_device/neuron3/dev"
        before = shown.read_text()
        bundle.environ(f"{ASK}=3")
        try:
            shown.unlink()
            shown.write_text("1:3\n")
            said = devices.refused(bundle, config)
            assert "/dev/neuron3 is another device (the driver's is 1:3)" in said
        finally:
            shown.unlink(missing_ok=True)
            shown.write_text(before)
        bundle.command(*self.case.look)
        assert (devices.root / "dev/neuron3").exists()
        assert nodes_seen(devices.started(bundle, config)) == expected(devices, 3)

    @ONE
    def test_visible_cores_of_other_devices_cause_a_warning(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        bundle.environ(f"{ASK}=4", "NEURON_RT_VISIBLE_CORES=0-1")
        devices.started(bundle, config).ok()
        [text] = vendors.logged(config)["warnings"]
        assert text.endswith("these have 8-9")
