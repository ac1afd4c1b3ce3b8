"""Pods of careful clusters: restricted ones, in user namespaces, and with parts of GPUs.

The containerd is sid's, whose CRI has user namespaces. gpu-py starts some containers, and CDI
adds devices to the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import images
from harness.commands import wait_until
from harness.containerd import WITH_HANDLERS, containerd
from harness.cri import Container, Cri, Security
from harness.device_plugin import device_plugin, start
from harness.driver import lines_of_nvidia_smi
from harness.driver_folder import Machine
from harness.images import image
from harness.installation import Installation, harden, write_config
from harness.releases import Release, release
from kubelet import Answers, Kubelet, Node

DEBIAN = image("debian")
FUSE = Node("/dev/fuse", "/dev/fuse", "rwm")
# A handler whose containers are created by crun. Engines pass their own environment on to handlers.
BY_CRUN = """\
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py-crun]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py-crun.options]
      BinaryName = "{}"
"""
GPU = "nvidia.com/gpu"
PODS = "k8s.io"  # containerd's namespace for images of the CRI
# As required by Pod Security's level "restricted": no root, no capability, no way to get one.
RESTRICTED = Security(user=1000, restricted=True)
IN_NAMESPACE = Security(users=(2_000_000, 65536))
BOTH = Security(user=1000, restricted=True, users=(3_000_000, 65536))
# A replacement for a network plugin: the pod gets a network without any interface or route.
NETWORK = """\
#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}' ;;
ADD) cat <<END
{"cniVersion": "1.0.0", "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
 "ips": [{"address": "192.0.2.2/24", "interface": 0}]}
