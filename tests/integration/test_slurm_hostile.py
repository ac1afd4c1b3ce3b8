"""Hostile Slurm users against the scripts that root runs: mounts, full disks, names, leftovers."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.commands import run
from harness.installation import Installation
from harness.slurm_scripts import (
    ADA,
    BEA,
    JOB,
    Scripts,
    as_user,
    cgroup_of_slurm,
    jobs_in,
    made_site,
    theirs,
)

# Mount a FUSE file system as a user does, and serve it, or accept requests and never answer.
FUSE = """
import os, signal, socket, struct, subprocess, sys
place, kind, options = sys.argv[1:]
ours, theirs = socket.socketpair()
words = ["fusermount3", *(["-o", options] if options else []), "--", place]
environ = {"_FUSE_COMMFD": str(theirs.fileno()), "PATH": os.environ["PATH"]}
subprocess.run(words, env=environ, pass_fds=[theirs.fileno()], check=True)
[fuse] = socket.recv_fds(ours, 1, 1)[1]
if kind == "dead":
    os.close(fuse)
print("mounted", flush=True)
if kind != "served":
    signal.pause()
answers = {  # linux/fuse.h: INIT, GETATTR of a folder, STATFS, OPENDIR
    26: struct.pack("<4I2H2I2HI24x", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 16, 0, 0),
    3: struct.pack("<QII6Q10I", *[0] * 3, 1, *[0] * 8, 0o40755, 2, 0, 0, 0, 4096, 0),
    17: struct.pack("<5Q4I24x", 1, 1, 1, 1, 1, 4096, 255, 4096, 0),
    27: struct.pack("<QII", 1, 0, 0),
}
while True:
    what, number = struct.unpack_from("<4xIQ", os.read(fuse, 1 << 17))
    if what not in (2, 42):  # FORGET, BATCH_FORGET
        data = answers.get(what, b"")
        error = 0 if what in answers else 2 if what == 1 else 38  # LOOKUP: ENOENT, else ENOSYS
        os.write(fuse, struct.pack("<IiQ", 16 + len(data), -error, number) + data)
