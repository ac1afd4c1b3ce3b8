"""Hostile images and requests, started for real by runc and crun: the host stays untouched."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.bundles import Bundle, Spec
from harness.commands import Result, run
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import Installation, harden, write_config
from harness.sandbox import contents, unshare_mounts
from harness.snapshot import nothing_left

FOLDER = "usr/lib/x86_64-linux-gnu"
RENAME_EXCHANGE = 2  # linux/fs.h

EVIL = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void attack(void) {
    if (access("%(guard)s", F_OK) == 0) close(open("%(mark)s", O_CREAT | O_WRONLY, 0644));
}
"""


@pytest.fixture
def runtime_env(low_level: tuple[str, object], configs: dict[str, Path]) -> dict[str, str]:
    """What gpu-py is called with; RUNTIME names the low-level runtime for those who call that."""
    return {"GPUHOOK_CONFIG": str(configs[low_level[0]]), "RUNTIME": low_level[0]}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    for name in ("x86_64-linux-gnu", "1.2.3", "ld.so.conf.d"):
        (folder / name).mkdir(parents=True)
    (folder / "ld.so.cache").write_text("")
    return folder


def mount_volume(bundle: Bundle, source: Path, destination: str, *options: str) -> None:
    volume = {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": ["rbind", *options],
    }
    bundle.change(lambda spec: spec["mounts"].append(volume))


def refused(result: Result, *words: str) -> str:
    """Return the error of a container that didn't start: one sentence, no traceback.

    crun keeps what a hook says to itself, so the words are looked for only elsewhere.
    """
    assert result.status != 0, result
    assert "Traceback" not in result.stderr, result
    assert len(result.stderr) < 8192, "the message repeats what the image said"
    for word in () if "error executing hook" in result.stderr else words:
        assert word in result.stderr, result
    return result.stderr


def change_image(bundle: Bundle, script: str) -> None:
    """Run a shell script in the bundle's root, which only its namespace sees."""
    bundle.call("sh", "-ec", script, cwd=bundle.root).ok()


def start(
    bundle: Bundle, installation: Installation, env: dict[str, str], *untouched: Path
) -> Result:
    """Run the container with all GPUs; the host and ``untouched`` must stay as they are."""
    with nothing_left(*untouched, pid=bundle.namespace.pid):
        return bundle.run(installation.runtime, env)


# Requests --------------------------------------------------------------------------------

ANNOTATION = {"cdi.k8s.io/x": "runtime.nvidia.com/gpu=all"}


@pytest.mark.parametrize("by", ["runtime", "hook"])
@pytest.mark.parametrize("more", ["", "accept-annotations = true\n"], ids=["default", "accepted"])
@pytest.mark.parametrize("asked", ["by mount", "not at all"])
def test_an_annotation_gives_no_more_than_the_mounts(
    bundle: Bundle,
    installation: Installation,
    low_level: tuple[str, object],
    driver: Driver,
    tmp_path: Path,
    by: str,
    more: str,
    asked: str,
) -> None:
    """CRI-O and podman copy annotations of users into config.json."""
    config = harden(write_config(tmp_path / "etc", driver.root, [low_level[0]]))
    config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{more}"))
    bundle.command(*look(driver.minors))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    bundle.change(lambda spec: spec.update(annotations=ANNOTATION))
    if asked == "by mount":
        mount_volume(bundle, Path("/dev/null"), "/var/run/nvidia-container-devices/3", "ro")
    given = {driver.gpus[3].minor} if asked == "by mount" else set()
    if by == "runtime":
        done = bundle.run(installation.runtime, {"GPUHOOK_CONFIG": str(config)})
    else:
        args = [installation.hook.name, "--config", str(config), "prestart"]
        hook = {"path": str(installation.hook), "args": args, "env": ["PATH=/usr/bin:/bin"]}
        bundle.change(lambda spec: spec.update(hooks={"prestart": [hook]}))
        done = bundle.run(low_level[0])
    inside = seen(done)
    assert inside.gpu_minors == given
    opened = {minor for minor, error in inside.by_hand.items() if error != "EPERM"}
    assert opened == given


