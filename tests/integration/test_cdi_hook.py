"""The only hook of gpuhook's CDI specs, in containers that runc and crun make without an engine."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from harness import bundles, distributions
from harness.bundles import Bundle, Spec
from harness.cdi import generate, give
from harness.commands import Result, daemon, run, wait_until
from harness.driver import Driver, lines_of_nvidia_smi, run_with_driver_in_kernel, simulate
from harness.inside import look, seen
from harness.installation import Installation, copied, write_config
from harness.loader import probed
from harness.namespaces import Namespace
from harness.prefork import RUNTIMES
from harness.sandbox import in_child
from harness.snapshot import contents, nothing_left

from gpuhook import inject as injection
from gpuhook.base.errors import InjectError

LIBRARIES = "usr/lib/x86_64-linux-gnu"
HOOK = "gpuhook-cdi-hook"
NAMES = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvcuvid.so.1", "libnvoptix.so.1",
         "libGLX_nvidia.so.0", "libvdpau_nvidia.so.1"]  # fmt: skip
ROUTES = (
    "{victim}", "../../../../../../../../..{victim}", "/proc/self/root{victim}",
    "/proc/1/root{victim}",
)  # fmt: skip
EVIL = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void attack(void) {
    if (access("%(guard)s", F_OK) == 0) close(open("%(mark)s", O_CREAT | O_WRONLY, 0644));
}
"""


@pytest.fixture(scope="session")
def document(
    workspace: Path, installation: Installation, driver: Driver, configs: dict[str, Path]
) -> Path:
    return generate(installation, configs["runc"], workspace / "cdi")


class Standing:
    """Prefork servers, one for each mount namespace, and a CDI spec that uses them."""

    def __init__(self, folder: Path, installation: Installation, driver: Driver) -> None:
        self.log = folder / "python.log"
        self.installation = copied(installation, folder / "programs", self.log)
        self.config = write_config(folder / "etc", driver.root, ["runc"])
        self.document = generate(self.installation, self.config, folder / "cdi")
        self._folder = folder
        self._ready = Path(f"/run/gpuhook/launcher{self.config}/ready")
        self._in: set[int | None] = set()
        self.daemons = ExitStack()

    def stand(self, namespace: Namespace) -> None:
        """Start a prefork server in a namespace if necessary, and wait until it is ready."""
        if namespace.pid not in self._in:
            self._in.add(namespace.pid)
            words: list[str | Path] = ["watch", "--interval", "1", "--config", self.config]
            watch = namespace.enter(self.installation.command, *words)
            log = self._folder / f"watch-{namespace.pid}.log"
            self.daemons.enter_context(daemon(watch, log, lambda: True))
        wait_until(
            lambda: self._stands_in(namespace),
            "there is a prefork server",
            shown=lambda: "\n".join(log.read_text() for log in self._folder.glob("watch-*.log")),
        )

    def hooks(self) -> int:
        """Return how often an interpreter was started to run the hook."""
        return self.log.read_text().count(f"/{HOOK} ")

    def _stands_in(self, namespace: Namespace) -> bool:
        """Return whether a prefork server is ready there; other tests may change its inputs."""
        wanted = os.stat(f"/proc/{namespace.pid or 'self'}/ns/mnt")
        for path in self._ready.glob("[0-9]*"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{path.name}/ns/mnt"), wanted):
                    return True
        return False


@pytest.fixture(scope="session")
def standing(workspace: Path, installation: Installation, driver: Driver) -> Iterator[Standing]:
    made = Standing(workspace / "cdi-standing", installation, driver)
    with made.daemons:
        yield made


@pytest.fixture(params=["alone", "standing"])
def answered(
    request: pytest.FixtureRequest, bundle: Bundle, document: Path, standing: Standing
) -> Iterator[Path]:
    """A CDI spec whose hook starts an interpreter, and one whose hook a prefork server serves."""
    if request.param == "alone":
        yield document
        return
    standing.stand(bundle.namespace)
    before = standing.hooks()
    yield standing.document
    assert standing.hooks() == before, "no interpreter is started for it"


@pytest.fixture
def runtime(low_level: tuple[str, Namespace]) -> str:
    return low_level[0]


def changed(bundle: Bundle, script: str) -> None:
    """Run a shell script in the bundle's root, which only the bundle's namespace can see."""
    bundle.call("sh", "-ec", script, cwd=bundle.root).ok()


def hook_of(bundle: Bundle) -> Spec:
    [hook] = bundle.spec()["hooks"]["createContainer"]
    found: Spec = hook
    return found


# What it does -------------------------------------------------------------------------------


@pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
@RUNTIMES
def test_the_loader_finds_every_library(
    bundle: Bundle, runtime: str, answered: Path, driver: Driver
) -> None:
    give(bundle, answered, "2", "6")
    bundle.command(*look(driver.minors, NAMES))
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        inside = seen(bundle.run(runtime))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(2, 6)}
    for name, (path, inode) in inside.libraries.items():
        folder = "/vdpau" if "vdpau" in name else ""
        status = driver.path(f"/{LIBRARIES}{folder}/{name}").stat()
        assert inode == f"{status.st_dev}:{status.st_ino}", (name, path)