END
esac
"""


@pytest.fixture(scope="module")
def machine(installation: Installation, workspace: Path) -> Iterator[Machine]:
    made = Machine(installation, workspace / "careful", "3,0,1,2")
    harden(made.config)
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def sid(
    workspace: Path, engine_roots: dict[str, Path], installation: Installation, machine: Machine
) -> Iterator[Release]:
    place = workspace / "careful-sid"
    with release("sid", engine_roots["sid"], place, installation, machine.driver) as made:
        yield made


@pytest.fixture(scope="module")
def nodes(sid: Release, machine: Machine) -> None:
    """The driver's nodes in the host's /dev, because in a user namespace runc uses only these."""
    script = f"""
    mount -t tmpfs -o mode=755 tmpfs /mnt
    cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/fuse /dev/fd /mnt
    cp -a {machine.root}/dev/. /mnt
    mkdir -p /mnt/pts /mnt/shm && ln -sf pts/ptmx /mnt/ptmx
    mount --bind /dev/pts /mnt/pts && mount -t tmpfs tmpfs /mnt/shm
    mount --make-private /dev && mount --rbind /mnt /dev
    """
    sid.namespace.run("sh", "-ec", script).ok()


@pytest.fixture(scope="module")
def documents(workspace: Path) -> Path:
    made = workspace / "careful-cdi"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def cri(
    workspace: Path,
    sid: Release,
    machine: Machine,
    nodes: None,
    archive: Path,
    documents: Path,
    roots: dict[str, Path],
) -> Iterator[Cri]:
    network = workspace / "careful-cni"
    (network / "net.d").mkdir(parents=True)
    for name in ("loopback", "nothing"):
        (network / name).write_text(NETWORK)
        (network / name).chmod(0o755)
    plugins = '{"cniVersion": "1.0.0", "name": "nothing", "plugins": [{"type": "nothing"}]}'
    (network / "net.d/nothing.conflist").write_text(plugins)
    cni = f'bin_dir = "{network}"\n    conf_dir = "{network}/net.d"'
    text = WITH_HANDLERS.replace('bin_dir = "/usr/lib/cni"', cni)
    switch = f'enable_cdi = true\n  cdi_spec_dirs = ["{documents}"]\n'
    text = text.replace("disable_apparmor = true\n", f"disable_apparmor = true\n  {switch}")
    text += BY_CRUN.format(by_crun(workspace / "careful-crun", sid, machine))
    pause = images.save(
        {"pause": roots["busybox"]}, workspace / "careful-pause.tar", ("sleep", "infinity")
    )
    env = {"GPUHOOK_CONFIG": str(machine.config)}
    words = (workspace / "careful-1", sid.namespace, sid.installation.runtime, archive, env, text)
    with containerd(*words) as engine:
        for each in (archive, pause):
            engine.call("images", "import", each, within=PODS).ok()
        made = Cri(engine.folder / "containerd.sock")
        wait_until(made.is_ready, "the CRI answers")
        yield made
        made.close()


def by_crun(folder: Path, sid: Release, machine: Machine) -> Path:
    """Write a gpu-py program whose low-level runtime is crun."""
    config = write_config(folder, machine.root, ["crun"])
    harden(config)
    program = folder / "gpu-py"
    program.write_text(f'#!/bin/sh\nGPUHOOK_CONFIG={config} exec {sid.installation.runtime} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(params=["volume-mounts", "cdi-cri"])
def strategy(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@contextmanager
def plugin(
    workspace: Path, sid: Release, machine: Machine, documents: Path, strategy: str
) -> Iterator[Kubelet]:
    place = workspace / f"careful-{strategy}-{len([*workspace.iterdir()])}"
    options = (f"--device-list-strategy={strategy}", f"--cdi-folder={documents}")
    with device_plugin(place, sid.installation, machine.config, GPU, *options) as kubelet:
        yield kubelet


def expected(answers: Answers, machine: Machine) -> list[str]:
    return lines_of_nvidia_smi(
        [gpu for gpu in machine.driver.gpus if gpu.uuid in answers["ids"][GPU]]
    )


def smi(container: Container) -> list[str]:
    return container.exec("sh", "-c", "nvidia-smi -L || :").ok().stdout.splitlines()


def handler(strategy: str) -> str:
    return "gpu-py" if strategy == "volume-mounts" else "runc"


@pytest.mark.parametrize(
    "security", [RESTRICTED, IN_NAMESPACE, BOTH], ids=["restricted", "user-namespace", "both"]
)
def test_restricted_and_user_namespace_pods_get_their_gpus(
    security: Security,
    strategy: str,
    cri: Cri,
    workspace: Path,
    sid: Release,
    machine: Machine,
    documents: Path,
) -> None:
    with plugin(workspace, sid, machine, documents, strategy) as kubelet:
        answers = kubelet.admit("one", {GPU: 2})
        with cri.pod(handler(strategy), security=security) as pod:
            container = start(pod, DEBIAN, answers)
            assert smi(container) == expected(answers, machine)
            user, mapping, capabilities = (
                container.exec(*words).ok().stdout.split()
                for words in (
                    ("id", "-u"),
                    ("cat", "/proc/self/uid_map"),
                    ("busybox", "grep", "CapBnd", "/proc/self/status"),
                )
            )
            assert user == [str(security.user)]
            assert (security.users is None) == (mapping == ["0", "0", "4294967295"])
            assert (int(capabilities[1], 16) == 0) == security.restricted


@pytest.mark.parametrize("runtime", ["gpu-py", "gpu-py-crun"])
def test_pod_in_a_user_namespace_gets_gpus_and_another_device(
    runtime: str, cri: Cri, workspace: Path, sid: Release, machine: Machine, documents: Path
) -> None:
    """The kubelet sets hostUsers: false, and another plugin adds a node; crun loses the bundle."""
    with plugin(workspace, sid, machine, documents, "volume-mounts") as kubelet:
        answers = kubelet.admit("one", {GPU: 2})
        with cri.pod(runtime, security=IN_NAMESPACE) as pod:
            answers = {**answers, "devices": [*answers["devices"], FUSE]}
            container = start(pod, DEBIAN, answers)
            assert smi(container) == expected(answers, machine)
            container.exec("test", "-c", "/dev/fuse").ok()


def test_an_init_container_gets_the_pods_gpus_and_a_sidecar_none(
    strategy: str, cri: Cri, workspace: Path, sid: Release, machine: Machine, documents: Path
) -> None:
    """An init container gets the main container's devices before it; a sidecar gets none."""
    with plugin(workspace, sid, machine, documents, strategy) as kubelet:
        answers = kubelet.admit("one", {GPU: 2})
        with cri.pod(handler(strategy), security=RESTRICTED) as pod:
            every = ("NVIDIA_VISIBLE_DEVICES=all",)
            sidecar = pod.start(DEBIAN, "sleep", "1000", env=every, name="sidecar")
            count = f'test "$(nvidia-smi -L | busybox grep -c GPU-)" = {len(answers["ids"][GPU])}'
            first = start(pod, DEBIAN, answers, name="first", command=("sh", "-c", count))
            wait_until(lambda: first.status() is not None, "the first one has ended")
            assert first.status() == 0
            assert smi(start(pod, DEBIAN, answers)) == expected(answers, machine)
            assert smi(sidecar) == []