# Links -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (FOLDER, "VICTIM/x86_64-linux-gnu"),
        (FOLDER, "../../../../../../../../../../../../../..VICTIM"),
        ("usr/bin", "VICTIM"),
        ("lib/firmware/nvidia", "VICTIM"),
        ("run/nvidia-persistenced", "/proc/1/root/VICTIM"),
        ("run/nvidia-persistenced", "/proc/self/fd/0"),
        ("run/nvidia-persistenced", "/proc/self/cwd"),
        ("etc/ld.so.cache", "VICTIM/ld.so.cache"),
    ],
)
def test_links_in_the_image(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    victim: Path,
    place: str,
    text: str,
) -> None:
    text = text.replace("VICTIM", str(victim))
    folder = os.path.dirname(place)
    change_image(bundle, f"mkdir -p {folder}; rm -rf {place}; ln -s {text} {place}")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")
    result = start(bundle, installation, runtime_env, driver.root, victim)
    if result.status != 0:
        refused(result)


@contextmanager
def swapping(bundle: Bundle, name: str, link: str) -> Iterator[None]:
    """Exchange a folder and a link all the while, from a second container on the same root."""
    change_image(bundle, f"ln -s {link} trap")
    pid = os.fork()
    if pid == 0:
        try:
            _swap(bundle, name)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        change_image(bundle, f"test -d {name} && test ! -L {name} || mv -T trap {name}; rm -f trap")


def _swap(bundle: Bundle, name: str) -> None:
    libc = ctypes.CDLL(None)
    if bundle.namespace.pid is not None:
        with open(f"/proc/{bundle.namespace.pid}/ns/mnt", "rb") as file:
            libc.setns(file.fileno(), 0)
    unshare_mounts()
    os.chroot(bundle.root)
    while True:
        libc.renameat2(-100, name.encode(), -100, b"trap", RENAME_EXCHANGE)


def test_a_second_container_swaps_folders(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    victim: Path,
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    change_image(bundle, "rm -rf opt; mkdir opt")
    outcomes = set()
    # The container's own programs need their libraries, so the folder swapped is another.
    change_image(bundle, "mkdir -p lib/firmware; mv lib/firmware opt/firmware; ")
    change_image(bundle, "ln -s ../../opt/firmware usr/lib/firmware")
    with swapping(bundle, "opt", str(victim)), nothing_left(victim, pid=bundle.namespace.pid):
        for _ in range(15):
            outcomes.add(bundle.run(installation.runtime, runtime_env).status)
    assert 0 in outcomes


# The environment ----------------------------------------------------------------------------


def evil_image(bundle: Bundle, tmp_path: Path) -> tuple[list[str], Path]:
    """Put into a root what attacks whoever loads it; return the environment and the mark.

    The mark is made on the host only: it needs a guard that the container doesn't see.
    """
    guard, mark = tmp_path / "guard", tmp_path / "mark"
    guard.touch()
    source, library = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(EVIL % {"guard": guard, "mark": mark})
    run(["gcc", "-shared", "-fPIC", "-o", library, source]).ok()
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(mark)!r}, 'w')\n")
    change_image(bundle, f"mkdir python; cp {library} evil.so")
    for module in ("os", "sitecustomize", "usercustomize", "encodings", "site", "re", "ctypes"):
        change_image(bundle, f"cp {script} {module}.py")
    change_image(bundle, f"cp {script} python/re.py")
    here = "/proc/self/cwd"
    return [
        f"LD_PRELOAD={here}/evil.so",
        f"LD_AUDIT={here}/evil.so",
        f"LD_LIBRARY_PATH={here}",
        f"PYTHONPATH={here}:{here}/python",
        f"PYTHONHOME={here}",
        f"PYTHONSTARTUP={here}/os.py",
        "PYTHONINSPECT=1",
        f"GCONV_PATH={here}",
        f"TMPDIR={here}",
        f"GPUHOOK_CONFIG={here}/config.toml",
        "NVIDIA_VISIBLE_DEVICES=0",
    ], mark


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_the_images_environment_reaches_no_hook(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    tmp_path: Path,
    stage: str,
) -> None:
    settings, mark = evil_image(bundle, tmp_path)
    bundle.environ(*settings)
    hook = [str(installation.hook), "--config", runtime_env["GPUHOOK_CONFIG"], "prestart"]
    if stage != "prestart":
        given = {"path": hook[0], "args": hook, "env": ["PATH=/usr/bin:/bin"]}
        bundle.change(lambda spec: spec.update(hooks={stage: [given]}))
    bundle.run(installation.runtime, runtime_env)
    assert not mark.exists()


