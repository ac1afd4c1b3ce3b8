"""Intel's GPUs and NPUs, simulated, in real containers."""

import re
from pathlib import Path

from harness import vendors
from harness.bundles import Bundle
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE
from harness.vendor_contract import NO_GROUPS, Case, Contract
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import Devices, Seen, nodes_seen

ASK, ASK_NPU = "INTEL_VISIBLE_DEVICES", "INTEL_VISIBLE_NPUS"
VIDEO, RENDER = 44, 106
PATTERNS = ("/dev/dri/*", "/dev/accel/*")


def cards(found: Devices, *numbers: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    """Return the nodes of these cards' GPUs as a container sees them."""
    names = [name for n in numbers for name in (f"card{n}", f"renderD{128 + int(n)}")]
    return found.nodes(*(f"/dev/dri/{name}" for name in names), opened=opened)


def npus(found: Devices, *numbers: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    return found.nodes(*(f"/dev/accel/accel{number}" for number in numbers), opened=opened)


def dri(*names: str) -> list[str]:
    return [f"/dev/dri/{name}" for name in names]


class TestGpus(Contract):
    """Eleven GPUs from card1 on, one virtual function, and a virtual machine's GPU."""

    case = Case(
        vendor="intel_gpu",
        count=11,
        settings={"cards": 1, "vfs": 1, "vm": 1, "driver": "xe"},
        made=["GPU 10: card11 at 0000:0d:00.0", "GPU 10.0: card12 at 0000:0d:00.1"],
        kind="intel.com/gpu",
        patterns=PATTERNS,
        expected=cards,
        groups=frozenset({VIDEO, RENDER}),
        asked=([f"{ASK}=9, 0 - 1"], [1, 2, 10]),
        beginnings=["INTEL_"],
        variables=[f"{ASK}=9, 0 - 1"],
        links={
            "/dev/dri/by-path/pci-0000:0c:00.0-card": "../card10",
            "/dev/dri/by-path/pci-0000:0c:00.0-render": "../renderD138",
        },
        other=[
            (
                f"{ASK}=card2,10.0",
                dri("card1", "card2", "card11", "card12", "renderD140"),
                dri("card2", "card12", "renderD140"),
            )
        ],
        beside=(f"{ASK}=10", [11]),
        refused={
            f"{ASK}={asked}": rf"This host has no GPU or virtual function '{said}': .*"
            for asked, said in (
                ("11", "11"),
                ("card0", "card0"),
                ("0000:0e:00.0", r"0000:0e:00\.0"),
            )
        },
        by_hook=(f"{ASK}=0", [1]),
        undone=[f"put the process in the host's group {group}" for group in (RENDER, VIDEO)],
        listed=(f"{ASK}=10.0", ["10.0"], [*range(11), "10.0"]),
        explained=(f"{ASK}=0", ["card1"]),
        info=r"^10 +Intel Data Center GPU Flex 170 +0000:0d:00\.0 +card11 +-$",
        findings=("intel-gpus", [("ok", "xe has 12 GPUs")]),
        by_podman=(f"{ASK}=3", [4]),
        by_document=[(["card2"], [2]), (["0"], [1])],
        in_document=[f"{ASK}=void"],
    )

    @ONE
    def test_each_node_gets_its_by_path_link(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        for asked, links in (("0", 2), ("9,0-1", 6)):
            bundle.environ(f"{ASK}={asked}")
            bundle.command(*self.case.look)
            assert len(vendors.links_seen(devices.started(bundle, config))) == links


class TestNpus(Contract):
    """Two NPUs in addition to another vendor's /dev/accel/accel0."""

    case = Case(
        vendor="intel_npu",
        count=2,
        settings={"first": 1, "decoy": "yes"},
        made=["NPU 1 at 0000:01:0b.0"],
        kind="intel.com/npu",
        patterns=PATTERNS,
        expected=npus,
        groups=frozenset({RENDER}),
        asked=([f"{ASK_NPU}=2"], [2]),
        beginnings=["INTEL_"],
        variables=[f"{ASK_NPU}=2"],
        other=[
            (
                f"{ASK_NPU}=1",
                [f"/dev/accel/accel{number}" for number in range(3)],
                ["/dev/accel/accel1"],
            )
        ],
        beside=(f"{ASK_NPU}=all", [1, 2]),
        refused={f"{ASK_NPU}=0": r"This host has no NPU '0': it has 1 \(accel1\), .*"},
        by_hook=(f"{ASK_NPU}=1", [1]),
        undone=[f"put the process in the host's group {RENDER}"],
        listed=(f"{ASK_NPU}=2", [2], [1, 2]),
        explained=(f"{ASK_NPU}=all", ["accel1", "accel2"]),
        info=r"^1 .* accel1 +-$",
        findings=("intel-npus", [("ok", "2 NPUs")]),
        by_podman=(f"{ASK_NPU}=1", [1]),
        by_document=[(["1"], [1]), (["all"], [1, 2])],
        in_document=[f"{ASK_NPU}=void"],
    )


def test_podman_gives_gpus_and_npus_in_one_container(
    installation: Installation, driver: Driver, host: Namespace, workspace: Path, archive: Path
) -> None:
    """podman uses the CDI specs of both kinds, and also the hook."""
    cases, folder = (TestGpus.case, TestNpus.case), workspace / "intel-both"
    own = write_config(workspace / "intel-both-etc", driver.root, ["runc"])
    with (
        cases[0].machine(installation, folder) as gpus,
        cases[1].machine(installation, folder) as two,
    ):
        gpus.configured(own, tail=NO_GROUPS)
        roots = f'driver-roots = ["intel_gpu={gpus.root}", "intel_npu={two.root}"]'
        own.write_text(re.sub(r"driver-roots = .*", roots, own.read_text()))
        look, gpu, npu = cases[0].look, cases[0].kind, cases[1].kind
        with (
            podman_with_hook(gpus, own, folder / "podman", host, archive) as engine,
            documents(gpus, own, folder / "cdi", gpu),
            documents(two, own, folder / "npu-cdi", npu),
        ):
            done = engine.run(image("debian"), *look, env=(f"{ASK}=3", f"{ASK_NPU}=1"))
            assert nodes_seen(done) == cards(gpus, 4) | npus(two, 1)
            done = run_with(engine, look, f"{gpu}=card2", f"{npu}=all")
            assert nodes_seen(done) == cards(gpus, 2) | npus(two, 1, 2)
            assert vendors.links_seen(done)["/dev/dri/by-path/pci-0000:04:00.0-card"] == "../card2"
            assert vendors.variables_seen(done, "INTEL_") == [f"{ASK}=void", f"{ASK_NPU}=void"]