"""
PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")


@pytest.fixture
def site(workspace: Path) -> Iterator[Path]:
    """A folder that root owns and every user may enter, and the files that fusermount3 needs."""
    with made_site(workspace, "slurm-hostile") as made:
        own = made / "machine"
        own.mkdir()
        run(["mount", "-t", "tmpfs", "-o", "dev", "tmpfs", own]).ok()
        users = Path("/etc/passwd").read_text() + f"ada:x:{ADA}:{ADA}::/:/bin/sh\n"
        (own / "passwd").write_text(users)
        os.mknod(own / "fuse", 0o020666, os.makedev(10, 229))
        (own / "fuse").chmod(0o666)
        places = [(own / "passwd", "/etc/passwd"), (own / "fuse", "/dev/fuse")]
        if Path("/etc/fuse.conf").exists():
            (own / "fuse.conf").write_text("user_allow_other\n")
            places.append((own / "fuse.conf", "/etc/fuse.conf"))
        for path, place in places:
            run(["mount", "--bind", path, place]).ok()
        try:
            yield made
        finally:
            for _, place in places:
                run(["umount", place]).ok()
            while points := mounted_below(made):
                run(["umount", "--lazy", min(points)]).ok()  # with all mounts below it


@pytest.fixture
def folder(site: Path) -> Path:
    return site / "containers"


@pytest.fixture
def scripts(site: Path, installation: Installation) -> Scripts:
    return Scripts(site / "prefix", installation)


def mounted_below(path: Path) -> list[str]:
    """Return the mount points at a path or below it."""
    points = [
        line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().split("\n")[:-1]
    ]
    return [each for each in points if each == str(path) or each.startswith(f"{path}/")]


@contextmanager
def fuse(place: Path, kind: str, options: str = "") -> Iterator[None]:
    """Mount a FUSE filesystem as the user Ada: served, silent or dead."""
    words = ["setpriv", f"--reuid={ADA}", f"--regid={ADA}", "--clear-groups", *PYTHON, FUSE]
    with subprocess.Popen([*words, str(place), kind, options], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"mounted\n"
            assert mounted_below(place) == [str(place)]
            yield
        finally:
            server.kill()


@pytest.mark.protects(
    "users-mounts-not-entered",
    "root doesn't enter a filesystem that a user mounted in a Slurm job's folder",
    instead="_OWN = kernel.RESOLVE_NO_SYMLINKS",
)
@pytest.mark.parametrize("options", ["", "allow_other"])
@pytest.mark.parametrize("kind", ["served", "silent", "dead"])
@pytest.mark.parametrize("below", ["", "a/b", "file"])
def test_a_user_mounted_filesystem_is_detached_without_draining_the_node(
    scripts: Scripts, folder: Path, below: str, kind: str, options: str
) -> None:
    """Afterwards, neither the same job's prolog nor another user's finds the filesystem."""
    scripts.prolog(folder, ADA, 5).ok()
    place = folder / f"{ADA}.5" / below
    if below == "file":
        as_user(ADA, "touch", place).ok()
    else:
        as_user(ADA, "mkdir", "-p", place).ok()
    with fuse(place, kind, options):
        assert scripts.epilog(folder, ADA, 5).ok().stderr == ""
        assert mounted_below(folder) == []
        assert jobs_in(folder) == []
        for user in (ADA, BEA):
            assert scripts.prolog(folder, user, 5).ok().stderr == ""
            assert (folder / f"{user}.5").stat().st_uid == user


@pytest.mark.protects(
    "users-mounts-detached",
    "a filesystem that a user mounted in a Slurm job's folder is detached",
    instead="pass",
)
@pytest.mark.parametrize("kind", ["served", "silent", "dead"])
def test_a_user_mount_left_without_an_epilog_is_detached_by_the_prolog(
    scripts: Scripts, folder: Path, kind: str
) -> None:
    scripts.prolog(folder, ADA, 5).ok()
    with fuse(folder / f"{ADA}.5", kind, "allow_other"):
        assert scripts.prolog(folder, ADA, 5).ok().stderr == ""
        assert mounted_below(folder) == []
        as_user(ADA, "touch", folder / f"{ADA}.5/state").ok()


@pytest.mark.protects(
    "users-mounts-not-entered",
    "root doesn't enter a filesystem that a user mounted in a Slurm job's folder",
    instead="_OWN = kernel.RESOLVE_NO_SYMLINKS",
)
@pytest.mark.protects(
    "users-mounts-detached",
    "a filesystem that a user mounted in a Slurm job's folder is detached",
    instead="pass",
)
def test_an_epilog_keeps_mounted_files_and_the_folders_of_other_jobs(
    scripts: Scripts, site: Path, folder: Path
) -> None:
    """The filesystems are stacked, hidden by other mounts, and full of undeletable files."""
    victim = site / "victim"
    (victim / "folder").mkdir(parents=True)
    (victim / "file").touch()
    for user in (ADA, BEA):
        scripts.prolog(folder, user, 5).ok()
    own, other = folder / f"{ADA}.5", folder / f"{BEA}.5"
    for path in ("a/b", "c"):
        as_user(ADA, "mkdir", "-p", own / path).ok()
    for place in (own / "a/b", own / "a/b", own / "a", own / "c", own, own, other):
        run(["mount", "--bind", victim, place]).ok()
    scripts.epilog(folder, ADA, 5).ok()
    assert jobs_in(folder) == [f"{BEA}.5"]
    assert mounted_below(folder) == [str(other)]
    assert sorted(os.listdir(victim)) == ["file", "folder"]


@pytest.mark.protects(
    "prolog-full",
    "Slurm: a filesystem that a user filled doesn't drain the node",
    instead="if True:",
)
@pytest.mark.protects(
    "users-mounts-not-entered",
    "root doesn't enter a filesystem that a user mounted in a Slurm job's folder",
    instead="_OWN = kernel.RESOLVE_NO_SYMLINKS",
)
def test_a_filesystem_filled_by_a_user_drains_no_node(scripts: Scripts, folder: Path) -> None:
    """Ada's job takes all inodes. Bea's job starts without its folder until Ada's job has ended."""
    folder.mkdir(mode=0o711)
    run(["mount", "-t", "tmpfs", "-o", "mode=711,nr_inodes=100", "tmpfs", folder]).ok()
    scripts.prolog(folder, ADA, 5).ok()
    fill = f"i=0; while mkdir {folder}/{ADA}.5/$i 2>/dev/null; do i=$((i + 1)); done"
    as_user(ADA, "sh", "-c", fill).ok()
    assert "no container of job 6 starts" in scripts.prolog(folder, BEA, 6).ok().stderr
    assert jobs_in(folder) == [f"{ADA}.5"]
    assert scripts.epilog(folder, BEA, 6).ok().stderr == ""
    assert scripts.epilog(folder, ADA, 5).ok().stderr == ""
    assert scripts.prolog(folder, BEA, 7).ok().stderr == ""
    assert jobs_in(folder) == [f"{BEA}.7"]


def test_leftovers_of_an_earlier_epilog_are_removed(scripts: Scripts, folder: Path) -> None:
    scripts.prolog(folder, ADA, 5).ok()
    (folder / ".removed/0123.4/a/b").mkdir(parents=True)
    (folder / ".removed/0123.4/a/file").touch()
    scripts.epilog(folder, ADA, 5).ok()
    assert jobs_in(folder) == []


@pytest.mark.protects(
    "job-strangers",
    "Slurm: a job's folder that belongs to another user is replaced",
    instead="return False",
)
def test_a_job_folder_owned_by_another_user_is_replaced(scripts: Scripts, folder: Path) -> None:
    """The folder belongs to an earlier user of this name, whose epilog didn't run."""
    scripts.prolog(folder, ADA, 5).ok()
    (theirs(folder / f"{ADA}.6", BEA) / "hers").touch()
    assert "another user" in scripts.prolog(folder, ADA, 6).ok().stderr
    assert os.listdir(folder / f"{ADA}.6") == []
    assert (folder / f"{ADA}.6").stat().st_uid == ADA
    scripts.epilog(folder, ADA, 6).ok()
    assert jobs_in(folder) == [f"{ADA}.5"]


