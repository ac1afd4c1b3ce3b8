"""The image's installer, run by podman as the DaemonSet would, on a node with a containerd."""

import os
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
from harness import images
from harness.commands import Result, stop, wait_until
from harness.cri import Cri, CriError
from harness.driver import Driver, lines_of_nvidia_smi
from harness.manifests import IMAGE, containers, daemon_set, overlay, pod_of
from harness.podman_node import CONFIG, FOLDERS, STATE, Node, node
from harness.snapshot import contents
from harness.strangers import AS_STRANGER, pretender

from gpuhook.cluster.device_plugin.status import StatusFile

DEBIAN = images.image("debian")
PAUSE = images.image("pause")
GPU_PY = "/opt/gpuhook/bin/gpu-py"
REMOVE = ("remove", "--restart=none")
WAITING = "waiting until these have ended"
# A configuration as a node's administrator may write it. The installer looks for containers in
# the state folder.
CONTAINERD = """\
# the admin's
version = 2
root = "{folder}/containerd"
state = "{state}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


@pytest.fixture(scope="module")
def kept(workspace: Path, node_image: Path) -> Iterator[Node]:
    with node(workspace / "node", node_image) as made:
        yield made


@pytest.fixture(scope="module")
def pause_archive(workspace: Path, roots: dict[str, Path]) -> Path:
    """The image of the process that holds a pod's namespaces."""
    command = ("sleep", "infinity")
    return images.save({"pause": roots["busybox"]}, workspace / "node-pause.tar", command)


@pytest.fixture
def fresh(kept: Node) -> Node:
    """The node without any files of gpuhook."""
    for folder in FOLDERS:
        kept.space.run("find", folder, "-mindepth", "1", "-delete").ok()
    kept.path(CONFIG).write_text(
        CONTAINERD.format(folder=kept.podman.folder, state=STATE, pause=PAUSE)
    )
    return kept


def install(node: Node, *words: str, image: str = IMAGE) -> Result:
    """Run the installer until it exits, with the mounts that its first word needs."""
    variant = "overlays/remove" if words[:1] == ("remove",) else "base"
    return node.pod(
        daemon_set(variant, "installer"), "installer", *words, image=image, options=("--rm",)
    )


def snapshot(node: Node) -> dict[str, bytes | None]:
    """Return the node's files below the folders that may change."""
    found: dict[str, bytes | None] = {}
    for folder in FOLDERS:
        found |= contents(node.path(folder))
    return found


def current(node: Node) -> Path:
    """Return the folder of the active version, as a path on the node."""
    return Path(os.readlink(node.path(GPU_PY))).parents[1]


def versions(node: Node) -> set[str]:
    return {each.name for each in node.path("/opt/gpuhook/versions").iterdir()}


def check(node: Node) -> None:
    """Check that gpuhook is completely installed on the node, without incomplete files."""
    version = current(node)
    for link in node.path("/opt/gpuhook/bin").iterdir():
        assert os.readlink(link) == f"{version}/bin/{link.name}"
    assert version.name in versions(node)
    assert not [name for name in versions(node) if name.startswith(".")]
    known = {"bin", "versions", "settings", "device-plugin.yaml"}
    assert {each.name for each in node.path("/opt/gpuhook").iterdir()} <= known
    assert "gpuhook, version" in node.space.run("/opt/gpuhook/bin/gpuhook", "--version").ok().stdout
    done = node.space.run("/opt/gpuhook/bin/gpuhook-container-cli", "--version").ok()
    assert "version" in done.stdout


