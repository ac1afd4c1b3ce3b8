"""An engine with NRI enabled, and gpuhook's plugin for it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import images
from harness.commands import Process, Result, background, stop, wait_until
from harness.containerd import WITH_CDI, Containerd, containerd
from harness.cri import Cri
from harness.driver import Driver
from harness.forked import PROGRAM
from harness.images import image
from harness.installation import Installation
from harness.releases import Release, release

DEBIAN = image("debian")
WITH_NRI = (
    WITH_CDI
    + """\
[plugins."io.containerd.nri.v1.nri"]
  disable = false
  socket_path = "{folder}/nri.sock"
  plugin_path = "{folder}/plugins"
  plugin_config_path = "{folder}/conf.d"
"""
)
_RUNC = """\
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""
_HANDLER = """\
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
    BinaryName = "{program}"
"""


@dataclass
class Node:
    """A release with its containerd, and methods that start the plugin for it."""

    system: Release
    engine: Containerd
    cri: Cri
    folder: Path

    def start(self, *words: str) -> Process:
        """Start the plugin; return once it serves the engine."""
        theirs = self.system.installation
        argv = [sys.executable, "-c", PROGRAM, str(theirs.command), "nri"]
        argv += [f"--socket={self.engine.folder}/nri.sock", f"--config={self.system.config}"]
        argv += [f"--hook-path={theirs.bin}/gpuhook-cdi-hook", *words]
        self.log = self.folder / "nri.log"
        self.log.write_text("")
        process = background(argv, self.log)
        try:
            self.serves(1)
        except BaseException:
            stop(process)
            raise
        return process

    def serves(self, times: int) -> None:
        """Wait until the plugin has been configured that many times."""

        def met() -> bool:
            return self.log.read_text().count("Serves containerd") >= times

        try:
            wait_until(met, f"the plugin to be configured {times} times")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    @contextmanager
    def plugin(self, *words: str) -> Iterator[Process]:
        """Run the plugin until the end of the block."""
        process = self.start(*words)
        try:
            yield process
        finally:
            if process.poll() is None:
                stop(process)
            print(self.log.read_text())  # noqa: T201 - for who reads why a test failed

    def inside(
        self,
        *env: str,
        command: Sequence[str] = ("true",),
        handler: str = "",
        made_of: str = DEBIAN,
        **pod: object,
    ) -> Result:
        """Return a command's result in a container with these variables.

        Raise CriError if the engine refuses the container.
        """
        with self.cri.pod(handler, **pod) as made:  # type: ignore[arg-type]
            return made.start(made_of, "sleep", "1000", env=env).exec(*command)


@contextmanager
def running(
    name: str,
    lower: Path,
    folder: Path,
    installation: Installation,
    driver: Driver,
    hold: dict[str, Path],
    archives: Sequence[Path],
    handlers: Sequence[str] = (),
) -> Iterator[Node]:
    """Run a release's containerd, with plain runc as its runtime, until the end of the block.

    ``hold`` has the root for the sandbox containers of pods. Each of ``handlers`` becomes a
    RuntimeClass. Its runtime is a program of that name in the release's folder ``handlers``.
    """
    hold_archive = images.save(hold, folder.with_suffix(".tar"), ("sleep", "infinity"))
    with release(name, lower, folder, installation, driver) as system:
        runc = Path(system.which("runc"))
        programs = folder / "handlers"
        programs.mkdir()
        text = WITH_NRI + (_RUNC if handlers else "")
        text += "".join(_HANDLER.format(name=each, program=programs / each) for each in handlers)
        with containerd(
            folder / "containerd", system.namespace, runc, archives[0], {}, text
        ) as engine:
            for each in (*archives, hold_archive):
                engine.call("images", "import", each, within="k8s.io").ok()
            cri = Cri(engine.folder / "containerd.sock")
            try:
                yield Node(system, engine, cri, folder)
            finally:
                cri.close()