def test_without_its_own_environment_a_hook_would_be_taken_over(
    bundle: Bundle, installation: Installation, runtime_env: dict[str, str], tmp_path: Path
) -> None:
    """What every hook that we write has in its ``env`` is taken out of this one.

    runc then gives it the container's environment (CVE-2025-23266), crun doesn't.
    """
    settings, mark = evil_image(bundle, tmp_path)
    bundle.environ(*settings)
    careless = {"path": "/bin/sh", "args": ["sh", "-c", "cat >/dev/null"]}
    bundle.change(lambda spec: spec.update(hooks={"createContainer": [careless]}))
    bundle.run(runtime_env["RUNTIME"], runtime_env)
    assert mark.exists() == (runtime_env["RUNTIME"] == "runc")


def test_python_settings_and_the_working_folder_are_ignored(
    bundle: Bundle, installation: Installation, runtime_env: dict[str, str], tmp_path: Path
) -> None:
    """The launcher itself protects Python, also where a hook's ``env`` is not ours."""
    settings, mark = evil_image(bundle, tmp_path)
    env = dict(setting.split("=", 1) for setting in settings if not setting.startswith("LD_"))
    env.pop("GPUHOOK_CONFIG")
    options = ("--config", runtime_env["GPUHOOK_CONFIG"])
    result = bundle.call(installation.hook, *options, env=env, cwd=bundle.root)
    assert "container state" in refused(result)
    assert not mark.exists()
    bundle.call("python3", "-c", "import re", env={"PYTHONPATH": "python"}, cwd=bundle.root)
    assert mark.exists(), "without isolation the image's modules are not imported either"


def spoil(folder: Path, mark: Path) -> None:
    """Put modules into a folder that are called like all of Python's and of ours.

    Each writes its name into a file when it is imported.
    """
    (folder / "gpuhook").mkdir()
    for name in (*sys.stdlib_module_names, "pynvml", "gpuhook/__init__", "gpuhook/_start"):
        (folder / f"{name}.py").write_text(f"print(__name__, file=open({str(mark)!r}, 'a'))\n")


def with_the_package_elsewhere(installation: Installation, folder: Path) -> Installation:
    """Return an installation as pip makes it with --editable: Python itself finds the package."""
    run([installation.bin / "python3", "-m", "venv", "--without-pip", folder]).ok()
    [packages] = installation.bin.parent.glob("lib/python3*/site-packages")
    [own] = folder.glob("lib/python3*/site-packages")
    (own / "gpuhook.pth").write_text(f"{packages}\n")
    for launcher in (installation.runtime, installation.hook):
        shutil.copy(launcher, folder / "bin")
    return Installation(folder / "bin")


@pytest.mark.parametrize("package", ["beside the launcher", "elsewhere"])
def test_gpu_py_imports_nothing_from_its_working_folder(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    tmp_path: Path,
    package: str,
) -> None:
    """Engines call it in the bundle. Nothing is saved yet, so it imports all that it ever does."""
    mark = tmp_path / "imported"
    spoil(bundle.path, mark)
    used = installation
    if package == "elsewhere":
        used = with_the_package_elsewhere(installation, tmp_path / "venv")
    config = write_config(tmp_path / "config", driver.root, [runtime_env["RUNTIME"]])
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    bundle.command(*look())
    result = bundle.call(
        used.runtime, "run", bundle.name, env={"GPUHOOK_CONFIG": str(config)}, cwd=bundle.path
    )
    assert not mark.exists(), mark.read_text()
    assert seen(result).gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}


# The request --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_text",
    [
        "../../../etc",
        "0,../1",
        "/dev/nvidia0",
        "0\n1",
        "0\x001",
        "GPU-../../../../etc/passwd",
        "MIG-GPU-x/../../1/2",
        "x" * 100_000,
        ",".join(["9999999999999999999999"] * 3000),
        "0:" * 50_000,
        "\u202e0",
        "\ud8000",
    ],
    ids=range(12),
)
def test_device_names_that_are_none(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    request_text: str,
) -> None:
    bundle.environ(f"NVIDIA_VISIBLE_DEVICES={request_text}")
    refused(start(bundle, installation, runtime_env, driver.root))