def test_installed_programs_run_with_an_older_c_library_and_no_python(
    fresh: Node, releases: dict[str, Path]
) -> None:
    """With CDI a node gets only programs, which need nothing from its distribution."""
    fresh.pod(daemon_set("overlays/cdi-pod", "installer"), "installer", options=("--rm",)).ok()
    assert not fresh.path("/etc/containerd/conf.d").exists()
    root = releases["bullseye"]
    assert not [*root.glob("usr/bin/python3*")]
    script = (
        f"mount --bind {root} /mnt && mount -t tmpfs tmpfs /mnt/opt && mkdir /mnt/opt/gpuhook"
        ' && mount --bind /opt/gpuhook /mnt/opt/gpuhook && exec chroot /mnt "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    for words in ("gpuhook --version", "gpuhook-container-cli --version"):
        program, option = words.split()
        fresh.space.run(*command, f"/opt/gpuhook/bin/{program}", option).ok()
    # Modules that the plugin's unit and the metrics need, with libraries in C++ and Rust.
    version = current(fresh)
    imports = f"import sys; sys.path.append('{version}/lib/gpuhook')"
    imports += "; import bcrypt, google.protobuf.message, grpc, prometheus_client"
    python = str(version / "bin/python3")
    fresh.space.run(*command, python, "-IS", "-c", imports).ok()


def test_repeated_and_concurrent_installs_give_the_same_files(fresh: Node) -> None:
    before = snapshot(fresh)
    said = install(fresh, "install", "--restart=none").ok().stdout
    assert "restart containerd" in said
    assert "wrote /etc/containerd/" in said
    # The pod sees no driver, and only the installer may restart the engine. So the output mentions
    # neither the driver nor the restart command.
    assert not [each for each in ("driver", "doctor", "systemctl restart") if each in said]
    check(fresh)
    installed = snapshot(fresh)
    assert "restart containerd" not in install(fresh, "install", "--restart=none").ok().stdout
    assert snapshot(fresh) == installed

    install(fresh, "remove", "--restart=none").ok()
    assert {path: data for path, data in snapshot(fresh).items() if data} == {
        path: data for path, data in before.items() if data
    }
    words = (daemon_set("base", "installer"), "installer", "install", "--restart=none")
    both = [fresh.begin(*words), fresh.begin(*words)]
    assert [fresh.end(each).ok().status for each in both] == [0, 0]
    check(fresh)
    assert snapshot(fresh) == installed


def test_an_install_killed_at_any_moment_can_be_repeated(fresh: Node) -> None:
    for hundredths in range(0, 120, 30):
        container = fresh.begin(
            daemon_set("base", "installer"), "installer", "install", "--restart=none"
        )
        time.sleep(hundredths / 100)
        fresh.podman.call("kill", "--signal=KILL", container)  # if it hasn't exited yet
        fresh.end(container)
    install(fresh, "install", "--restart=none").ok()
    check(fresh)


@pytest.mark.parametrize("name", ["program", "link"])
def test_foreign_files_in_the_program_folder_are_unchanged(fresh: Node, name: str) -> None:
    """--folder may name a folder that also has other software's files."""
    programs = fresh.path("/opt/gpuhook/bin")
    programs.mkdir(parents=True)
    (programs / "program").write_text("theirs")
    (programs / "link").symlink_to("program")
    (programs / ("link" if name == "program" else "program")).unlink()
    before = snapshot(fresh)
    for action in ("install", "remove"):
        failed = install(fresh, action, "--restart=none").failed()
        assert f"/opt/gpuhook/bin/{name} is there" in failed.stderr
        assert snapshot(fresh) == before


def test_a_damaged_installation_is_replaced(fresh: Node) -> None:
    install(fresh, "install", "--engine=none").ok()
    first = current(fresh)
    fresh.path(first / "lib/libc.so.6").write_bytes(b"")
    install(fresh, "install", "--engine=none").ok()
    assert current(fresh) != first
    check(fresh)


@pytest.fixture(scope="module")
def newer(kept: Node) -> str:
    """The name of an image with another version of gpuhook."""
    call, name = kept.podman.call, "localhost/gpuhook:newer"
    container = call("create", IMAGE).ok().stdout.strip()
    version = kept.podman.folder / "version"
    version.write_text("9.9.9-newer\n")
    call("cp", version, f"{container}:/usr/lib/gpuhook-node/version").ok()
    call("commit", "--quiet", container, name).ok()
    call("rm", container).ok()
    return name


def test_an_upgrade_and_a_downgrade_install_the_named_version(fresh: Node, newer: str) -> None:
    install(fresh, "install", "--restart=none").ok()
    first, files = current(fresh), snapshot(fresh)
    done = install(fresh, "install", "--restart=none", image=newer).ok()
    assert "restart containerd" not in done.stdout  # these files name a stable symlink
    assert current(fresh).name == "9.9.9-newer"
    assert versions(fresh) == {first.name, "9.9.9-newer"}  # a starting container may still use it
    check(fresh)

    install(fresh, "install", "--restart=none").ok()
    assert current(fresh) == first
    os.utime(fresh.path("/opt/gpuhook/versions/9.9.9-newer"), (0, 0))
    install(fresh, "install", "--restart=none").ok()
    assert snapshot(fresh) == files
    check(fresh)


@contextmanager
def containerd(node: Node, config: Path | None, *archives: Path) -> Iterator[Cri]:
    """Run the node's containerd as a service; without ``config`` it uses the node's settings."""
    environment = {"GPUHOOK_CONFIG": str(config)} if config else {}
    cri = Cri(node.path(STATE / "containerd.sock"))
    try:
        with node.service("containerd", environment):
            wait_until(cri.is_ready, "containerd answers")
            for archive in archives:
                node.space.run("ctr", "-n", "k8s.io", "images", "import", archive).ok()
            yield cri
    finally:
        cri.close()


def mounted(uuid: str) -> tuple[str, str, bool]:
    """Return a mount, in the CRI's form, by which a plugin requests a GPU."""
    return f"/var/run/nvidia-container-devices/{uuid}", "/dev/null", False


BY_HAND = """\
# the admin's
accept-nvidia-visible-devices-envvar-when-unprivileged = true  # older than the installer
[nvidia-container-cli]
root = "{root}"
[nvidia-container-runtime]
runtimes = ["runc"]
"""


def test_a_pods_own_variable_selects_gpus_only_where_config_accepts_it(
    fresh: Node, driver: Driver, archive: Path, pause_archive: Path, tmp_path: Path
) -> None:
    """An older base left manual settings; the overlay environment accepts the variable again."""
    settings = fresh.path("/etc/gpuhook/config.toml")
    settings.write_text(BY_HAND.format(root=driver.root))
    every = ["NVIDIA_VISIBLE_DEVICES=all"]

    def given(cri: Cri, *mounts: tuple[str, str, bool]) -> str:
        with cri.pod("gpu-py") as pod:
            container = pod.start(DEBIAN, "sleep", "1000", env=every, mounts=mounts)
            return container.exec("sh", "-c", "nvidia-smi -L || :").ok().stdout

    with containerd(fresh, None, archive, pause_archive) as cri:
        assert "containerd was restarted" in install(fresh).ok().stdout
        wait_until(cri.is_ready, "containerd answers again")
        assert given(cri) == ""
        one = given(cri, mounted(driver.gpus[1].uuid))
        assert one.splitlines() == lines_of_nvidia_smi(driver.chosen(1))
        assert "# the admin's\n" in settings.read_text()
        # The installer refuses an overlay without gpu-py here: then the engine would itself apply
        # the pod's variable.
        without = daemon_set("overlays/cdi-pod", "installer")
        refused = fresh.pod(without, "installer", options=("--rm",)).failed()
        assert "overlays/remove first" in refused.stderr
        assert given(cri) == ""

        document = daemon_set("overlays/environment", "installer")
        before = fresh.pids("containerd")
        fresh.pod(document, "installer", options=("--rm",)).ok()
        assert given(cri).splitlines() == lines_of_nvidia_smi(driver.gpus)

        # A ConfigMap decides whether the variable is accepted. Its change restarts no engine.
        text = BY_HAND.format(root=driver.root).replace("= true", "= false")
        (tmp_path / "config.toml").write_text(text)
        host = {"gpuhook-config": str(tmp_path)}
        fresh.pod(document, "installer", host=host, options=("--rm",)).ok()
        assert given(cri) == ""
        assert fresh.pids("containerd") == before
        install(fresh, "remove").ok()
        assert settings.read_text() == BY_HAND.format(root=driver.root)


def test_a_pod_starts_after_install_and_the_node_is_restored_by_remove(
    fresh: Node, driver: Driver, archive: Path, pause_archive: Path
) -> None:
    fresh.path("/etc/gpuhook/config.toml").write_text(BY_HAND.format(root=driver.root))
    before = snapshot(fresh)
    with containerd(fresh, None, archive, pause_archive) as cri:
        pids = fresh.pids("containerd")
        assert "containerd was restarted" in install(fresh).ok().stdout
        assert not pids & fresh.pids("containerd")
        wait_until(cri.is_ready, "containerd answers again")
        assert "restarted" not in install(fresh).ok().stdout
        with cri.pod("gpu-py") as pod:
            asked = [mounted(driver.gpus[index].uuid) for index in (0, 2)]
            container = pod.start(DEBIAN, "sleep", "1000", mounts=asked)
            done = container.exec("nvidia-smi", "-L").ok()
            assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))

            document = fresh.path("/run/cdi/nvidia.com-gpu.yaml")
            document.write_text("path: /opt/gpuhook/bin/gpuhook-cdi-hook")
            removal = fresh.begin(daemon_set("overlays/remove", "installer"), "installer")
            assert pod.name in wait_for_line(fresh, removal, WAITING)
            check(fresh)
            # Removal unregisters gpu-py from the engine last, so running containers can be used
            # until they end.
            assert container.exec("nvidia-smi", "-L").ok().stdout == done.stdout
            with cri.pod("gpu-py", "other"):
                pass
            words = ("install", "--set-default")
            assert "containerd was restarted" in install(fresh, *words).ok().stdout
            wait_until(cri.is_ready, "containerd, which was restarted, can end the pod")
        assert "containerd was restarted" in fresh.end(removal).ok().stdout
        wait_until(cri.is_ready, "containerd answers again")
        with pytest.raises(CriError, match="no runtime for"), cri.pod("gpu-py"):
            pass
    after = snapshot(fresh)
    new = set(after) - set(before)
    assert {path: after[path] for path in before} == before
    assert {Path(path).relative_to(fresh.path("/")) for path in new} <= {Path("opt/gpuhook")}


