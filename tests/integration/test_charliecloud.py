"""Charliecloud's two ways to use GPUs, --cdi and ch-fromhost, with a simulated driver."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result
from harness.driven import HOME, USER, driven
from harness.driver import Driver, lines_of_nvidia_smi
from harness.installation import Installation
from harness.releases import Release

SMI = ("nvidia-smi", "-L")
DOCUMENTS = Path("/opt/documents")  # the tests make generate write them here

SET_UP = """
cp -a IMAGE HOME/box
mkdir HOME/box/ch # as ch-image leaves it
cp -a HOME/box HOME/copied
chown -R joe:joe HOME
chmod -R u+w HOME
mkdir -p DOCUMENTS
"""


@pytest.fixture(scope="module")
def host(
    charliecloud_root: Path,
    workspace: Path,
    installation: Installation,
    driver: Driver,
    roots: dict[str, Path],
) -> Iterator[Release]:
    """A host with Charliecloud, NVIDIA's driver, and an image as a folder."""
    words = (charliecloud_root, workspace, installation, driver, SET_UP)
    with driven("charliecloud", *words, IMAGE=roots["debian"], DOCUMENTS=DOCUMENTS) as made:
        generate = (made.installation.command, "cdi", "generate", "--for", "charliecloud")
        made.namespace.run(*generate, "--output", f"{DOCUMENTS}/").ok()
        yield made


def run_in(host: Release, *words: str, image: str = "box", cdi: tuple[str, ...] = ()) -> Result:
    """Run a command in a container, as an ordinary user."""
    return host.namespace.run(*USER, "ch-run", *cdi, f"{HOME}/{image}", "--", *words)


@pytest.mark.parametrize(
    "cdi",
    [
        ("--cdi-dirs", str(DOCUMENTS), "--cdi"),
        ("--cdi-dirs", str(DOCUMENTS), "--cdi=nvidia.com/gpu"),
        (f"--cdi={DOCUMENTS}/nvidia.com-gpu.json",),
    ],
)
def test_cdi_spec_gives_all_gpus_and_libraries(
    host: Release, driver: Driver, cdi: tuple[str, ...]
) -> None:
    """The container has the host's whole /dev, so a choice of GPUs has no effect."""
    done = run_in(host, *SMI, cdi=cdi).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
    assert "unknown hook" not in done.stderr
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        found = run_in(host, "dlprobe", library, cdi=cdi).ok().stdout
        assert driver.version in found, found


def test_without_a_spec_there_are_no_gpus(host: Release) -> None:
    assert run_in(host, *SMI).status != 0


def test_hook_in_a_usual_cdi_spec_is_reported_as_unknown(host: Release) -> None:
    """Charliecloud then finds no libraries, which is the reason for --for."""
    place = "/root/usual.json"
    generate = (host.installation.command, "cdi", "generate", "--output", place)
    host.namespace.run(*generate, "--kind=nvidia.com/gpu").ok()
    host.namespace.run("cp", place, f"{HOME}/usual.json").ok()
    done = run_in(host, *SMI, cdi=(f"--cdi={HOME}/usual.json",))
    assert "unknown hook" in done.stderr


def test_image_with_driver_files_copied_by_ch_fromhost_works(host: Release, driver: Driver) -> None:
    """ch-fromhost asks nvidia-container-cli for the driver's files."""
    host.namespace.run(*USER, "ch-fromhost", "--nvidia", f"{HOME}/copied").ok()
    done = run_in(host, *SMI, image="copied").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)


# By install ---------------------------------------------------------------------------------


def shell(host: Release, script: str) -> Result:
    """Run a login shell as root."""
    return host.namespace.run("sh", "-lc", script)


def listing(host: Release) -> str:
    """Return the names, modes, times and checksums of the files in /etc."""
    every = "find /etc -printf '%p %m %u %T@ %l\\n' | sort; find /etc -type f | sort | xargs md5sum"
    return host.namespace.run("sh", "-c", every).ok().stdout


@pytest.fixture
def installed(host: Release) -> Iterator[Release]:
    before = listing(host)
    command = (host.installation.command, "install", "--engine=charliecloud")
    done = host.namespace.run(*command, env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}).ok()
    assert "set CH_RUN_CDI_DIRS=/etc/charliecloud/cdi" in done.stdout
    yield host
    host.namespace.run(host.installation.command, "uninstall").ok()
    # The times of these folders have changed, and ldconfig was run.
    cache = "/etc/ld.so.cache"
    folders = ("/etc ", "/etc/profile.d ")
    left = [
        [line for line in each.splitlines() if not (line.startswith(folders) or cache in line)]
        for each in (before, listing(host))
    ]
    assert left[0] == left[1]


def test_install_sets_the_spec_folder_for_users(installed: Release, driver: Driver) -> None:
    words = " ".join((*USER, "ch-run", "--cdi", f"{HOME}/box", "--", *SMI))
    done = shell(installed, words).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
    elsewhere = shell(installed, "CH_RUN_CDI_DIRS=/root/other; . /etc/profile; env").ok()
    assert "CH_RUN_CDI_DIRS=/root/other\n" in elsewhere.stdout  # a user's setting has priority
    again = installed.namespace.run(
        installed.installation.command, "install", "--engine=charliecloud"
    )
    assert again.ok().stdout.count("charliecloud: unchanged") == 2
    assert "wrote" not in again.stdout


def test_watch_rewrites_the_specs(installed: Release, driver: Driver) -> None:
    path = "/etc/charliecloud/cdi/nvidia.com-gpu.json"
    library = driver.library("libnvidia-opticalflow.so.1")
    here = f"/{library.relative_to(driver.root)}"
    says = ("grep", "-c", library.name, path)
    assert installed.namespace.run(*says).ok()
    installed.namespace.run("mv", here, "/opt/away").ok()
    try:
        watch = (installed.installation.command, "watch", "--interval=0.5")
        done = installed.namespace.run("timeout", "5", *watch)
        assert f"charliecloud: wrote {path}" in done.stdout.splitlines()
        assert installed.namespace.run(*says).stdout == "0\n"
    finally:
        installed.namespace.run("mv", "/opt/away", here).ok()
        installed.namespace.run("ldconfig").ok()  # as the installer of a driver does
        installed.namespace.run("timeout", "5", *watch)
    assert installed.namespace.run(*says).ok()