@pytest.mark.parametrize("bundle", ["debian", "lib64"], indirect=True)
@RUNTIMES
def test_ldconfig_of_the_image_keeps_the_libraries_findable(
    bundle: Bundle, runtime: str, document: Path
) -> None:
    give(bundle, document, "0")
    changed(bundle, "cp /sbin/ldconfig usr/local/bin/")
    changed(bundle, "printf '/usr/lib64\\ninclude /etc/ld.so.conf.d/*.conf\\n' >etc/ld.so.conf")
    bundle.command("sh", "-c", "ldconfig && dlprobe libcuda.so.1 libvdpau_nvidia.so.1")
    found = probed(bundle.run(runtime).ok().stdout.splitlines())
    assert all(":" in inode and " " not in inode for inode in found.values()), found


def test_programs_see_only_the_given_gpus(
    bundle: Bundle, runtime: str, document: Path, driver: Driver
) -> None:
    give(bundle, document, "1", "7")
    profile = "cat /etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf; echo"
    shown = "cd /proc/driver/nvidia; ls gpus; busybox grep ModifyDeviceFiles params"
    bundle.command("sh", "-c", f"nvidia-smi -L; {profile}; {shown}")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        lines = run_with_driver_in_kernel(bundle, runtime, driver).ok().stdout.splitlines()
    gpus = driver.chosen(1, 7)
    mask = sum(1 << gpu.minor for gpu in gpus)
    folders = sorted(os.listdir(driver.root / "proc/driver/nvidia/gpus"))
    assert lines[:2] == lines_of_nvidia_smi(gpus)
    assert f'"EGLVisibleDGPUDevices",{mask:#x}' in lines[2]
    assert lines[3:] == [folders[1], folders[7], "ModifyDeviceFiles: 0"]


def test_list_shows_the_gpu_that_the_hook_recorded(
    bundle: Bundle,
    runtime: str,
    document: Path,
    installation: Installation,
    configs: dict[str, Path],
    driver: Driver,
) -> None:
    give(bundle, document, "3")
    bundle.command("sleep", "1000")
    quiet = ["sh", "-c", 'exec "$@" </dev/null >/dev/null 2>&1', "sh"]
    bundle.call(*quiet, runtime, "run", "--detach", "--bundle", bundle.path, bundle.name).ok()
    words = ["list", "--config", str(configs["runc"]), "--format", "json"]
    answer = json.loads(run([installation.command, *words]).ok().stdout)
    assert [gpu["index"] for gpu in answer["gpus"] if bundle.name in gpu["containers"]] == [3]
    [container] = [each for each in answer["containers"] if each["name"] == bundle.name]
    assert (container["known_from"], container["command"]) == ("record", "sleep")


