"""podman with a vendor's devices, by gpuhook's hook or by a CDI spec that podman reads."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.commands import Result, path_of, run
from harness.engines import settings
from harness.images import image
from harness.namespaces import Namespace
from harness.podman import Podman, hooks_dir, podman
from harness.vendors import Devices

_CDI = Path("/etc/cdi")  # the session has an /etc of its own


@contextmanager
def podman_with_hook(
    found: Devices, config: Path, folder: Path, namespace: Namespace, images: Path
) -> Iterator[Podman]:
    """Start a podman that calls the hook, with this configuration, for every container."""
    args = ("--config", str(config), "prestart")
    hooks = hooks_dir(folder.with_name(f"{folder.name}-hooks"), found.installation.hook, *args)
    with podman(folder, namespace, path_of("runc"), images, hooks=hooks) as made:
        yield made


@contextmanager
def documents(found: Devices, config: Path, folder: Path, kind: str) -> Iterator[Path]:
    """Give engines a CDI spec of the vendor's devices; ``kind`` is the devices' kind."""
    words: list[str | Path] = [found.installation.command, "cdi", "generate"]
    run([*words, "--config", config, "--output", folder]).ok()
    document = folder / f"{kind.replace('/', '-')}.yaml"
    _CDI.mkdir(exist_ok=True)
    shutil.copy(document, _CDI)
    try:
        yield document
    finally:
        (_CDI / document.name).unlink()


def run_with(engine: Podman, command: Sequence[str], *devices: str) -> Result:
    """Run a command in a container with these CDI devices."""
    return engine.run(image("debian"), *command, options=settings("--device", devices))