def test_the_documented_remedy_works_where_the_programs_are_missing(
    fresh: Node, archive: Path, pause_archive: Path
) -> None:
    """Without the programs no pod starts, not even the installer's, so the page has a remedy."""
    page = (images.REPOSITORY / "docs/kubernetes/deploy.md").read_text()
    section = page.partition("### Where /opt/gpuhook is gone\n")[2].partition("\n## ")[0]
    command, restart = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert restart == "systemctl restart containerd"
    with containerd(fresh, None, archive, pause_archive) as cri:
        install(fresh, "install", "--set-default").ok()
        wait_until(cri.is_ready, "containerd answers again")
        with cri.pod(""):
            pass
        fresh.space.run("find", "/opt/gpuhook", "-mindepth", "1", "-delete").ok()
        with pytest.raises(CriError, match="gpu-py"), cri.pod(""):
            pass
        fresh.space.run("sh", "-ec", command).ok()
        before = fresh.pids("containerd")
        fresh.space.run("pkill", "-x", "containerd").ok()  # the node's loop starts it again
        wait_until(lambda: not before & fresh.pids("containerd"), "containerd has ended")
        wait_until(cri.is_ready, "containerd answers again")
        with cri.pod(""):
            pass
        assert "containerd was restarted" in install(fresh, "install", "--set-default").ok().stdout
        wait_until(cri.is_ready, "containerd answers again")
        with cri.pod("gpu-py"), cri.pod("", "other"):
            pass
        check(fresh)