@pytest.mark.protects(
    "given-opened",
    "CDI hook: a node denied by cgroup rules isn't counted, and repair doesn't allow it",
    instead="return numbers",
)
@pytest.mark.parametrize("volume", ["node", "folder", "file", "/dev/null"])
def test_a_volume_at_a_node_path_is_not_counted_as_a_gpu(
    bundle: Bundle,
    runtime: str,
    document: Path,
    installation: Installation,
    configs: dict[str, Path],
    driver: Driver,
    tmp_path: Path,
    volume: str,
) -> None:
    """Another container may make a node in a volume, because making nodes needs no rule."""
    [gpu] = driver.chosen(5)
    source = Path(volume) if volume.startswith("/") else tmp_path / "volume"
    if volume == "folder":
        source.mkdir()
    elif volume == "file":
        source.touch()
    elif volume == "node":
        os.mknod(source, 0o666 | stat.S_IFCHR, os.makedev(195, gpu.minor))
    mount = {"source": str(source), "destination": f"/dev/nvidia{gpu.minor}", "options": ["bind"]}
    give(bundle, document, "3")
    bundle.change(lambda spec: spec["mounts"].append(mount))
    bundle.command("sleep", "1000")
    bundle.detach(runtime, configs["runc"])
    words = ["--config", str(configs["runc"])]
    listed = run([installation.command, "list", *words, "--format", "json"]).ok().stdout
    used = [each for each in json.loads(listed)["gpus"] if bundle.name in each["containers"]]
    assert [each["index"] for each in used] == [3]
    repaired = run([installation.command, "repair", *words, bundle.name]).ok().stdout
    assert repaired == f"{bundle.name}: nothing was missing\n"


@pytest.fixture(scope="session")
def mig_driver(installation: Installation, workspace: Path) -> Driver:
    options = ("--gpus=2", "--model=H100", "--mig=0:1g.10gb,2g.20gb")
    return simulate(installation, workspace / "cdi-mig", *options)


@pytest.mark.parametrize(("device", "gpus", "migs"), [("0:1", 1, 1), ("all", 2, 2), ("1", 1, 0)])
def test_mig_devices_are_given_by_name(
    bundle: Bundle,
    runtime: str,
    installation: Installation,
    mig_driver: Driver,
    device: str,
    gpus: int,
    migs: int,
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path / "config", mig_driver.root, ["runc"])
    give(bundle, generate(installation, config, tmp_path / "cdi"), device)
    shown = "cd /proc/driver/nvidia; ls gpus; busybox find capabilities -name access"
    bundle.command(
        "sh", "-c", f"nvidia-smi -L; busybox find /dev/nvidia-caps -type c; {shown}; true"
    )
    lines = run_with_driver_in_kernel(bundle, runtime, mig_driver).ok().stdout.splitlines()
    assert len([line for line in lines if line.startswith("GPU ")]) == gpus
    assert len([line for line in lines if line.startswith("  MIG")]) == migs
    assert len([line for line in lines if line.startswith("/dev/nvidia-caps/")]) == 2 * migs
    assert len([line for line in lines if line.startswith("0000:")]) == gpus
    assert len([line for line in lines if line.endswith("/access")]) == 2 * migs


def test_a_musl_image_gets_libraries_without_a_loader_cache(
    workspace: Path, host: Namespace, document: Path, driver: Driver
) -> None:
    root = distributions.build_musl(workspace / "cdi-musl")
    with bundles.bundle(workspace / "bundles", root, host, "runc") as bundle:
        give(bundle, document, "0")
        bundle.command("dlprobe", "libnvidia-ml.so.1", "libcuda.so.1")
        found = probed(bundle.run("runc").stdout.splitlines())
        status = driver.library("libnvidia-ml.so.1").stat()
        assert found["libnvidia-ml.so.1"] == f"{status.st_dev}:{status.st_ino}"
        # libcuda needs glibc's loader, which images have with gcompat. The error proves that the
        # loader has found libcuda.
        assert "needed by /usr/lib/libcuda.so.1" in found["libcuda.so.1"]
        assert not (bundle.root / "etc/ld.so.cache").exists()


@pytest.mark.protects(
    "cdi-saves-nothing",
    "the CDI hook saves no device inventory",
    instead="inventory = cache.get_inventory(config, vendor, save=True)",
    only="inventory_is_not_saved and runc-host",
)
def test_a_new_inventory_is_not_saved(
    bundle: Bundle, runtime: str, installation: Installation, driver: Driver, tmp_path: Path
) -> None:
    """In the container's cgroup, a driver shows only the container's devices."""
    config = write_config(tmp_path / "config", driver.root, ["runc"])
    document = generate(installation, config, tmp_path / "cdi")
    state = tmp_path / "config/state"
    saved = [path for path in state.iterdir() if path.name.startswith("inventory-")]
    assert saved
    for path in saved:
        path.unlink()
    give(bundle, document, "4")
    bundle.command("nvidia-smi", "-L")
    assert bundle.run(runtime).ok().stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(4))
    assert [path for path in state.iterdir() if path.name.startswith("inventory-")] == []


