"""AMD's GPUs and partitions in real containers, on a simulated machine."""

import re
import shutil
from pathlib import Path

import pytest
from harness import bundles, vendors
from harness.bundles import Bundle
from harness.commands import run
from harness.docker import dockerd
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE, RUNTIMES, Site
from harness.snapshot import nothing_left
from harness.vendor_contract import Case, Contract
from harness.vendors import MODES, USER, Devices, Seen, as_user, in_mode, nodes_seen

NO_ENGINES = "/usr/sbin:/sbin"  # none of its engines is too old to read groups
ASK = "AMD_VISIBLE_DEVICES"
VIDEO, RENDER = 44, 105
PATTERNS = ("/dev/kfd", "/dev/dri/*")
# Names in /dev/dri of GPU 0, of four partitions of GPU 1, and of GPU 2.
NODES = [
    ("card1", "renderD128"),
    *((f"card{9 + number}", f"renderD{136 + number}") for number in range(4)),
    ("card17", "renderD144"),
]


def expected(gpus: Devices, *numbers: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    """Return what a container with these devices sees."""
    names = [f"/dev/dri/{name}" for number in numbers for name in NODES[int(number)]]
    return gpus.nodes("/dev/kfd", *names, opened=opened)


def dri(*names: str) -> list[str]:
    return ["/dev/kfd", *(f"/dev/dri/{name}" for name in names)]


class TestAmd(Contract):
    """Three GPUs and a management controller's graphics card; GPU 1 has four partitions."""

    case = Case(
        vendor="amd",
        count=3,
        settings={"split": 1, "partitions": 4, "ids": "shared", "bmc": "yes"},
        made=["GPU 2 at 0000:0b:00.0: card17, renderD144"],
        kind="amd.com/gpu",
        patterns=PATTERNS,
        expected=expected,
        groups=frozenset({VIDEO, RENDER}),
        asked=([f"{ASK}=5, 2-3,5"], [5, 2, 3]),
        beginnings=["AMD_", "ROCR_", "HIP_", "LD_"],
        variables=[f"{ASK}=5, 2-3,5"],
        other=[
            (
                f"{ASK}={word}",
                dri("card0", "renderD143", *(name for names in NODES for name in names)),
                dri("card10", "renderD137"),
            )
            # Other partitions of the same GPU, and partitions that nobody uses, can't be opened.
            for word in ("2", "0x84cafeae17e7610:1")
        ],
        beside=(f"{ASK}=0,5", [0, 5]),
        refused={
            f"{ASK}=6": (r"This host has no AMD GPU '6': it has 0 \(0x84cafeae17e7600\), 1 \(0x.*"),
            f"{ASK}=4-6": r"This host has no AMD GPU '4-6': 6 doesn't exist; it has 0 .*",
            f"{ASK}=0xdeadbeef": r"This host has no AMD GPU '0xdeadbeef': it has 0 .*",
        },
        by_hook=(f"{ASK}=3", [3]),
        undone=[f"put the process in the host's group {group}" for group in (RENDER, VIDEO)],
        listed=(f"{ASK}=1,4", [1, 4], range(6)),
        explained=(
            f"{ASK}=0x84cafeae17e7610",
            [f"0x84cafeae17e7610:{number}" for number in range(4)],
        ),
        info=r"^2 +1002:74a2 qpx_nps1 +0000:08:00\.0 +0x84cafeae17e7610:1 +-$",
        findings=("amd-devices", [("ok", "")]),
        by_podman=(f"{ASK}=5", [5]),
        by_document=[(["5"], [5]), (["0x84cafeae17e7610:1"], [2]), (["all"], range(6))],
        in_document=[f"{ASK}=void"],
    )

    @MODES
    @RUNTIMES
    def test_device_nodes_belong_to_the_render_and_video_groups(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        in_mode(config, mode)
        bundle.environ(f"{ASK}=5")
        bundle.command(*self.case.look)
        seen = nodes_seen(devices.started(bundle, config))
        owners = {path: owner for path, (_, _, mode, owner) in seen.items() if mode == "660"}
        assert owners["/dev/kfd"] == owners["/dev/dri/renderD144"] == f"0:{RENDER}"
        assert owners["/dev/dri/card17"] == f"0:{VIDEO}"
        assert ("hooks" in bundle.spec()) == (mode == "hook")

    @ONE
    def test_doctor_reports_a_loaded_amd_driver_as_ok(self, config: Path, devices: Devices) -> None:
        findings = devices.ask(config, "doctor")["findings"]
        assert [each["status"] for each in findings if each["check"] == "amd-driver"] == ["ok"]

    @ONE
    @pytest.mark.parametrize(
        ("word", "numbers"),
        [
            ("all", range(6)),
            ("ALL", range(6)),
            ("0x084CAFEAE17E7610", range(1, 5)),
            ("08:00.0,0", range(5)),
            ("amd.com/gpu=5", [5]),
            ("none", []),
            ("None", []),
        ],
    )
    def test_amd_gpus_are_selected_by_index_id_bus_and_cdi_name(
        self, bundle: Bundle, config: Path, devices: Devices, word: str, numbers: range | list[int]
    ) -> None:
        bundle.environ(f"{ASK}={word}")
        bundle.command(*self.case.look)
        assert nodes_seen(devices.started(bundle, config)) == expected(devices, *numbers)

    @ONE
    @pytest.mark.parametrize("word", ["", "void", "0,Void"])
    def test_a_container_without_a_request_gets_no_amd_devices(
        self, bundle: Bundle, config: Path, devices: Devices, word: str
    ) -> None:
        bundle.environ(f"{ASK}={word}")
        bundle.command(*self.case.look)
        before = bundle.config.read_bytes()
        assert nodes_seen(devices.started(bundle, config)) == {}
        assert bundle.config.read_bytes() == before

    @ONE
    def test_missing_and_wrong_nodes_are_refused_and_reported_by_doctor(
        self, bundle: Bundle, installation: Installation, config: Path, workspace: Path
    ) -> None:
        """udev hasn't made one of the nodes, and another one is a different device's node."""
        with vendors.devices(installation, workspace / "amd-half", "amd", 3, missing=1) as half:
            text = config.read_text()
            config.write_text(re.sub(r"amd=[^\"]*", f"amd={half.root}", text))
            (half.root / "dev/dri/card2").unlink()
            shutil.move(half.root / "dev/dri/card0", half.root / "dev/dri/card2")
            run(["cp", "-a", half.root / "dev/dri/card2", half.root / "dev/dri/card0"]).ok()
            bundle.environ(f"{ASK}=1")
            assert "has no node /dev/dri/card1, /dev/dri/renderD129" in half.refused(bundle, config)
            bundle.environ(f"{ASK}=2")
            said = half.refused(bundle, config)
            assert re.search(r"GPU 2 can't be used: /dev/dri/card2 is another device's node", said)
            bundle.environ(f"{ASK}=0")
            bundle.command(*self.case.look)
            done = half.started(bundle, config)
            assert nodes_seen(done) == half.nodes(
                "/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128"
            )
            found = {each["message"] for each in half.ask(config, "doctor")["findings"]}
            assert any("no node /dev/dri/card1, /dev/dri/renderD129" in each for each in found)
            assert any("AMD GPU 2 (0x84cafeae17e7620) can't be used" in each for each in found)

    @ONE
    def test_a_swarm_resource_variable_selects_gpus_of_both_vendors(
        self, bundle: Bundle, config: Path, devices: Devices, driver: Driver
    ) -> None:
        """One variable can name GPUs of both vendors, because their ids have different formats."""
        config.write_text(f'swarm-resource = "DOCKER_RESOURCE_GPU"\n{config.read_text()}')
        bundle.environ(f"DOCKER_RESOURCE_GPU=0x84cafeae17e7620,{driver.gpus[5].uuid}")
        bundle.command(*vendors.look(*PATTERNS, driver=driver))
        done = devices.started(bundle, config)
        assert nodes_seen(done) == expected(devices, 5)
        assert vendors.gpus_seen(done, driver) == {5}

    @ONE
    def test_an_absent_driver_that_is_ignored_stops_no_other_vendor(
        self, bundle: Bundle, config: Path, devices: Devices, driver: Driver, tmp_path: Path
    ) -> None:
        text = re.sub(r"amd=[^\"]*", f"amd={tmp_path}", config.read_text())
        config.write_text(text.replace("[gpuhook]\n", '[gpuhook]\nmissing-driver = "ignore"\n'))
        bundle.environ(f"{ASK}=all", "NVIDIA_VISIBLE_DEVICES=5")
        bundle.command(*vendors.look(*PATTERNS, driver=driver))
        done = devices.started(bundle, config)
        assert vendors.gpus_seen(done, driver) == {5}
        assert nodes_seen(done) == {}
        assert "AMD's driver amdgpu isn't loaded" in vendors.logged(config)["warnings"][0]

    @ONE
    def test_an_absent_amd_driver_is_refused(
        self, bundle: Bundle, config: Path, devices: Devices, tmp_path: Path
    ) -> None:
        text = config.read_text()
        config.write_text(re.sub(r"amd=[^\"]*", f"amd={tmp_path}", text))
        bundle.environ(f"{ASK}=all")
        assert "AMD's driver amdgpu isn't loaded. Run modprobe" in devices.refused(bundle, config)

    @ONE
    @pytest.mark.parametrize(
        ("word", "held"), [("2", True), ("0x84cafeae17e7610", True), ("1", False)]
    )
    def test_an_exclusive_partition_in_use_is_refused_to_another_container(
        self,
        bundle: Bundle,
        config: Path,
        devices: Devices,
        low_level: tuple[str, Namespace],
        workspace: Path,
        roots: dict[str, Path],
        word: str,
        held: bool,
    ) -> None:
        """An id can name a device in use, so it is refused; a free partition is given."""
        text = config.read_text()
        config.write_text(text.replace("[gpuhook]\n", '[gpuhook]\nexclusive = ["amd.com/gpu"]\n'))
        bundle.environ(f"{ASK}=2")
        devices.start(bundle, config)
        runtime, entered = low_level
        with bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime) as other:
            other.environ(f"{ASK}={word}")
            other.command(*self.case.look)
            done = devices.started(other, config)
        if held:
            said = f"amd.com/gpu=0x84cafeae17e7610:1 is in use by the container {bundle.name}"
            assert said in done.failed().stderr
        else:
            assert nodes_seen(done) == expected(devices, 1)

    @ONE
    def test_prefork_server_serves_amd_gpus_and_notices_repartitioning(
        self, bundle: Bundle, driver: Driver, devices: Devices, tmp_path: Path
    ) -> None:
        """The server also notices that a GPU's partitions have changed."""
        site = Site(bundle, devices.installation, driver, bundle.runtime, tmp_path)
        node = devices.root / "sys/class/kfd/kfd/topology/nodes/6"
        away = devices.root / "sys/node-6"
        try:
            devices.configured(site.config)
            site.settle()
            site.serves(f"{ASK}=4")
            shutil.move(node, away)
            site.works()
            site.asks(f"{ASK}=5")
            assert "has no AMD GPU '5'" in site.run().failed().stdout
        finally:
            if away.exists():
                shutil.move(away, node)
            site.clear()

    def test_docker_gives_amd_devices_and_refuses_an_unknown_index(
        self,
        devices: Devices,
        workspace: Path,
        host: Namespace,
        driver: Driver,
        archive: Path,
    ) -> None:
        config = devices.configured(write_config(workspace / "amd-engines", driver.root, ["runc"]))
        runtimes, env = {"gpu-py": devices.installation.runtime}, {"GPUHOOK_CONFIG": str(config)}
        options = (f"--user={USER}:{USER}",)
        with dockerd(workspace / "docker-amd", host, runtimes, archive, env) as docker:
            with nothing_left(devices.root, pid=docker.pid):
                done = docker.run(
                    image("debian"), *self.case.look, env=(f"{ASK}=1,5",), options=options
                )
            assert nodes_seen(done) == expected(devices, 1, 5)
            assert vendors.groups_seen(done) == {USER, VIDEO, RENDER}
            done = docker.run(image("debian"), "true", env=(f"{ASK}=17",)).failed()
            assert "This host has no AMD GPU '17': it has 0 (" in done.stderr

    @pytest.mark.parametrize(
        ("name", "numbers"), [("5", [5]), ("0x84cafeae17e7610:1", [2]), ("all", range(6))]
    )
    @ONE
    def test_in_cdi_mode_a_cdi_spec_sets_groups_and_node_modes(
        self, bundle: Bundle, config: Path, devices: Devices, name: str, numbers: range | list[int]
    ) -> None:
        """In mode cdi, gpu-py applies a CDI spec's groups and node modes too.

        By CDI's rules a node belongs to the process' user if the CDI spec names no owner.
        """
        specs = config.parent / "cdi"
        argv: list[str | Path] = [devices.installation.command, "cdi", "generate"]
        argv += ["--config", config, f"--kind={self.case.kind}", "--output", specs]
        run(argv, env={"PATH": NO_ENGINES}).ok()
        in_mode(config, "cdi")
        section = "[nvidia-container-runtime.modes.cdi]"
        config.write_text(f'{config.read_text()}{section}\nspec-dirs = ["{specs}"]\n')
        bundle.change(as_user)
        bundle.environ(f"{ASK}={name}")
        bundle.command(*self.case.look)
        done = devices.started(bundle, config)
        wanted = expected(devices, *numbers)
        assert nodes_seen(done) == {
            path: (*what[:3], what[3].replace("0:", f"{USER}:", 1)) for path, what in wanted.items()
        }
        assert vendors.groups_seen(done) == {USER, VIDEO, RENDER}