# Processes ------------------------------------------------------------------------------------


@pytest.fixture
def tree() -> Iterator[Path]:
    with cgroup_of_slurm() as made:
        yield made


@contextmanager
def process(group: Path, user: int, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a user's process in a cgroup, and wait for the line that reports it as ready."""
    group.mkdir(parents=True, exist_ok=True)
    words = ["setpriv", f"--reuid={user}", "--clear-groups", *PYTHON, program]
    enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(group)]
    with subprocess.Popen([*enter, *words], stdout=subprocess.PIPE) as made:
        try:
            assert made.stdout is not None
            assert made.stdout.readline() == b"ready\n"
            yield made
        finally:
            made.kill()


WAITS = "import signal; print('ready', flush=True); signal.pause()"
# A process whose files in /proc belong to root (PR_SET_DUMPABLE).
HIDES = f"import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); {WAITS}"
# A process whose first thread has ended (pthread_exit), so /proc shows it as a zombie.
LEADERLESS = """
import ctypes, threading, time
def go_on():
    time.sleep(0.5)
    print("ready", flush=True)
    time.sleep(1000)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.protects(
    "epilog-threads", "Slurm: a job process with an exited main thread is also killed"
)
@pytest.mark.parametrize("program", [WAITS, HIDES, LEADERLESS], ids=["waits", "hides", "leader"])
def test_a_job_process_with_an_ended_main_thread_is_killed(
    scripts: Scripts, folder: Path, tree: Path, program: str
) -> None:
    with process(tree / f"uid_{ADA}/job_{JOB}/step_0", ADA, program) as one:
        scripts.epilog(folder, ADA, JOB).ok()
        assert one.wait(60) == -signal.SIGKILL


@pytest.mark.protects(
    "epilog-roots-group", "Slurm: a cgroup that belongs to a user isn't mistaken for a job's"
)
@pytest.mark.protects(
    "epilog-own-group",
    "Slurm: a cgroup below a job's cgroup isn't mistaken for another job's",
    instead=('return any(self.path.partition("/uid_")[2] in path for path in groups.values())'),
)
@pytest.mark.parametrize("where", ["below another's job", "at the top", "below a user's"])
def test_processes_in_a_user_made_cgroup_are_not_killed(
    scripts: Scripts, folder: Path, tree: Path, where: str
) -> None:
    """The cgroup is delegated to Ada (Delegate=, Slurm's of a step) and named like Bea's job."""
    job = f"uid_{BEA}/job_{JOB}/step_0"
    if where == "at the top":
        os.chown(tree, ADA, ADA)
        group = tree / job
    elif where == "below a user's":
        (tree / f"uid_{BEA}").mkdir()
        os.chown(tree / f"uid_{BEA}", ADA, ADA)
        group = tree / job
    else:
        (tree / job).mkdir(parents=True)
        group = tree / f"uid_{ADA}/job_{JOB}/step_0/slurm" / job
    with process(group, ADA, WAITS) as one:
        scripts.epilog(folder, BEA, JOB).ok()
        assert one.poll() is None


# In a pid namespace of its own, a pid can be reused at once. The job's process has pid 400. It ends
# after gpuhook has checked it, but before the signal. Then a process of Bea gets the same pid.
REUSED = """
import os, signal, sys
from gpuhook.hpc.slurm import job_groups
from gpuhook.hpc.slurm.job_groups import SlurmJob
group, ada, bea, job = sys.argv[1], *map(int, sys.argv[2:])

def born(user, place=None):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write("399")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if place:
            with open(place + "/cgroup.procs", "w") as file:
                file.write("0")
        os.setuid(user)
        os.close(writer)
        signal.pause()
    assert child == 400, child
    os.close(writer)
    os.read(reader, 1)  # until it is the user's
    return child

look, victims = job_groups._is_jobs, []

def looked(pid, groups):
    found = look(pid, groups)
    if found and not victims:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        victims.append(born(bea))
    return found

job_groups._is_jobs = looked
born(ada, group)
groups = job_groups.find(SlurmJob(job, ada, "ada"))
assert groups
job_groups._set = lambda *_, **__: None  # as where the kernel can't freeze them
assert job_groups.end_processes(groups) == []
[bea] = victims
print("killed" if os.waitpid(bea, os.WNOHANG)[0] else "lives")
"""


@pytest.mark.protects(
    "epilog-processes",
    "Slurm: the epilog kills only a process it has checked, not a reused PID",
    instead="os.kill(pid, number)",
)
def test_a_process_with_a_reused_pid_is_not_killed(tree: Path, installation: Installation) -> None:
    job = tree / f"uid_{ADA}/job_{JOB}"
    job.mkdir(parents=True)
    python = installation.bin / "python"
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    words = [*apart, python, "-c", REUSED, job, ADA, BEA, JOB]
    assert run([str(word) for word in words]).ok().stdout.split()[-1] == "lives"