# What an image may bring -----------------------------------------------------------------------


@pytest.mark.protects(
    "covered-links",
    "an image's files in the place of library links are covered by driver libraries",
    only="own_libraries_are_covered and runc-host",
)
@RUNTIMES
def test_own_libraries_are_covered_by_the_drivers(
    bundle: Bundle, runtime: str, answered: Path, driver: Driver
) -> None:
    stale = f"{LIBRARIES}/libcuda.so.1"
    changed(
        bundle, f"cp {LIBRARIES}/libc.so.6 {stale}; ln -s libcuda.so.0 {LIBRARIES}/libnvcuvid.so.1"
    )
    give(bundle, answered, "0")
    bundle.command(*look(libraries=["libcuda.so.1", "libnvcuvid.so.1"]))
    libraries = seen(bundle.run(runtime)).libraries
    for name, (_, inode) in libraries.items():
        status = driver.library(name).stat()
        assert inode == f"{status.st_dev}:{status.st_ino}", name


@pytest.mark.protects(
    "covered-by-engines",
    "an image's files are covered only by driver files that the engine has mounted",
    instead="return found",
    only="another_file_covers_nothing and runc-host",
)
def test_a_mount_of_another_file_covers_nothing(
    bundle: Bundle, runtime: str, document: Path, tmp_path: Path
) -> None:
    """A volume is mounted at a library's path, so the image's link to it must stay unchanged."""
    stale = f"{LIBRARIES}/libcuda.so.1"
    changed(bundle, f"cp {LIBRARIES}/libc.so.6 {stale}")
    give(bundle, document, "0")
    other = tmp_path / "other"
    other.write_text("no library")

    def mutate(spec: Spec) -> None:
        for mount in spec["mounts"]:
            if mount["destination"].startswith(f"/{LIBRARIES}/libcuda.so."):
                mount["source"] = str(other)

    bundle.change(mutate)
    bundle.command("busybox", "cmp", f"/{stale}", f"/{LIBRARIES}/libc.so.6")
    bundle.run(runtime).ok()


@RUNTIMES
def test_a_read_only_root_gets_gpus(
    bundle: Bundle, runtime: str, answered: Path, driver: Driver
) -> None:
    bundle.change(lambda spec: spec["root"].update(readonly=True))
    give(bundle, answered, "5")
    bundle.command("nvidia-smi", "-L")
    assert bundle.run(runtime).ok().stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(5))


def test_files_made_in_a_user_namespace_belong_to_its_root(
    bundle: Bundle, runtime: str, document: Path, driver: Driver
) -> None:

    def mutate(spec: Spec) -> None:
        spec["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            spec["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]

    bundle.change(mutate)
    changed(bundle, "chown -R 100000:100000 .; chmod 755 .")
    closed = ["/run/gpuhook-test", "-type", "d", "!", "-perm", "-011"]
    run(["find", *closed, "-exec", "chmod", "go+x", "{}", "+"])
    give(bundle, document, "2", mounted=True)
    bundle.command(*look(libraries=["libcuda.so.1"]))
    inside = seen(bundle.run(runtime))
    assert inside.gpu_minors == {driver.gpus[2].minor}
    assert inside.libraries["libcuda.so.1"][0] != "-"
    made = f"{LIBRARIES}/libcuda.so.1 etc/ld.so.cache"
    owners = bundle.call("stat", "-c", "%u:%g", *made.split(), cwd=bundle.root).ok().stdout
    assert set(owners.split()) == {"100000:100000"}


