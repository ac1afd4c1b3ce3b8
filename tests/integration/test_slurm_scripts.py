"""Scripts of packaging/slurm: root's work for jobs, and users who try to redirect it."""

import os
import signal
import subprocess
from collections.abc import Iterator
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


@pytest.fixture
def site(workspace: Path) -> Iterator[Path]:
    """A folder that root owns and every user may enter."""
    with made_site(workspace, "slurm-scripts") as made:
        yield made


@pytest.fixture
def folder(site: Path) -> Path:
    """Path of the jobs' folders, which don't exist yet."""
    return site / "containers"


@pytest.fixture
def scripts(site: Path, installation: Installation) -> Scripts:
    """The scripts, as they are installed."""
    return Scripts(site / "prefix", installation)


def look(path: Path) -> tuple[int, int]:
    """Return the owner and mode of a path, without following a link."""
    status = path.lstat()
    return status.st_uid, status.st_mode & 0o7777


@pytest.mark.protects("job-owner", "Slurm: a job's folder is owned by the job's user")
def test_each_job_folder_is_accessible_to_its_user_alone(scripts: Scripts, folder: Path) -> None:
    for user, job in ((ADA, 5), (BEA, 6), (ADA, 7), (0, 8)):
        scripts.prolog(folder, user, job).ok()
        assert look(folder / f"{user}.{job}") == (user, 0o700)
    assert look(folder) == (0, 0o711)
    as_user(ADA, "touch", folder / f"{ADA}.5/state").ok()
    as_user(ADA, "ls", folder).failed()
    as_user(ADA, "ls", folder / f"{BEA}.6").failed()
    as_user(ADA, "touch", folder / f"{BEA}.6/state").failed()
    scripts.epilog(folder, ADA, 5).ok()
    assert jobs_in(folder) == ["0.8", f"{ADA}.7", f"{BEA}.6"]


def test_user_links_in_place_of_job_folders_are_replaced(
    scripts: Scripts, site: Path, folder: Path
) -> None:
    """Such links are possible if install -d -o USER made the folder together with its parent."""
    victim = site / "victim"
    victim.mkdir(mode=0o700)
    scripts.prolog(folder, ADA, 5).ok()
    as_user(ADA, "rm", "-rf", folder / f"{ADA}.5")
    for name in (f"{ADA}.5", f"{ADA}.6", f"{BEA}.7"):
        as_user(ADA, "ln", "-s", victim, folder / name)
    as_user(ADA, "mv", folder, site / "moved")
    for user, job in ((ADA, 5), (ADA, 6), (BEA, 7)):
        scripts.prolog(folder, user, job)
        assert look(victim) == (0, 0o700)
        assert look(folder / f"{user}.{job}") == (user, 0o700)
    assert look(folder) == (0, 0o711)


@pytest.mark.protects(
    "users-folder-itself",
    "Slurm: a job's folder is refused if it is a link or a mount covers it",
    instead="return os.open(name, _FOLDER & ~os.O_NOFOLLOW, dir_fd=parent)",
)
@pytest.mark.parametrize("kind", ["link", "dead link", "file", "pipe"])
def test_a_job_folder_path_that_is_no_folder_is_refused_and_unchanged(
    scripts: Scripts, site: Path, folder: Path, kind: str
) -> None:
    victim = site / "victim"
    victim.mkdir(mode=0o700)
    scripts.prolog(folder, ADA, 5).ok()
    place = folder / f"{ADA}.6"
    if kind.endswith("link"):
        place.symlink_to(victim if kind == "link" else site / "nothing")
    else:
        os.mknod(place, 0o600 | {"file": 0o100000, "pipe": 0o010000}[kind])
    before = look(place)
    refused = scripts.prolog(folder, ADA, 6).failed()
    assert refused.stderr.startswith(f"gpuhook: {place} has to be a folder")
    assert look(place) == before
    assert look(victim) == (0, 0o700)
    assert not (site / "nothing").exists()


