"""A containerd for the tests, driven by ctr with gpu-py as its runtime binary."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ran

from harness.bundles import CGROUP_PARENT
from harness.commands import Result, daemon
from harness.engines import settings
from harness.images import image
from harness.namespaces import Namespace, host_cgroups

_COMMON = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
{plugins}
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
# Or an idle one looks for garbage 200 times a second.
[plugins."io.containerd.gc.v1.scheduler"]
  pause_threshold = 0.0
"""
WITHOUT_CRI = _COMMON.replace("{plugins}", 'disabled_plugins = ["io.containerd.grpc.v1.cri"]')
# For the CRI with CDI, which containerd 2 enables by default.
WITH_CDI = (
    _COMMON.replace("{plugins}", "")
    + """\
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
"""
)
# For the CRI with runc, and with gpu-py as an additional handler.
WITH_HANDLERS = (
    _COMMON.replace("{plugins}", "")
    + """\
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu-py.options]
      BinaryName = "{binary}"
"""
)


PAUSE = image("pause")
CRI = "io.containerd.grpc.v1.cri"
# Version of the settings that containerd prints -> the plugin that has the CRI's runtimes.
# containerd 1.x prints version 2, 2.x prints version 3, and 2.3 prints version 4, whatever version
# the file has.
RUNTIMES = {2: CRI, 3: "io.containerd.cri.v1.runtime", 4: "io.containerd.cri.v1.runtime"}


@dataclass(frozen=True)
class Containerd:
    """A running containerd; ``binary`` is the runtime with which ``run`` starts containers.

    Its command line, ctr, runs in the namespace ``space``.
    """

    folder: Path
    pid: int | None
    binary: Path
    space: Namespace = field(default_factory=lambda: Namespace(host_cgroups()))
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def shows_errors_of_hooks(self) -> bool:
        """Return whether the user sees the messages of a failed hook."""
        return True

    @property
    def takes_cdi(self) -> bool:
        """Return whether ctr --gpus means CDI devices, as in 2.3 and newer."""
        version = ran.number(self.space.run("ctr", "--version").ok().stdout)
        return [int(each) for each in version.split(".")[:2]] >= [2, 3]

    def call(self, *words: str | Path, within: str = CGROUP_PARENT.strip("/")) -> Result:
        """Run ctr against this daemon, within one of containerd's own namespaces."""
        address = [f"--address={self.folder}/containerd.sock", f"--namespace={within}"]
        return self.space.run("ctr", *address, *words)

    def run(
        self,
        image: str,
        *command: str,
        env: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Result:
        """Run ``command`` in a container of ``image`` that is deleted afterwards.

        ``stdout`` of the result also has what the command prints to standard error.
        """
        name = f"container{next(self._ids)}"
        # On a busy host, ctr itself may close its pipes before it has read them.
        output = self.folder / f"{name}.output"
        words = [f"--runc-binary={self.binary}", f"--log-uri=file://{output}"]
        words += [*settings("--env", env), *options]
        done = self.call("run", "--rm", *words, image, name, *command)
        if done.status != 0:
            self.call("container", "rm", name)
            self.call("snapshots", "rm", name)
        if output.exists():
            done = replace(done, stdout=done.stdout + output.read_text(errors="replace"))
            output.unlink()
        return done


@contextmanager
def containerd(
    folder: Path,
    namespace: Namespace,
    binary: Path,
    images: Path | None,
    env: Mapping[str, str],
    text: str = WITHOUT_CRI,
    within: Sequence[str] = (),
) -> Iterator[Containerd]:
    """Start containerd below ``folder`` and import ``images``, an archive as docker save writes.

    ``binary`` is the runtime for containers. ``env`` is added to the daemon's environment.
    ``text`` is its configuration, and ``within`` is a command that starts it.
    """
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(text.format(folder=folder, pause=PAUSE, binary=binary))
    client = Containerd(folder, None, binary, namespace)
    argv = namespace.enter(*within, "containerd", "--config", config)
    with daemon(argv, folder / "log", lambda: client.call("version").status == 0, env) as process:
        if images is not None:
            client.call("images", "import", images).ok()
        yield Containerd(folder, process.pid, binary, namespace)


def runtimes_of(dump: dict[str, Any]) -> dict[str, Any]:
    """Return containerd's settings for runtimes from the output of `containerd config dump`."""
    settings: dict[str, Any] = dump["plugins"][RUNTIMES[dump["version"]]]["containerd"]
    return settings


def same_as_runc(ours: dict[str, Any], runc: dict[str, Any]) -> None:
    """Fail if the settings for our runtime differ from those for runc in more than the program."""
    options = dict(ours["options"])
    assert os.path.basename(options.pop("BinaryName")) == "gpu-py"
    # containerd 2 prints its defaults for its built-in runc, and for no other runtime.
    assert options.items() <= runc["options"].items()
    given = {name for name, value in runc["options"].items() if value}
    assert given - {"BinaryName"} <= options.keys()
    defaults = {"sandboxer": "podsandbox"} if ours.get("sandboxer") == "" else {}
    assert {**ours, **defaults, "options": None} == {**runc, "options": None}