@pytest.mark.parametrize("place", ["etc/nvidia", "etc/ld.so.cache", LIBRARIES, "etc/ld.so.conf.d"])
@pytest.mark.parametrize("route", ROUTES)
@RUNTIMES
def test_links_out_of_the_root_are_not_followed(
    bundle: Bundle, runtime: str, answered: Path, tmp_path: Path, place: str, route: str
) -> None:
    """The runtime's own mounts are left out, because its use of links isn't under test."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    target = route.format(victim=victim / "file" if place.endswith("cache") else victim)
    changed(bundle, f"mkdir -p etc; rm -rf {place}; ln -s {target} {place}")
    mounts = bundle.spec()["mounts"]
    give(bundle, answered, "0")
    bundle.change(lambda spec: spec.update(mounts=mounts))
    with nothing_left(victim, pid=bundle.namespace.pid):
        bundle.run(runtime)
    assert contents(victim) == {str(victim): None, str(victim / "file"): b"mine"}


@pytest.mark.protects(
    "cdi-environment",
    "the CDI hook runs with its own environment, not the image's",
    instead=(
        'return {"hookName": ours.CDI_HOOK_STAGE, "path": self._hook, "args": '
        "[ours.CDI_HOOK, *config, self.vendor.names.KIND]}"
    ),
    only="environment_reaches and runc-host",
)
def test_the_images_environment_reaches_no_hook(
    bundle: Bundle, runtime: str, document: Path, driver: Driver, tmp_path: Path
) -> None:
    guard, mark = tmp_path / "guard", tmp_path / "mark"
    guard.touch()
    source, library = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(EVIL % {"guard": guard, "mark": mark})
    run(["gcc", "-shared", "-fPIC", "-o", library, source]).ok()
    changed(bundle, f'cp {library} evil.so; echo \'open("{mark}", "w")\' >os.py; cp os.py re.py')
    here = "/proc/self/cwd"
    # The launcher hides the variables of the loader and of Python. It can't hide the variable of
    # config.toml, which counts if no option names a file.
    config, log = tmp_path / "config.toml", tmp_path / "log"
    config.write_text(f'[nvidia-container-cli]\nroot = "{driver.root}"\ndebug = "{log}"\n')
    bundle.environ(
        f"LD_PRELOAD={here}/evil.so", f"LD_LIBRARY_PATH={here}", f"PYTHONPATH={here}",
        f"PYTHONHOME={here}", f"GPUHOOK_CONFIG={config}", f"GCONV_PATH={here}",
    )  # fmt: skip
    give(bundle, document, "0")

    def by_default(spec: Spec) -> None:
        [hook] = spec["hooks"]["createContainer"]
        at = hook["args"].index("--config")
        del hook["args"][at : at + 2]

    bundle.run(runtime)
    bundle.change(by_default)
    bundle.run(runtime)
    assert not mark.exists()
    assert not log.exists()


def test_a_failed_hook_leaves_no_files_or_mounts(
    bundle: Bundle, runtime: str, answered: Path, driver: Driver
) -> None:
    """The cache is the last step, so all other steps are rolled back."""
    changed(bundle, "rm -f etc/ld.so.cache; mkdir etc/ld.so.cache")
    give(bundle, answered, "0")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        done = bundle.run(runtime).failed()
    if runtime != "crun":  # crun shows no messages of hooks
        assert "gpuhook-cdi-hook: gpuhook couldn't add" in done.stderr
    found = bundle.call("find", f"{LIBRARIES}/libcuda.so.1", "etc/nvidia", cwd=bundle.root)
    assert found.stdout == ""


# Where it must not work ------------------------------------------------------------------------


def called(bundle: Bundle, *before: str, bundle_path: Path | None = None) -> Result:
    """Call the hook with the container's state, as a wrongly registered engine would."""
    state = {"ociVersion": "1.0.2", "id": "x", "pid": 1, "bundle": str(bundle_path or bundle.path)}
    hook = hook_of(bundle)
    words = [*before, "env", "-i", *hook["env"], hook["path"], *hook["args"][1:]]
    return bundle.namespace.run(*words, stdin=json.dumps(state).encode())


APPTAINERS = """
import json, subprocess, sys
root, document, bundle, hook = sys.argv[1:]
def mount(source, target, folder):
    subprocess.run(["sh", "-ec", 'mkdir -p "$(dirname "$2")"; if $3; then mkdir -p "$2"; else '
        'test -e "$2" || : >"$2"; fi; mount --rbind "$1" "$2"', "sh", source, root + target,
        str(folder).lower()], check=True)
import os
mount(root, "", True)
spec = json.load(open(document))
device = [each for each in spec["devices"] if each["name"] == "1"][0]
for edits in (spec["containerEdits"], device["containerEdits"]):
    for each in edits.get("mounts", ()):
        mount(each["hostPath"], each["containerPath"], os.path.isdir(each["hostPath"]))
    for each in edits.get("deviceNodes", ()):
        mount(each.get("hostPath", each["path"]), each["path"], False)
json.dump({"ociVersion": "1.0.2", "root": {"path": root}}, open(bundle + "/config.json", "w"))
state = {"ociVersion": "1.0.2", "id": "x", "status": "creating", "bundle": bundle}
[entry] = spec["containerEdits"]["hooks"]
environment = dict(word.split("=", 1) for word in entry["env"])
done = subprocess.run(entry["args"], executable=entry["path"], input=json.dumps(state).encode(),
    env=environment)
sys.exit(done.returncode or subprocess.run(["chroot", root, "nvidia-smi", "-L"]).returncode)
"""