def wait_for_line(node: Node, container: str, text: str) -> str:
    """Return a container's output as soon as it contains ``text``."""

    def said() -> str:
        done = node.podman.call("logs", container).ok()
        return done.stdout + done.stderr

    wait_until(lambda: text in said(), f"{text!r} is said", shown=said)
    return said()


def test_removal_waits_only_for_conmon_of_root(fresh: Node, workspace: Path) -> None:
    """Other users may start a process with this name and these arguments; only root's counts."""
    words = ("-r", GPU_PY)
    enter = fresh.space.enter()
    with pretender(workspace / "strangers/conmon", *words, way=[*enter, *AS_STRANGER]):
        install(fresh, "install", "--restart=none").ok()
        assert fresh.path(GPU_PY).is_symlink()
        install(fresh, *REMOVE).ok()
        assert not fresh.path(GPU_PY).is_symlink()
    with pretender(workspace / "roots/conmon", *words, way=enter):
        install(fresh, "install", "--restart=none").ok()
        removal = fresh.begin(daemon_set("overlays/remove", "installer"), "installer", *REMOVE)
        said = wait_for_line(fresh, removal, WAITING).split()
        assert len(fresh.pids("conmon") & set(said)) == 1
        assert fresh.path(GPU_PY).is_symlink()
    fresh.end(removal).ok()


