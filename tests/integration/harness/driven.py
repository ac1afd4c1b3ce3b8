"""A release with one engine that users run themselves, NVIDIA's driver, and an ordinary user."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.driver import Driver
from harness.installation import Installation
from harness.releases import Release, release

HOME = "/home/joe"
USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "env", f"HOME={HOME}")

# Set up a machine with the driver's nodes and files. Its /proc shows the driver already.
_SET_UP = """
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
mount -t devpts devpts /dev/pts
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr
cp -a DRIVER/dev/. /dev/
cp -a DRIVER/usr/. /usr/
ldconfig
chmod 1777 /tmp
useradd --create-home --uid 1000 joe
ln -s CLI /usr/local/bin/nvidia-container-cli
mkdir -p /etc/gpuhook
printf '[nvidia-container-cli]\\nload-kmods = false\\n' >/etc/gpuhook/config.toml
"""


@contextmanager
def driven(
    name: str,
    lower: Path,
    workspace: Path,
    installation: Installation,
    driver: Driver,
    script: str,
    **words: object,
) -> Iterator[Release]:
    """Run the release with the root ``lower``, and set it up.

    ``script`` continues the script that sets it up. ``words`` maps words in the script to
    their replacements.
    """
    with release(name, lower, workspace / name, installation, driver) as made:
        cli = made.installation.bin / "gpuhook-container-cli"
        text = _SET_UP + script
        for word, value in {"DRIVER": driver.root, "CLI": cli, "HOME": HOME, **words}.items():
            text = text.replace(word, str(value))
        made.namespace.run("sh", "-c", text).ok()
        yield made