def names_root_alone(
    bundle: Bundle, installation: Installation, config: Path, folder: Path
) -> Result:
    """Run a bundle with GPU 1 as Apptainer makes it: it names only a root, in another folder."""
    document, made = folder / "nvidia.json", folder / "bundle"
    words = [f"--output={document}", f"--config={config}", "--kind=nvidia.com/gpu"]
    run([installation.command, "cdi", "generate", *words]).ok()
    made.mkdir()
    # One process stays in the engine's namespace, as apptainer's starter does.
    starter = ["sh", "-c", '"$@"; exit $?', "sh", "unshare", "--mount", "--propagation=private"]
    starter += ["python3", "-c", APPTAINERS]
    return bundle.namespace.run(*starter, bundle.root, document, made, HOOK)


def test_a_bundle_that_names_only_its_root_gets_its_gpu(
    bundle: Bundle, installation: Installation, driver: Driver, configs: dict[str, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    done = names_root_alone(bundle, installation, configs["runc"], tmp_path).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1))


def test_a_bundle_with_only_a_root_is_served_by_a_prefork_server(
    bundle: Bundle, standing: Standing, driver: Driver, tmp_path: Path
) -> None:
    """The server must look in the container to find what is mounted."""
    standing.stand(bundle.namespace)
    before = standing.hooks()
    done = names_root_alone(bundle, standing.installation, standing.config, tmp_path).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1))
    assert standing.hooks() == before, "no interpreter is started for it"


@pytest.mark.protects(
    "limit-by-mounts",
    "the memory limit also applies to a container with no devices in config.json",
    instead="more = ()",
    only="no_way_around_a_limit and runc",
)
@pytest.mark.parametrize(
    "limits", ['device-memory = "8GiB"', 'most-device-memory = "8GiB"', "required = true"]
)
def test_a_bundle_with_only_a_root_has_no_way_around_a_limit(
    bundle: Bundle, installation: Installation, driver: Driver, tmp_path: Path, limits: str
) -> None:
    more = f"[gpuhook.limits]\n{limits}\n"
    config = write_config(tmp_path / "etc", driver.root, ["runc"], more)
    done = names_root_alone(bundle, installation, config, tmp_path).failed()
    assert "limit" in done.stderr
    assert "GPU 1" not in done.stdout


@pytest.mark.protects(
    "first-namespace",
    "the CDI hook works only in a container's own mount namespace",
    only="in_the_namespace_of_the_host and runc-host",
)
def test_a_hook_in_the_namespace_of_the_host_is_refused(
    bundle: Bundle, document: Path, driver: Driver
) -> None:
    give(bundle, document, "0")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        said = called(bundle).failed().stderr
    assert "The container has no mount namespace of its own, or the hook doesn't run in it" in said
    assert not (bundle.root / LIBRARIES / "libcuda.so.1").exists()


@pytest.mark.protects(
    "first-namespace",
    "the CDI hook is refused in the mount namespace of the first process",
    instead="if not container.is_mounted_on():",
    only="beside_the_first_process and runc-host",
)
def test_a_hook_beside_the_first_process_is_refused(bundle: Bundle, document: Path) -> None:
    """The first process shares the host's mounts, so it isn't in a container."""
    give(bundle, document, "0")
    mounts = f"mount -t tmpfs tmpfs {bundle.root}/dev && exec"
    words = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    words += ["sh", "-c", f'{mounts} "$@"; exit $?', "sh", "sh", "-c", '"$@"; exit $?', "sh"]
    said = called(bundle, *words).failed().stderr
    assert "The container has no mount namespace of its own" in said