def test_remove_at_end_removes_everything_when_the_pod_ends(fresh: Node) -> None:
    """stay --remove-at-end removes all files when the pod ends."""
    before = snapshot(fresh)
    options = ("stay", "--remove-at-end", "--restart=none")
    container = fresh.begin(daemon_set("overlays/remove", "installer"), "installer", *options)
    wait_for_line(fresh, container, "install-node: done")
    check(fresh)
    fresh.podman.call("kill", "--signal=TERM", container).ok()
    fresh.end(container).ok()
    assert snapshot(fresh).keys() - before.keys() <= {str(fresh.path("/opt/gpuhook"))}


@pytest.fixture
def systemctl(fresh: Node) -> Iterator[Path]:
    """The file with the arguments of calls to a stand-in for systemctl, which does nothing else."""
    fake = fresh.path("/opt/systemctl")
    fake.write_text('#!/bin/sh\necho "$@" >>/opt/said\n')
    fake.chmod(0o755)
    program = fresh.space.run("sh", "-c", "command -v systemctl").ok().stdout.strip()
    fresh.space.run("mount", "--bind", "/opt/systemctl", program).ok()
    yield fresh.path("/opt/said")
    fresh.space.run("umount", program).ok()


def test_a_restart_by_systemd_needs_privileges(fresh: Node, systemctl: Path) -> None:
    """systemctl runs among the node's files, and the installer reports missing privileges."""
    words = ("install", "--restart=systemd", "--unit=k3s")
    refused = install(fresh, *words).failed()
    assert "SYS_ADMIN" in refused.stderr
    assert not systemctl.exists()
    document = daemon_set("base", "installer")
    security = containers(pod_of(document))["installer"]["securityContext"]
    security["capabilities"]["add"] = ["SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE"]
    fresh.pod(document, "installer", *words, options=("--rm",)).ok()
    assert systemctl.read_text() == "restart k3s\n"


K3S = Path("/var/lib/rancher/k3s/agent/etc/containerd")
# The part of a k3s start that writes containerd's configuration file.
START_K3S = f"""\
#!/bin/sh
template={K3S}/config.toml.tmpl
sed -e '/{{{{ template "base" . }}}}/{{r /opt/k3s/base' -e 'd}}' $template >{K3S}/config.toml
exec containerd -c {K3S}/config.toml -a /run/k3s/containerd/containerd.sock \\
    --state /run/k3s/containerd
"""


