"""A stand-in for enroot, which Debian lacks: its documented hook protocol, and no more.

An unprivileged user has all rights in a new user namespace and mount namespace. He has his own
user id there, or is root with ENROOT_REMAP_ROOT. The stand-in mounts the root, the kernel's
filesystems and /dev. This is the host's /dev, or a small one with ENROOT_RESTRICT_DEV. The
stand-in then runs each executable script of the hook folders in the order of their names.
Scripts get ENROOT_ROOTFS, ENROOT_ENVIRON, ENROOT_MOUNTS and ENROOT_PID, and their output is
discarded. If a hook fails, the container isn't started. Otherwise the stand-in changes its
root. The container's environment is the content of ENROOT_ENVIRON after the hooks; the last
line of each name counts. Source: enroot's doc/standard-hooks.md, doc/configuration.md and
src/runtime.sh.
"""

from dataclasses import dataclass, field
from pathlib import Path

from harness.commands import Result
from harness.namespaces import Namespace

UID = 4243
_AS_HIMSELF = (f"--map-user={UID}", f"--map-group={UID}", "--keep-caps")
_START = """
set -euo pipefail
export ENROOT_ROOTFS=$1 ENROOT_ENVIRON=$2/environ ENROOT_MOUNTS=$2/fstab ENROOT_PID=$$
hooks=$3
while IFS=$' \\t=' read -r key value; do
    [[ ! $key =~ ^ENROOT_[[:upper:]_]+$ ]] || export "$key=${!key:-$value}"
done <"$2/enroot.conf"
shift 3
mount --rbind "$ENROOT_ROOTFS" "$ENROOT_ROOTFS"
mount --rbind /proc "$ENROOT_ROOTFS/proc"
if [[ ${ENROOT_RESTRICT_DEV-} ]]; then
    mount -t tmpfs tmpfs "$ENROOT_ROOTFS/dev"
    : >"$ENROOT_ROOTFS/dev/null"
    mount --bind /dev/null "$ENROOT_ROOTFS/dev/null"
else
    mount --rbind "${HOST_DEV:-/dev}" "$ENROOT_ROOTFS/dev"
fi
IFS=:
for hook in $(for folder in $hooks; do printf '%s\\n' "$folder"/*.sh; done |
    awk -F/ '{ print $NF "\\t" $0 }' | sort | cut -f 2 | paste -sd :); do
    [[ ! -x $hook ]] || "$hook" >/dev/null
done
unset IFS
words=()
while IFS= read -r line; do words+=("$line"); done <"$ENROOT_ENVIRON"
exec chroot "$ENROOT_ROOTFS" /usr/bin/env -i PATH=/usr/bin:/bin "${words[@]}" "$@"
"""


@dataclass(frozen=True)
class Enroot:
    """A root that belongs to a user, the folders of hooks, and the places where these are used."""

    namespace: Namespace
    root: Path
    work: Path
    hooks: tuple[Path, ...]
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str, image: str = "", site: str = "", **environment: str) -> Result:
        """Run a command in a container; ``image`` has the lines of its environment.

        ``site`` has lines of enroot.conf. Hooks see only the settings that begin with ENROOT_.
        """
        self.work.mkdir(exist_ok=True)
        (self.work / "enroot.conf").write_text(site)
        (self.work / "environ").write_text(image)
        (self.work / "fstab").touch()
        for path in (self.work, *self.work.iterdir()):
            path.chmod(0o777)
        mapped = ("--map-root-user",) if "ENROOT_REMAP_ROOT" in environment else _AS_HIMSELF
        return self.namespace.run(
            "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups",
            "unshare", "--user", *mapped, "--mount", "--propagation=private",
            "bash", "-c", _START, "enroot", self.root, self.work,
            ":".join(map(str, self.hooks)), *words, env={**self.env, **environment},
        )  # fmt: skip