@pytest.mark.parametrize("root", ["/", "/usr/..", "/proc/../"])
def test_the_hosts_root_is_refused_as_a_container_root(workspace: Path, root: str) -> None:
    with pytest.raises(InjectError, match="the host's own"):
        in_child(lambda: injection.open_inside(root).close())


def test_a_hook_at_another_stage_is_refused(
    bundle: Bundle, runtime: str, document: Path, driver: Driver
) -> None:
    give(bundle, document, "0")

    def move(spec: Spec) -> None:
        spec["hooks"]["createRuntime"] = spec["hooks"].pop("createContainer")

    bundle.change(move)
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        bundle.run(runtime).failed()


@pytest.mark.protects(
    "host-table",
    "the CDI hook recognizes the host's mounts by a single mount table",
    instead='self._host_table = proc.Mounts(b"") if self._inside else table',
    only="volumes_stay and etc-rw and runc-host",
)
@pytest.mark.parametrize("mode", ["rw", "ro"])
@pytest.mark.parametrize("place", ["etc", "usr/lib"])
@RUNTIMES
def test_volumes_stay_unchanged(
    bundle: Bundle, runtime: str, answered: Path, tmp_path: Path, place: str, mode: str
) -> None:
    """The runtime's mounts are left out, because it makes mount points in volumes."""
    volume = tmp_path / "volume"
    changed(bundle, f"cp -a {place} {volume}; rm -f {volume}/ld.so.cache")
    give(bundle, answered, "0")

    def mutate(spec: Spec) -> None:
        entry = {"type": "bind", "source": str(volume), "destination": f"/{place}"}
        others = [m for m in spec["mounts"] if not m["destination"].startswith(f"/{place}/")]
        spec["mounts"] = [*others, {**entry, "options": ["rbind", "rprivate", mode]}]

    bundle.change(mutate)
    before = contents(volume)
    bundle.run(runtime)
    assert contents(volume) == before


# Under NVIDIA's name -------------------------------------------------------------------------

# The hooks in a CDI spec of nvidia-ctk.
VERBS = {
    "create-symlinks": ["--link", "libcuda.so.1::/usr/lib/libcuda.so"],
    "update-ldcache": ["--folder", "/usr/lib"],
    "enable-cuda-compat": ["--host-driver-version=580.65.06"],
    "disable-device-node-modification": [],
    "update-application-profile": [],
    "chmod": ["--mode", "755", "--path", "/dev/dri"],
    "a-verb-of-tomorrow": [],
}


@pytest.fixture
def nvidias_name(installation: Installation, tmp_path: Path) -> Path:
    link = tmp_path / "nvidia-cdi-hook"
    link.symlink_to(installation.bin / HOOK)
    return link


def test_the_version_and_help_options_are_answered(nvidias_name: Path) -> None:
    """Docker and users call these options to check that the program works."""
    assert run([nvidias_name, "--version"]).ok().stdout.startswith(f"{HOOK} ")
    assert run([nvidias_name, "--help"]).ok().stdout.startswith("usage:")


def test_our_spec_works_with_a_hook_called_by_nvidias_name(
    bundle: Bundle, runtime: str, document: Path, driver: Driver, nvidias_name: Path
) -> None:
    give(bundle, document, "2")
    hook = {**hook_of(bundle), "path": str(nvidias_name)}
    bundle.change(lambda spec: spec["hooks"].update(createContainer=[hook]))
    bundle.command(*look(driver.minors, NAMES))
    inside = seen(bundle.run(runtime))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(2)}
    assert set(inside.libraries) == set(NAMES)


@pytest.mark.parametrize("verb", VERBS)
@RUNTIMES
def test_a_spec_of_nvidias_toolkit_is_refused(
    bundle: Bundle, runtime: str, document: Path, driver: Driver, nvidias_name: Path, verb: str
) -> None:
    """gpuhook would do only half of that spec's work, without a sign of the missing half."""
    give(bundle, document, "2")
    args = ["nvidia-cdi-hook", verb, *VERBS[verb]]
    hook = {**hook_of(bundle), "path": str(nvidias_name), "args": args}
    bundle.change(lambda spec: spec["hooks"].update(createContainer=[hook]))
    bundle.command("echo", "started")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        done = bundle.run(runtime).failed()
    assert "started" not in done.stdout
    if runtime == "runc":
        assert f"calls its hook with '{verb}'" in done.stderr
        assert "gpuhook cdi generate" in done.stderr