@pytest.mark.parametrize("channels", ["../../../../etc", "-1", "0/../1", "9" * 4000])
def test_channels_that_are_none(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    channels: str,
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_IMEX_CHANNELS={channels}")
    refused(start(bundle, installation, runtime_env, driver.root))


# Files that an image damaged ------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "printf garbage >etc/ld.so.cache",
        "printf 'ld.so-1.7.0\\0\\377\\377\\377\\377' >etc/ld.so.cache",
        "head -c 100 etc/ld.so.cache >x; mv x etc/ld.so.cache",
        "printf '\\377\\377\\377\\377' | dd of=etc/ld.so.cache bs=1 seek=20 conv=notrunc",
        "printf '\\377\\377\\377\\177' | dd of=etc/ld.so.cache bs=1 seek=52 conv=notrunc",
        "truncate -s 100G etc/ld.so.cache",
        "rm etc/ld.so.cache; mkfifo etc/ld.so.cache",
        "rm etc/ld.so.cache; mkdir etc/ld.so.cache",
        "rm etc/ld.so.cache; mknod etc/ld.so.cache c 10 130",
        "rm etc/ld.so.cache; ln -s ld.so.cache etc/ld.so.cache",
    ],
)
def test_a_damaged_loader_cache(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    script: str,
) -> None:
    change_image(bundle, script)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    begun = time.monotonic()
    result = start(bundle, installation, runtime_env, driver.root)
    assert time.monotonic() - begun < 20
    if result.status != 0:
        refused(result, "ld.so.cache")


# Namespaces ---------------------------------------------------------------------------------


@pytest.fixture
def stranger(bundle: Bundle) -> Iterator[int]:
    """A process that is in a mount namespace of its own, and in no container."""
    argv = bundle.namespace.enter("unshare", "--mount", "sh", "-c", "echo; exec sleep infinity")
    argv = ["setpriv", "--pdeathsig=KILL", *argv]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("owner", ["the caller's", "a stranger's"])
def test_a_container_in_the_mount_namespace_of_another(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    stranger: int,
    tmp_path: Path,
    owner: str,
) -> None:
    """It is refused before the low-level runtime starts, which would mount in there, too."""

    def mutate(spec: Spec) -> None:
        namespaces = spec["linux"]["namespaces"]
        [ours] = [item for item in namespaces if item["type"] == "mount"]
        namespaces.remove(ours)
        if owner == "a stranger's":
            namespaces.append({"type": "mount", "path": f"/proc/{stranger}/ns/mnt"})

    bundle.change(mutate)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    started, low_level = tmp_path / "started", tmp_path / "low-level"
    low_level.write_text(f'#!/bin/sh\ntouch {started}\nexec {runtime_env["RUNTIME"]} "$@"\n')
    low_level.chmod(0o755)
    env = {"GPUHOOK_CONFIG": str(write_config(tmp_path / "config", driver.root, [low_level]))}
    before = contents(driver.root / "etc"), mount_table(stranger)
    result = start(bundle, installation, env, driver.root)
    assert "gpu-py: " in refused(result, "no mount namespace of its own")
    assert not started.exists()
    assert (contents(driver.root / "etc"), mount_table(stranger)) == before


def mount_table(pid: int) -> str:
    return Path(f"/proc/{pid}/mountinfo").read_text()


@pytest.mark.parametrize("stage", ["createContainer", "startContainer"])
def test_a_hook_in_a_stage_that_is_too_late(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    stage: str,
) -> None:
    args = [installation.hook.name, "--config", runtime_env["GPUHOOK_CONFIG"], "prestart"]
    hook = {"path": str(installation.hook), "args": args, "env": ["PATH=/usr/bin:/bin"]}
    bundle.change(lambda spec: spec.update(hooks={stage: [hook]}))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        refused(bundle.run(runtime_env["RUNTIME"], runtime_env))


def test_a_user_namespace(
    bundle: Bundle, installation: Installation, runtime_env: dict[str, str], driver: Driver
) -> None:
    """What is made in the image belongs to the container's root user."""

    def mutate(spec: Spec) -> None:
        spec["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            spec["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]

    bundle.change(mutate)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=2")
    change_image(bundle, "chown -R 100000:100000 .; chmod 755 .")
    run(["chmod", "-R", "go+X", "/run/gpuhook-test"])
    bundle.command(*look(libraries=["libcuda.so.1", "libnvidia-ml.so.1"]))
    inside = seen(start(bundle, installation, runtime_env, driver.root))
    assert inside.gpu_minors == {driver.gpus[2].minor}
    assert all(path != "-" for path, _ in inside.libraries.values())
    made = f"{FOLDER}/libcuda.so.1 etc/ld.so.cache {FOLDER}/libcuda.so.{driver.version}"
    owners = bundle.call("stat", "-c", "%u:%g", *made.split(), cwd=bundle.root).ok().stdout
    assert set(owners.split()) == {"100000:100000"}


