"""Mount namespaces: one for the whole test session, and others with another cgroup layout.

The session's own namespace has a fresh tmpfs on /run and /dev/shm. Its changes of some folders
of the host are invisible to other processes. Propagation is shared everywhere, as systemd
makes it. So the tests see each mount that leaks out of a container, and nothing outlives the
session. Engines that run on this host, and other sessions, don't notice the session. If
gpuhook is installed on this host, the installation and its registrations with engines are
hidden.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ran

from harness.commands import Result, run, stop

CLONE_NEWNS = 0x00020000  # linux/sched.h
CGROUP = Path("/sys/fs/cgroup")
FIRST_TO_KNOW_CAPABILITIES = 23  # Docker's version
CAP_SYS_RESOURCE = 24  # linux/capability.h
LAST_CAP = Path("/proc/sys/kernel/cap_last_cap")
OWN = Path("/run/gpuhook-test-own")  # changes that the session makes to folders of the host
OF_ENGINES = ("docker", "containerd", "crio", "containers/oci", "containers/containers.conf.d")
PROGRAMS = ("gpu-py", "gpuhook*", "gpu-docker", "nvidia-ctk", "nvidia-container-*")

# The last commands of a shell that holds a namespace.
HOLD = "mount --make-rshared / && echo ready && exec sleep infinity"
LAYOUTS = {
    "host": ":",
    "v1": f"umount {CGROUP}/unified",
    "v2": f"umount -R {CGROUP} && mount -t cgroup2 cgroup2 {CGROUP}",
}


@dataclass(frozen=True)
class Namespace:
    """A mount namespace; ``pid`` is a process in it, or None for this process' own.

    ``folder`` is the default folder in which programs start, or None for this process' own.
    """

    cgroups: str
    pid: int | None = None
    folder: Path | None = None

    def enter(self, *argv: str | Path, cwd: Path | None = None) -> list[str]:
        """Return the command line that runs ``argv`` in this namespace."""
        words = [str(word) for word in argv]
        if self.pid is None:
            return words
        place = cwd or self.folder or Path.cwd()
        return ["nsenter", "-t", str(self.pid), "-m", f"--wdns={place}", "--", *words]

    def run(
        self,
        *argv: str | Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bytes = b"",
    ) -> Result:
        """Run ``argv`` to its end in this namespace."""
        return run(self.enter(*argv, cwd=cwd), env=env, cwd=cwd, stdin=stdin)


def host_cgroups() -> str:
    """Return this host's cgroup layout: hybrid, v1 or v2."""
    return ran.cgroups()


def capabilities() -> int:
    """Return this process' effective capabilities as bits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def may_raise_memlock() -> bool:
    """Return whether RLIMIT_MEMLOCK can be raised, as crun must to load a BPF program."""
    return bool(capabilities() >> CAP_SYS_RESOURCE & 1)


def privileged_options() -> list[str]:
    """Return options that make a Docker container privileged, as far as this host can do so.

    runc can't give a container a capability that runc lacks itself.
    """
    if capabilities() == (2 << int(LAST_CAP.read_text())) - 1:
        return ["--privileged"]
    lacking = not may_raise_memlock() and not _docker_knows_capabilities()
    missing = ["--cap-drop=SYS_RESOURCE"] if lacking else []
    return ["--cap-add=ALL", *missing, "--device-cgroup-rule=a *:* rwm"]


def _docker_knows_capabilities() -> bool:
    """Return whether this dockerd takes all capabilities to mean those that it has itself."""
    version = run(["dockerd", "--version"]).ok().stdout.split()[2]
    return int(version.partition(".")[0]) >= FIRST_TO_KNOW_CAPABILITIES


def runtime_layouts() -> list[tuple[str, str]]:
    """Return the (low-level runtime, layout) pairs that this host's kernel can run."""
    pairs = {
        "hybrid": [("runc", "host"), ("crun", "v1"), ("runc", "v2"), ("crun", "v2")],
        "v1": [("runc", "host"), ("crun", "host"), ("runc", "v2"), ("crun", "v2")],
        "v2": [("runc", "host"), ("crun", "host")],
    }[host_cgroups()]
    return [pair for pair in pairs if pair != ("crun", "v2") or may_raise_memlock()]