@pytest.mark.protects(
    "jobs-folder-owner", "Slurm: a parent folder of job folders is refused if root doesn't own it"
)
@pytest.mark.protects(
    "jobs-folder-mode",
    "Slurm: a parent folder of job folders is refused if other users can change it",
)
@pytest.mark.parametrize("kind", ["link", "file", "a user's", "0731", "0713", "1777"])
def test_a_job_parent_folder_that_other_users_can_change_is_refused(
    scripts: Scripts, site: Path, folder: Path, kind: str
) -> None:
    if kind == "link":
        folder.symlink_to(theirs(site / "his", ADA))
    elif kind == "file":
        folder.touch()
    elif kind == "a user's":
        theirs(folder, ADA)
    else:
        folder.mkdir()
        folder.chmod(int(kind, 8))
    before = look(folder)
    assert f"gpuhook: {folder} leads through" in scripts.prolog(folder, ADA, 5).failed().stderr
    assert look(folder) == before
    assert kind == "file" or os.listdir(folder) == []


@pytest.mark.protects(
    "jobs-folder-owner", "Slurm: a parent folder of job folders is refused if root doesn't own it"
)
@pytest.mark.protects(
    "jobs-folder-mode",
    "Slurm: a parent folder of job folders is refused if other users can change it",
)
@pytest.mark.protects(
    "jobs-folder-link",
    "Slurm: a path to the job folders' parent is refused if it contains a link",
    instead="return os.open(name, _WAY & ~os.O_NOFOLLOW, dir_fd=fd)",
)
def test_a_path_to_job_folders_through_untrusted_folders_is_refused(
    scripts: Scripts, site: Path
) -> None:
    place = "containers"
    his, link, open_to_all, sticky = (site / name for name in ("his", "link", "open", "sticky"))
    theirs(his, ADA)
    link.symlink_to("sticky")
    theirs(open_to_all, 0, 0o777)
    theirs(sticky, 0, 0o1777)
    for way in (his, link, open_to_all, site / "missing"):
        scripts.prolog(way / place, ADA, 5).failed()
        assert not (way / place).exists()
    scripts.prolog(sticky / place, ADA, 5).ok()
    for path in ("containers", f"{sticky}/../sticky/{place}", f"{sticky}/{place}/"):
        assert "absolute path" in scripts.prolog(path, ADA, 5).failed().stderr


def test_a_reused_job_number_gets_only_its_users_files(scripts: Scripts, folder: Path) -> None:
    """The earlier job's epilog didn't run, and its files belong only to its user."""
    scripts.prolog(folder, ADA, 5).ok()
    as_user(ADA, "touch", folder / f"{ADA}.5/left").ok()
    scripts.prolog(folder, BEA, 5).ok()
    assert os.listdir(folder / f"{BEA}.5") == []
    scripts.prolog(folder, ADA, 5).ok()  # as a slurmd does that is restarted while the job runs
    assert os.listdir(folder / f"{ADA}.5") == ["left"]
    scripts.epilog(folder, BEA, 5).ok()
    assert jobs_in(folder) == [f"{ADA}.5"]


def test_a_job_folder_left_by_a_killed_prolog_is_given_to_its_user(
    scripts: Scripts, folder: Path
) -> None:
    scripts.prolog(folder, ADA, 5).ok()
    (folder / f"{ADA}.6").mkdir(mode=0o700)
    scripts.prolog(folder, ADA, 6).ok()
    assert look(folder / f"{ADA}.6") == (ADA, 0o700)


def test_prologs_of_many_jobs_succeed_at_once(scripts: Scripts, folder: Path) -> None:
    env = {"SLURM_JOB_UID": str(ADA), "SLURM_JOB_USER": "ada"}
    prologs = [
        subprocess.Popen([scripts.folder / "prolog", folder], env={**env, "SLURM_JOB_ID": str(job)})
        for job in range(20)
    ]
    assert [each.wait(60) for each in prologs] == [0] * 20
    assert len(jobs_in(folder)) == 20


def test_the_epilog_follows_no_link(scripts: Scripts, site: Path, folder: Path) -> None:
    victim = site / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").touch()
    scripts.prolog(folder, ADA, 5).ok()
    for target in (victim, victim / "file", Path("/")):
        as_user(ADA, "ln", "-s", target, folder / f"{ADA}.5/to {target.name}").ok()
    (folder / f"{ADA}.6").symlink_to(victim)
    for job in (5, 6, 7):
        scripts.epilog(folder, ADA, job).ok()
    assert jobs_in(folder) == []
    assert os.listdir(victim) == ["file"]