@pytest.mark.parametrize("propagation", ["shared", "rshared", "slave", "rslave", "private"])
def test_no_propagation_leads_to_the_host(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    propagation: str,
) -> None:
    bundle.change(lambda spec: spec["linux"].update(rootfsPropagation=propagation))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    result = start(bundle, installation, runtime_env, driver.root)
    if result.status != 0:
        refused(result, "shared")


# Volumes ------------------------------------------------------------------------------------

VOLUMES: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: None,
    "with a cache": lambda folder: (folder / "ld.so.cache").touch(),
    "with files": lambda folder: (folder / "libcuda.so.1").touch(),
}


@pytest.mark.parametrize("propagation", ["rprivate", "rshared"])
@pytest.mark.parametrize("kind", VOLUMES)
@pytest.mark.parametrize("destination", [f"/{FOLDER}/nvidia", "/etc", "/dev", "/run", "/usr/bin"])
def test_volumes_stay_as_they_are(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    tmp_path: Path,
    destination: str,
    kind: str,
    propagation: str,
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    VOLUMES[kind](volume)
    mount_volume(bundle, volume, destination, "rw", propagation)
    bundle.change(lambda spec: spec["linux"].update(rootfsPropagation="rshared"))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    before = run(["sh", "-c", f"cd {volume}; find . | sort"]).ok().stdout
    result = bundle.run(installation.runtime, runtime_env)
    after = run(["sh", "-c", f"cd {volume}; find . | sort"]).ok().stdout
    if destination != "/dev":  # where the runtime itself makes its nodes
        assert after == before
    assert "nvidia" not in after
    if result.status != 0:
        refused(result)


def test_the_hosts_own_folders_as_volumes(
    bundle: Bundle, installation: Installation, runtime_env: dict[str, str], driver: Driver
) -> None:
    for source, destination in (("usr/lib/x86_64-linux-gnu", "/opt/lib"), ("run", "/run")):
        mount_volume(bundle, driver.root / source, destination, "rw")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    bundle.command(*look(libraries=["libcuda.so.1"]))
    inside = seen(start(bundle, installation, runtime_env, driver.root))
    assert inside.gpu_minors == {driver.gpus[1].minor}


# What the bundle says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        '"x": 1e999999',
        '"x": -0.0e-99999999',
        '"x": ' + "9" * 5000,
        '"x": ' + "[" * 5000 + "]" * 5000,
        '"x": "\\ud800\\u0000"',
        '"process": {}, "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}',
    ],
    ids=["huge float", "tiny float", "huge integer", "deep", "surrogate and NUL", "doubled key"],
)
def test_strange_json(
    bundle: Bundle,
    installation: Installation,
    runtime_env: dict[str, str],
    driver: Driver,
    extra: str,
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0")
    text = bundle.config.read_text()
    bundle.config.write_text("{" + extra + "," + text.lstrip()[1:])
    result = start(bundle, installation, runtime_env, driver.root)
    if result.status != 0:
        refused(result)


def test_bytes_that_are_no_text(
    bundle: Bundle, installation: Installation, runtime_env: dict[str, str], driver: Driver
) -> None:
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", "STRANGE=@@@")
    bundle.config.write_bytes(bundle.config.read_bytes().replace(b"@@@", b"\xff\xfe\x80"))
    start(bundle, installation, runtime_env, driver.root)
    assert b"\xff\xfe\x80" in bundle.config.read_bytes()


def test_a_million_settings(
    bundle: Bundle, installation: Installation, driver: Driver, tmp_path: Path
) -> None:
    """Low-level runtimes take minutes over so many; we must not be what takes long."""
    config = write_config(tmp_path / "config", driver.root, ["/bin/true"])
    bundle.environ(*[f"A{number}={number}" for number in range(10**6)], "NVIDIA_VISIBLE_DEVICES=0")
    begun = time.monotonic()
    start(bundle, installation, {"GPUHOOK_CONFIG": str(config)}, driver.root).ok()
    assert time.monotonic() - begun < 30
    assert len(bundle.spec()["process"]["env"]) > 10**6
    assert bundle.spec()["hooks"]["prestart"]