@pytest.mark.protects(
    "engines-file",
    "installer: only a file that the node's containerd reads is changed",
)
def test_a_k3s_node_is_configured_and_restored(
    fresh: Node, driver: Driver, archive: Path, pause_archive: Path, tmp_path: Path
) -> None:
    """k3s writes containerd's file at each start, from a template and its own settings."""
    fresh.path("/etc/gpuhook/config.toml").write_text(BY_HAND.format(root=driver.root))
    fresh.path("/opt/k3s").mkdir()
    fresh.path(K3S).mkdir(parents=True)
    base = CONTAINERD.format(folder=fresh.podman.folder, state="/run/k3s/containerd", pause=PAUSE)
    head = "# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.\n"
    fresh.path("/opt/k3s/base").write_text(head + base)
    fresh.path("/opt/k3s/start").write_text(START_K3S)
    template = fresh.path(K3S / "config.toml.tmpl")
    template.write_text('{{ template "base" . }}\n')
    socket = "/run/k3s/containerd/containerd.sock"
    cri = Cri(fresh.path(socket))

    def run(variant: str, name: str) -> Result:
        document = daemon_set(overlay(tmp_path / name, variant, "k3s"), "installer")
        return fresh.pod(document, "installer", options=("--rm",))

    with fresh.service("k3s", {}, "sh /opt/k3s/start"):
        wait_until(cri.is_ready, "containerd answers")
        for each in (archive, pause_archive):
            words = ("ctr", f"--address={socket}", "-n", "k8s.io", "images", "import")
            fresh.space.run(*words, each).ok()
        refused = install(fresh).failed()
        said = f"containerd reads {K3S}/config.toml on this node, and gpu-py would go to"
        assert said in refused.stderr
        assert "components/k3s (Helm: installer.distribution=k3s)" in refused.stderr
        assert not fresh.path("/etc/containerd/conf.d").exists()

        assert "containerd was restarted" in run("base", "first").ok().stdout
        wait_until(cri.is_ready, "containerd answers again")
        assert "restarted" not in run("base", "again").ok().stdout
        with cri.pod("gpu-py") as pod:
            asked = mounted(driver.gpus[1].uuid)
            container = pod.start(DEBIAN, "sleep", "1000", mounts=(asked,))
            done = container.exec("nvidia-smi", "-L").ok()
            assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1))
        assert "gpu-py" in fresh.path(K3S / "config.toml").read_text()

        assert "containerd was restarted" in run("overlays/remove", "gone").ok().stdout
        wait_until(cri.is_ready, "containerd answers once more")
        assert template.read_text() == '{{ template "base" . }}\n'
        unknown = pytest.raises(CriError, match='no runtime for "gpu-py" is configured')
        with unknown, cri.pod("gpu-py"):
            pass
    fresh.space.run("pkill", "-KILL", "-x", "containerd")
    cri.close()


UNIT = Path("/etc/systemd/system/gpuhook-device-plugin.service")
STARTED = ["daemon-reload", f"enable --quiet {UNIT.name}", f"restart {UNIT.name}"]


def test_the_plugins_unit_is_restarted_when_its_inputs_change(
    fresh: Node, systemctl: Path, newer: str, tmp_path: Path
) -> None:
    """The unit restarts when its inputs change, and never runs together with a plugin in a pod."""
    document = daemon_set("overlays/cdi", "installer")
    unit = fresh.path(UNIT)

    def put(image: str = IMAGE, **options: str) -> list[str]:
        """Run the installer; return the calls of systemctl."""
        systemctl.unlink(missing_ok=True)
        pod = deepcopy(document)
        containers(pod_of(pod))["installer"]["env"] += [
            {"name": name, "value": value} for name, value in options.items()
        ]
        host = {"gpuhook-config": str(tmp_path)}
        fresh.pod(pod, "installer", host=host, image=image, options=("--rm",)).ok()
        return systemctl.read_text().splitlines()

    assert put() == STARTED
    check(fresh)
    first = unit.read_text()
    assert 'Environment="DEVICE_LIST_STRATEGY=cdi-cri"\n' in first
    assert put() == [f"start {UNIT.name}"]
    assert put(MIG_STRATEGY="mixed") == STARTED
    assert 'Environment="MIG_STRATEGY=mixed"\n' in unit.read_text()
    assert put() == STARTED
    for name, text in (("config.toml", "disable-require = true\n"), ("device-plugin.yaml", "{}")):
        (tmp_path / name).write_text(text)
        assert put() == STARTED
        assert put() == [f"start {UNIT.name}"]
    assert fresh.path("/opt/gpuhook/device-plugin.yaml").read_text() == "{}"
    assert put(newer) == STARTED

    both = install(fresh).failed()
    assert "Apply overlays/remove first" in both.stderr
    systemctl.unlink()
    install(fresh, *REMOVE).ok()
    stopped = [f"disable --quiet --now {UNIT.name}", "daemon-reload"]
    assert systemctl.read_text().splitlines() == stopped
    assert not unit.exists()
    assert not [*fresh.path("/opt/gpuhook").iterdir()]