@pytest.mark.protects(
    "jobs-folder-owner", "Slurm: a parent folder of job folders is refused if root doesn't own it"
)
def test_the_epilog_removes_nothing_in_untrusted_folders(
    scripts: Scripts, site: Path, folder: Path
) -> None:
    scripts.epilog(folder, ADA, 5).ok()  # the first job on this node has yet to do anything
    his = theirs(site / "his", ADA)
    kept = theirs(his / f"{ADA}.5", ADA)
    assert f"which belongs to user {ADA}" in scripts.epilog(his, ADA, 5).failed().stderr
    folder.symlink_to(his)
    assert "Not a directory" in scripts.epilog(folder, ADA, 5).failed().stderr
    assert kept.is_dir()


@pytest.mark.protects(
    "epilog-processes", "Slurm: no process of a job's container outlives the job", instead="pass"
)
@pytest.mark.protects("epilog-not-slurms", "Slurm: the epilog kills none of Slurm's own processes")
def test_the_epilog_ends_only_processes_of_the_job(scripts: Scripts, folder: Path) -> None:
    """With cgroup v1, a user's runtime makes cgroups below the step's, which Slurm doesn't see."""
    users = {
        f"uid_{ADA}/job_{JOB}/step_0/task_0/x": ADA,
        f"uid_{ADA}/job_{JOB}/step_1": BEA,  # a container with its own user mapping
        f"uid_{ADA}/job_{JOB}5/step_0": ADA,
        f"uid_{BEA}/job_{JOB}/step_0": BEA,
        f"uid_{ADA}/job_{JOB}/step_0/slurm": 0,
    }
    processes = []
    with cgroup_of_slurm() as top:
        for group, user in users.items():
            (top / group).mkdir(parents=True)
            words = ["setpriv", f"--reuid={user}", "sleep", "100"]
            processes.append(subprocess.Popen(words))
            (top / group / "cgroup.procs").write_text(str(processes[-1].pid))
        scripts.epilog(folder, ADA, JOB).ok()
        assert [each.wait(60) for each in processes[:2]] == [-signal.SIGKILL] * 2
        assert [each.poll() for each in processes[2:]] == [None] * 3
    for each in processes[2:]:
        each.wait(60)


FREEZER = Path("/sys/fs/cgroup/freezer")
# Processes of which each starts another as soon as it can, up to the user's limit.
RUNS_AWAY = """
import os, resource, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))
if os.fork():
    os._exit(0)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0)
"""


@pytest.mark.protects(
    "epilog-frozen", "Slurm: processes that constantly fork don't escape the epilog", instead="pass"
)
@pytest.mark.skipif(not FREEZER.is_dir(), reason="with cgroup v2 Slurm looks into all groups")
def test_the_epilog_ends_processes_that_fork_and_exit_constantly(
    scripts: Scripts, folder: Path
) -> None:
    """The processes fork and exit, so a reader of the list signals processes that are gone."""
    with cgroup_of_slurm() as top:
        job = top / f"uid_{ADA}/job_{JOB}"
        group = job / "step_0/x"
        group.mkdir(parents=True)
        words = ["setpriv", f"--reuid={ADA}", "--clear-groups", "/usr/bin/python3", "-IS", "-c"]
        to_group = f'echo $$ >{group}/cgroup.procs; exec "$@" >/dev/null 2>&1'
        run(["sh", "-c", to_group, "sh", *words, RUNS_AWAY]).ok()
        assert (group / "cgroup.procs").read_text()
        scripts.epilog(folder, ADA, JOB).ok()
        assert (group / "cgroup.procs").read_text() == ""
        assert (job / "freezer.state").read_text() == "THAWED\n"


@pytest.mark.parametrize("script", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_USER=a"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=", "SLURM_JOB_USER=a"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=../x", "SLURM_JOB_USER=a"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5", "SLURM_JOB_USER=../x"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5", "SLURM_JOB_USER=x/y"),
        ("SLURM_JOB_UID=5", "SLURM_JOB_ID=5", "SLURM_JOB_USER=.."),
    ],
)
def test_prolog_and_epilog_fail_without_valid_slurm_variables(
    scripts: Scripts, folder: Path, script: str, words: tuple[str, ...]
) -> None:
    assert "slurmd" in run(["env", "-i", *words, scripts.folder / script, folder]).failed().stderr
    assert not folder.exists()
