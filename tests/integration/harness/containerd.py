"""A containerd of our own, driven by ctr with gpu-py as its runtime binary."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.bundles import CGROUP_PARENT
from harness.commands import Result, daemon, run
from harness.engines import settings
from harness.namespaces import Namespace

CONFIG = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
"""


@dataclass(frozen=True)
class Containerd:
    """A running containerd; ``binary`` is the runtime that ``run`` starts containers with."""

    folder: Path
    pid: int | None
    binary: Path
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def shows_errors_of_hooks(self) -> bool:
        """Whether the user is told what a hook that failed said."""
        return True

    def call(self, *words: str | Path) -> Result:
        """Run ctr against this daemon."""
        address = [f"--address={self.folder}/containerd.sock"]
        address += [f"--namespace={CGROUP_PARENT.strip('/')}"]
        return run(["ctr", *address, *words])

    def run(
        self,
        image: str,
        *command: str,
        env: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Result:
        """Run ``command`` in a container of ``image`` that is deleted afterwards.

        What it prints to standard error is in ``stdout``, too.
        """
        name = f"container{next(self._ids)}"
        # On a busy machine, ctr itself may close its pipes before it has read them.
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
    images: Path,
    env: Mapping[str, str],
) -> Iterator[Containerd]:
    """Start containerd below ``folder`` and import ``images``, an archive as docker save writes.

    ``binary`` is the runtime for containers; ``env`` is added to the daemon's environment.
    """
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(CONFIG.format(folder=folder))
    client = Containerd(folder, None, binary)
    argv = namespace.enter("containerd", "--config", config)
    with daemon(argv, folder / "log", lambda: client.call("version").status == 0, env) as process:
        client.call("images", "import", images).ok()
        yield Containerd(folder, process.pid, binary)