def test_the_mps_unit_is_restarted_only_for_its_own_settings(
    fresh: Node, systemctl: Path, newer: str, tmp_path: Path
) -> None:
    """A restart ends the programs that use MPS, so only its own settings cause one."""
    document = daemon_set("overlays/mps", "installer")
    settings = containers(pod_of(document))["installer"]["env"]
    settings += [{"name": "INSTALL_NODE_ENGINE", "value": "none"}]
    config = tmp_path / "config.toml"
    host = {"gpuhook-config": str(tmp_path)}
    mps = UNIT.with_name("gpuhook-mps.service")

    def put(image: str = IMAGE) -> list[str]:
        """Run the installer; return the calls of systemctl for the unit of MPS."""
        systemctl.unlink(missing_ok=True)
        fresh.pod(document, "installer", host=host, image=image, options=("--rm",)).ok()
        return [line for line in systemctl.read_text().splitlines() if mps.name in line]

    refused = fresh.pod(document, "installer", host=host, options=("--rm",)).failed()
    assert "shares no GPU by MPS" in refused.stderr
    started = [f"enable --quiet {mps.name}", f"restart --no-block {mps.name}"]
    shared = '[gpuhook.mps]\ndevices = "all"\n'
    config.write_text(shared)
    assert put() == started
    lines = fresh.path(mps).read_text().splitlines()
    assert "ExecStart=/opt/gpuhook/bin/gpuhook mps serve" in lines
    assert "ExecStopPost=/opt/gpuhook/bin/gpuhook mps stop" in lines
    config.write_text(f"disable-require = true\n{shared}")
    assert put() == [f"start --no-block {mps.name}"]
    config.write_text(f"{shared}clients = 4\n")
    assert put() == started
    assert put(newer) == started

    plain = daemon_set("overlays/cdi", "installer")
    without = fresh.pod(plain, "installer", options=("--rm",)).failed()
    assert f"{mps.name} keeps MPS' control daemon" in without.stderr
    systemctl.unlink()
    install(fresh, *REMOVE).ok()
    assert f"disable --quiet --now {mps.name}" in systemctl.read_text()
    assert not fresh.path(mps).exists()
    assert not [*fresh.path("/opt/gpuhook").iterdir()]


