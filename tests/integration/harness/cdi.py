"""A generated CDI spec, and a bundle that is changed as an engine does for this spec."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuhook.core.cdi import apply, folders
from gpuhook.core.cdi.document import read
from harness.bundles import Bundle, Spec
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation

CDI = Path("/etc/cdi")  # every engine reads it; the session has an /etc of its own
KIND = "nvidia.com/gpu"
KERNEL = "test.example/kernel=driver"
# A hook for createRuntime, which mounts a folder on /proc/driver of the container.
_KERNEL_HOOK = """
import json, os, subprocess, sys
state = json.load(sys.stdin)
with open(state["bundle"] + "/config.json") as config:
    root = json.load(config)["root"]["path"]  # perhaps relative to the bundle
place = os.path.join(state["bundle"], root, "proc/driver")
enter = ["nsenter", "-t", str(state["pid"]), "-m"]
subprocess.run([*enter, "mount", "--bind", sys.argv[1], place], check=True)
"""


def generate(installation: Installation, config: Path, output: Path, *options: str) -> Path:
    """Write the CDI spec for a configuration into a folder; return its file."""
    words: list[str | Path] = [installation.command, "cdi", "generate", "--config", config]
    run([*words, "--output", output, *options]).ok()
    return output / "nvidia.com-gpu.yaml"


def give(bundle: Bundle, document: Path, *devices: str, mounted: bool = False) -> None:
    """Change config.json as an engine does for these devices of a CDI spec.

    With ``mounted``, device nodes are mounted, as rootless engines have to do it.
    """
    found = folders.read_folders([str(document.parent)])
    edits = apply.resolve(found, [f"{KIND}={device}" for device in devices])

    def mutate(spec: Spec) -> None:
        spec.update(apply.apply(spec, edits))
        for node in edits["deviceNodes"] if mounted else ():
            source = node.get("hostPath", node["path"])
            entry = {"source": source, "destination": node["path"], "options": ["bind"]}
            spec["mounts"].append(entry)
        if mounted:
            del spec["linux"]["devices"]

    bundle.change(mutate)


@contextmanager
def read_by_engines(*documents: Path) -> Iterator[None]:
    """Copy CDI specs to the folder that every engine reads, until the end of the block."""
    CDI.mkdir(exist_ok=True)
    for document in documents:
        shutil.copy(document, CDI)
    yield
    for document in documents:
        (CDI / document.name).unlink()


def with_mounted_nodes(document: Path, kind: str = KIND) -> str:
    """Return the text of a CDI spec with mounts instead of device nodes, and with that kind.

    crun without root takes nodes from the host's own /dev, which lacks a simulated driver's
    nodes.
    """
    made = read(document.read_bytes()).document
    assert made is not None
    for part in (made, *made["devices"]):
        edits = part["containerEdits"]
        for node in edits.pop("deviceNodes"):
            entry = {"hostPath": node["hostPath"], "containerPath": node["path"]}
            edits.setdefault("mounts", []).append({**entry, "options": ["bind", "rw"]})
    return json.dumps({**made, "kind": kind})


def write_kernel(driver: Driver, folder: Path, python: str = sys.executable) -> Path:
    """Write a CDI spec whose device shows the driver in a container's /proc; return its file.

    A kernel with the driver shows it in every procfs, but this host's kernel lacks the driver.
    """
    path = folder / "kernel.json"
    args = [python, "-c", _KERNEL_HOOK, str(driver.root / "proc/driver")]
    environment = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    hook = {"hookName": "createRuntime", "path": python, "args": args, "env": environment}
    kind, _, name = KERNEL.partition("=")
    device = {"name": name, "containerEdits": {"hooks": [hook]}}
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": [device]}))
    return path
