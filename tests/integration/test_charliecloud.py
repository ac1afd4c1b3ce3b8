"""Charliecloud's ways to GPUs, on a machine with a simulated driver: --cdi, and ch-fromhost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result
from harness.driver import Driver, lines_of_nvidia_smi
from harness.installation import Installation
from harness.releases import Release, release

HOME = "/home/joe"
USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "env", f"HOME={HOME}")
SMI = ("nvidia-smi", "-L")
DOCUMENTS = Path("/etc/charliecloud/cdi")

# What a machine with the driver has: its nodes, its files, and what /proc shows already.
SET_UP = """
set -e
mount -t tmpfs -o mode=755 tmpfs /dev
while read -r name major minor; do
    mknod -m 666 "/dev/$name" c "$major" "$minor"
done <<NODES
null 1 3
zero 1 5
random 1 8
urandom 1 9
tty 5 0
NODES
mkdir /dev/pts /dev/shm
cp -a DRIVER/dev/. /dev/
cp -a DRIVER/usr/. /usr/
ldconfig
chmod 1777 /tmp
useradd --create-home --uid 1000 joe
cp -a IMAGE HOME/box
mkdir HOME/box/ch # as ch-image leaves it
cp -a HOME/box HOME/copied
chown -R joe:joe HOME
chmod -R u+w HOME
ln -s CLI /usr/local/bin/nvidia-container-cli
mkdir -p /etc/gpuhook DOCUMENTS
printf '[nvidia-container-cli]\\nload-kmods = false\\n' >/etc/gpuhook/config.toml
"""


@pytest.fixture(scope="module")
def host(
    charliecloud_root: Path,
    workspace: Path,
    installation: Installation,
    driver: Driver,
    roots: dict[str, Path],
) -> Iterator[Release]:
    """A machine with Charliecloud and NVIDIA's driver, and an image as a folder."""
    folder = workspace / "charliecloud"
    with release("charliecloud", charliecloud_root, folder, installation, driver) as made:
        words = {
            "DRIVER": driver.root,
            "IMAGE": roots["debian"],
            "HOME": HOME,
            "DOCUMENTS": DOCUMENTS,
            "CLI": made.installation.bin / "gpuhook-container-cli",
        }
        script = SET_UP
        for word, path in words.items():
            script = script.replace(word, str(path))
        made.namespace.run("sh", "-c", script).ok()
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
def test_by_a_document(host: Release, driver: Driver, cdi: tuple[str, ...]) -> None:
    """All of the host's /dev is there, so a choice is none."""
    done = run_in(host, *SMI, cdi=cdi).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
    assert "unknown hook" not in done.stderr
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        found = run_in(host, "dlprobe", library, cdi=cdi).ok().stdout
        assert driver.version in found, found


def test_without_a_document_there_is_nothing(host: Release) -> None:
    assert run_in(host, *SMI).status != 0


def test_what_other_engines_read_is_understood_but_for_the_hook(host: Release) -> None:
    """Then no library is found, and that is why there is --for."""
    place = "/root/usual.json"
    generate = (host.installation.command, "cdi", "generate", "--output", place)
    host.namespace.run(*generate, "--kind=nvidia.com/gpu").ok()
    host.namespace.run("cp", place, f"{HOME}/usual.json").ok()
    done = run_in(host, *SMI, cdi=(f"--cdi={HOME}/usual.json",))
    assert "unknown hook" in done.stderr


def test_what_is_copied_into_the_image(host: Release, driver: Driver) -> None:
    """ch-fromhost asks nvidia-container-cli which files those are."""
    host.namespace.run(*USER, "ch-fromhost", "--nvidia", f"{HOME}/copied").ok()
    done = run_in(host, *SMI, image="copied").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.gpus)