def test_the_nri_plugin_is_installed_as_a_unit_and_removed(
    fresh: Node, systemctl: Path, tmp_path: Path
) -> None:
    """The plugin and gpu-py read the gate from config.toml; the engine's files are unchanged."""
    document = daemon_set("overlays/nri", "installer")
    host = {"gpuhook-config": str(tmp_path)}
    nri = UNIT.with_name("gpuhook-nri.service")

    def put() -> list[str]:
        """Run the installer; return the calls of systemctl for the NRI plugin's unit."""
        systemctl.unlink(missing_ok=True)
        fresh.pod(document, "installer", host=host, options=("--rm",)).ok()
        return [line for line in systemctl.read_text().splitlines() if nri.name in line]

    started = [f"enable --quiet {nri.name}", f"restart --no-block {nri.name}"]
    assert put() == started
    text = fresh.path(nri).read_text()
    assert "ExecStart=/opt/gpuhook/bin/gpuhook nri --gate" in text
    assert "DEVICE_LIST_STRATEGY=envvar" in fresh.path(UNIT).read_text().replace('"', "")
    assert put() == [f"start --no-block {nri.name}"]
    (tmp_path / "config.toml").write_text("disable-require = true\n")
    assert put() == [f"start --no-block {nri.name}"]
    settings = tomllib.loads(fresh.path("/etc/gpuhook/config.toml").read_text())
    assert settings["disable-require"]
    assert settings["gpuhook"]["gate"]

    plain = daemon_set("overlays/cdi", "installer")
    without = fresh.pod(plain, "installer", options=("--rm",)).failed()
    assert f"{nri.name} gives pods their devices" in without.stderr
    systemctl.unlink()
    install(fresh, *REMOVE).ok()
    assert f"disable --quiet --now {nri.name}" in systemctl.read_text()
    assert not fresh.path(nri).exists()


def test_mps_with_a_plugin_in_a_pod_is_refused(fresh: Node) -> None:
    refused = install(fresh, "install", "--mps").failed()
    assert "a plugin in a pod doesn't see the daemon" in refused.stderr


def test_a_unit_with_invalid_options_is_refused(
    fresh: Node, systemctl: Path, tmp_path: Path
) -> None:
    (tmp_path / "device-plugin.yaml").write_text("version: v1\nflags: {migStrategy: some}\n")
    host = {"gpuhook-config": str(tmp_path)}
    document = daemon_set("overlays/cdi", "installer")
    refused = fresh.pod(document, "installer", host=host, options=("--rm",)).failed()
    assert "migStrategy is 'some'" in refused.stderr
    assert not fresh.path(UNIT).exists()


def test_another_unit_of_the_same_name_is_refused_and_unchanged(
    fresh: Node, systemctl: Path
) -> None:
    fresh.path(UNIT).write_text("[Unit]\n")
    document = daemon_set("overlays/cdi", "installer")
    for refused in (
        fresh.pod(document, "installer", options=("--rm",)).failed(),
        install(fresh).failed(),
        install(fresh, *REMOVE).failed(),
    ):
        assert f"{UNIT} is there" in refused.stderr
        assert fresh.path(UNIT).read_text() == "[Unit]\n"


def test_install_without_an_engine_to_restart_is_refused(fresh: Node) -> None:
    """A process that isn't a service of the node isn't its engine, whatever its name is."""
    fresh.space.run("cp", "/bin/sleep", "/opt/containerd").ok()
    other = subprocess.Popen(fresh.space.enter("/opt/containerd", "1000"))
    try:
        wait_until(lambda: bool(fresh.pids("containerd")), "it runs")
        refused = install(fresh).failed()
        assert "No containerd was found" in refused.stderr
        assert fresh.pids("containerd")
    finally:
        stop(other)
    assert fresh.path("/opt/gpuhook/restart").exists()  # the next run tries it again


def test_the_probe_fails_with_a_reason_until_the_plugin_serves(fresh: Node, tmp_path: Path) -> None:
    """The installer's pod is ready only while a plugin serves, and else reports the reason."""
    document = deepcopy(daemon_set("overlays/cdi", "installer"))
    container = containers(pod_of(document))["done"]
    container |= {"command": container["readinessProbe"]["exec"]["command"], "args": []}
    state = tmp_path / "state"
    state.mkdir()

    def probe() -> Result:
        return fresh.pod(document, "done", host={"/run/gpuhook": str(state)}, options=("--rm",))

    assert "hasn't run yet" in probe().failed().stdout
    file = StatusFile(str(state))
    file.set("nvidia.com/gpu", "The kubelet refuses to register it")
    assert "nvidia.com/gpu: The kubelet refuses to register it" in probe().failed().stdout
    file.set("nvidia.com/gpu", "")
    probe().ok()