def allow_user_range(name: str, first: int, count: int) -> None:
    """Let the user ``name`` map ``count`` of the host's ids from ``first`` on (subuid(5)).

    LXC calls newuidmap where it is installed, and newuidmap requires this entry of root, too.
    """
    line = f"{name}:{first}:{count}\n"
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):  # the session has an /etc of its own
        text = path.read_text() if path.exists() else ""
        if line not in text.splitlines(keepends=True):
            path.write_text(f"{text}{line}")


def isolate_session() -> None:
    """Move this process into the session's mount namespace."""
    os.environ["PODMAN_IGNORE_CGROUPSV1_WARNING"] = "1"  # podman 5 and later read it
    for each in (signal.SIGHUP, signal.SIGINT):  # nohup(1) and & have both ignored
        if signal.getsignal(each) is signal.SIG_IGN:
            # runc 1.2 and later may or may not pass an ignored signal on to a container,
            # depending on timing.
            signal.signal(each, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "unshare(CLONE_NEWNS)")
    run(["mount", "--make-rprivate", "/"]).ok()
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"]).ok()
    run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"]).ok()  # podman's locks
    for place in (Path("/etc"), Path("/var/lib")):
        _own(place)
    _hide_installed()
    storage = Path("/var/lib/containers")  # podman's storage can't be on an overlay
    storage.mkdir(exist_ok=True)
    run(["mount", "-t", "tmpfs", "tmpfs", storage]).ok()
    run(["mount", "--make-rshared", "/"]).ok()


def _own(place: Path) -> None:
    """Let the session change a folder of the host, invisibly to other processes."""
    upper, work = OWN / "upper" / place.relative_to("/"), OWN / "work" / place.relative_to("/")
    for folder in (upper, work):
        folder.mkdir(parents=True)
    layers = f"lowerdir={place},upperdir={upper},workdir={work}"
    run(["mount", "-t", "overlay", "-o", layers, "overlay", place]).ok()


def _hide_installed() -> None:
    """Remove the files of an installed gpuhook from the session's folders."""
    found = [
        Path("/etc/gpuhook"),
        Path("/var/lib/gpuhook"),
        *(Path("/etc", name) for name in OF_ENGINES),
    ]
    for place in (Path("/usr/bin"), Path("/usr/local/bin")):
        programs = [path for name in PROGRAMS for path in place.glob(name)]
        if programs:
            _own(place)
        found += programs
    run(["rm", "-rf", *found]).ok()


@contextmanager
def namespace(layout: str) -> Iterator[Namespace]:
    """Yield a namespace with that cgroup layout until the end of the block."""
    if layout == "host":
        yield Namespace(host_cgroups())
        return
    with held(["sh", "-c", f"{LAYOUTS[layout]} && {HOLD}"], layout) as entered:
        yield entered


@contextmanager
def held(
    argv: Sequence[str | Path], cgroups: str | None = None, folder: Path | None = None
) -> Iterator[Namespace]:
    """Yield the namespace of a command that ends with ``HOLD``, until the end of the block.

    ``cgroups`` is its cgroup layout, or None for this host's layout. ``folder`` is the folder
    in which its programs start.
    """
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", *map(str, argv)],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield Namespace(cgroups or host_cgroups(), holder.pid, folder)
    finally:
        stop(holder)
        if holder.stdout is not None:
            holder.stdout.close()


# Mounts a FUSE filesystem that never answers, in the mount namespace of a process. A sleeping
# process keeps the filesystem's descriptor open as long as the other process runs.
MOUNT_FUSE = """
import ctypes, os, select, sys
pid, place = sys.argv[1:]
container = os.pidfd_open(int(pid))
fuse = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0x20000) == 0
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
assert libc.mount(b"none", place.encode(), b"fuse", 0, options) == 0, ctypes.get_errno()
if os.fork() == 0:
    os.closerange(0, 3)
    select.select([container], [], [])
"""
