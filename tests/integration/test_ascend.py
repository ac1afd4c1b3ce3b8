"""Huawei Ascend's NPUs, simulated, in real containers."""

from pathlib import Path

import pytest
from harness import vendors
from harness.bundles import Bundle
from harness.commands import Result
from harness.driver import Driver
from harness.images import image
from harness.installation import write_config
from harness.namespaces import Namespace
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left
from harness.vendor_contract import NO_GROUPS, Case, Contract
from harness.vendor_engines import documents, podman_with_hook, run_with
from harness.vendors import MODES, Devices, Seen, in_mode, nodes_seen

ASK = "ASCEND_VISIBLE_DEVICES"
GROUP = 1000
PATTERNS = ("/dev/*davinci*", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp*", "/dev/ub*")
SHARED = (
    "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist",
    "/dev/uburma/ub0",
)  # fmt: skip
LIBRARY = "libascend_hal.so"
DRIVER_FOLDER = "/usr/local/Ascend/driver"
# Print which of the files a container has. The loader finds the library without any variable.
FILES = f"""
echo "library $(dlprobe {LIBRARY})"
npu-smi
for path in /etc/hccl_rootinfo.json {DRIVER_FOLDER}/lib64 /usr/local/dcmi /run/docker.sock; do
    [ ! -e $path ] || echo "path $path"
done
touch {DRIVER_FOLDER}/lib64/mine 2>/dev/null || echo read-only
"""


def expected(npus: Devices, *numbers: int | str, opened: str = "ENXIO") -> dict[str, Seen]:
    """Return what a container with these NPUs sees; numbers from 100 on are vNPUs."""
    found = npus.nodes(*SHARED, opened=opened)
    for number in numbers:
        sort = "vdavinci" if int(number) >= 100 else "davinci"
        found[f"/dev/davinci{number}"] = npus.node(f"/dev/{sort}{number}", opened)
    return found


def library_of(npus: Devices) -> str:
    """Return what dlprobe prints for the host's library."""
    path = f"{DRIVER_FOLDER}/lib64/driver/{LIBRARY}"
    status = (npus.root / path.lstrip("/")).stat()
    return f"{path} {status.st_dev}:{status.st_ino}"


def lines_seen(done: Result, kind: str) -> list[str]:
    lines = done.ok().stdout.splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{kind} ")]


class TestAscend(Contract):
    """Eleven NPUs: NPU 7 is split, NPU 4 is unplugged, and some nodes aren't NPUs."""

    case = Case(
        vendor="ascend",
        count=0,
        settings={
            "numbers": ",".join(str(number) for number in range(12) if number != 4),
            "vnpus": "212,213",
            "ub": "ub0",
            "decoys": "yes",
        },
        made=["NPU 11: Ascend 910B at 0000:0b:00.0", "vNPU 212"],
        kind="ascend.com/npu",
        patterns=PATTERNS,
        expected=expected,
        groups=frozenset({GROUP}),
        asked=([f"{ASK}=11, 2 - 3,212", "LD_LIBRARY_PATH=/mine"], [2, 3, 11, 212]),
        beginnings=["ASCEND_", "LD_"],
        variables=[
            f"{ASK}=11, 2 - 3,212",
            "LD_LIBRARY_PATH=/mine",
            "ASCEND_DOCKER_RUNTIME=True",
        ],
        other=[
            (
                f"{ASK}=1,213",
                [f"/dev/{name}" for name in ("davinci0", "davinci1", "vdavinci212", "vdavinci213")],
                ["/dev/davinci1", "/dev/vdavinci213"],
            )
        ],
        beside=(f"{ASK}=Ascend910-10", [10]),
        refused={
            f"{ASK}=4": r"This host has no NPU or vNPU '4': it has 0 \(npu-0\), .*",
            f"{ASK}=2-5": r"This host has no NPU or vNPU '2-5': 4 doesn't exist; it has .*",
            f"{ASK}=98": r"This host has no NPU or vNPU '98': .*",
            f"{ASK}=7": (r"NPU 7 can't be used: it is split into vNPUs\. Request another one; .*"),
        },
        by_hook=(f"{ASK}=0", [0]),
        undone=[f"put the process in the host's group {GROUP}", "set ASCEND_DOCKER_RUNTIME=True"],
        listed=(f"{ASK}=212", [212], [*(n for n in range(12) if n != 4), 212, 213]),
        explained=(f"{ASK}=0", ["npu-0"]),
        info=r"^7 +Ascend 910B +0000:07:00\.0 +npu-7 +it is split into vNPUs$",
        findings=("ascend-devices", [("ok", "has 13 NPUs and vNPUs")]),
        by_podman=(f"{ASK}=5", [5]),
        by_document=[
            (["10", "vnpu-212"], [10, 212]),
            (["all"], [*(n for n in range(12) if n not in (4, 7)), 212, 213]),
        ],
        in_document=["ASCEND_DOCKER_RUNTIME=True", f"{ASK}=void"],
    )

    @pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
    @RUNTIMES
    def test_driver_files_are_mounted_and_the_loader_finds_the_library(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        bundle.environ(f"{ASK}=0")
        bundle.command("sh", "-c", FILES)
        with nothing_left(devices.root, pid=bundle.namespace.pid):
            done = devices.started(bundle, config)
        [library] = lines_seen(done, "library")
        assert library == f"{LIBRARY} {library_of(devices)}"
        assert lines_seen(done, "path") == [
            "/etc/hccl_rootinfo.json", f"{DRIVER_FOLDER}/lib64", "/usr/local/dcmi",
        ]  # fmt: skip
        assert {"npu-smi 24.1.rc3", "read-only"} < {*done.stdout.splitlines()}

    @ONE
    def test_nodrv_option_gives_device_nodes_without_driver_files(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        bundle.environ(f"{ASK}=0", "ASCEND_RUNTIME_OPTIONS=NODRV", "DISABLE_UB_MOUNT=True")
        bundle.command(
            "sh", "-c", f"{self.case.look[-1]}\nls {DRIVER_FOLDER} 2>/dev/null && echo there"
        )
        bundle.command(
            "sh", "-c", f"{self.case.look[-1]}\n[ ! -e {DRIVER_FOLDER} ] && echo no files"
        )
        done = devices.started(bundle, config)
        wanted = expected(devices, 0)
        del wanted["/dev/uburma/ub0"]
        assert nodes_seen(done) == wanted
        assert "no files" in done.stdout.splitlines()

    @ONE
    @MODES
    def test_the_virtual_option_selects_vnpus(
        self, bundle: Bundle, config: Path, devices: Devices, mode: str
    ) -> None:
        in_mode(config, mode)
        bundle.environ(f"{ASK}=all", "ASCEND_RUNTIME_OPTIONS=VIRTUAL")
        bundle.command(*self.case.look)
        assert nodes_seen(devices.started(bundle, config)) == expected(devices, 212, 213)

    @ONE
    def test_no_engine_socket_is_given(
        self, bundle: Bundle, config: Path, devices: Devices
    ) -> None:
        """Neither the vendor's variable nor a list can give it."""
        lists = devices.root / "etc/ascend-docker-runtime.d"
        (devices.root / "run").mkdir(exist_ok=True)
        socket, mine = devices.root / "run/docker.sock", lists / "mine.list"
        try:
            socket.write_text("")
            mine.write_text("/run/docker.sock\n/run\n/usr/local/dcmi\n")
            bundle.environ(f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=MINE", "MOUNT_BY_RUNTIME_FOR_DP=1")
            bundle.command("sh", "-c", FILES)
            done = devices.started(bundle, config)
            assert lines_seen(done, "path") == ["/etc/hccl_rootinfo.json", "/usr/local/dcmi"]
            warnings = vendors.logged(config)["warnings"]
            assert warnings[0].startswith(
                "The list mine has /run/docker.sock, which belongs to /run/docker"
            )
            assert "which contains /run/" in warnings[1]
            explained = devices.ask(config, "explain", "--bundle", str(bundle.path))
            assert explained["warnings"] == warnings
            [ignored] = explained["request"]["ignored"]
            assert ignored["reason"].startswith(
                "MOUNT_BY_RUNTIME_FOR_DP requests the engines' sockets"
            )
        finally:
            mine.unlink(missing_ok=True)
            socket.unlink(missing_ok=True)

    def test_the_hook_gives_driver_files_alone_and_beside_an_nvidia_gpu(
        self, bundle: Bundle, config: Path, devices: Devices, driver: Driver
    ) -> None:
        library = f"{LIBRARY} {library_of(devices)}"
        bundle.command("sh", "-c", f"{vendors.look(driver=driver)[-1]}\n{FILES}")
        bundle.environ(f"{ASK}=10", "NVIDIA_VISIBLE_DEVICES=5")
        both = devices.started(bundle, config)
        assert library in lines_seen(both, "library")
        assert vendors.gpus_seen(both, driver) == {5}
        bundle.command("sh", "-c", FILES)
        devices.hook(bundle, config)
        bundle.environ(f"{ASK}=0", "NVIDIA_VISIBLE_DEVICES=void")
        assert lines_seen(bundle.run(bundle.runtime), "library") == [library]

    def test_podman_gives_driver_files_by_hook_and_by_cdi_spec(
        self, devices: Devices, driver: Driver, host: Namespace, workspace: Path, archive: Path
    ) -> None:
        own = write_config(workspace / "ascend-files-etc", driver.root, ["runc"])
        devices.configured(own, tail=NO_GROUPS)
        folder, library = workspace / "ascend-files", [f"{LIBRARY} {library_of(devices)}"]
        with (
            podman_with_hook(devices, own, folder, host, archive) as engine,
            documents(devices, own, workspace / "ascend-files-cdi", self.case.kind),
        ):
            done = engine.run(image("debian"), "sh", "-c", FILES, env=(f"{ASK}=5",))
            assert lines_seen(done, "library") == library
            done = run_with(engine, ("sh", "-c", FILES), f"{self.case.kind}=10")
            assert lines_seen(done, "library") == library
