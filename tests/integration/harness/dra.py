"""``gpuhook dra`` with a test kubelet, and claims that are files in a folder."""

import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dra_kubelet import Claim, DraKubelet
from dra_program import KILL

from harness.commands import Process, daemon
from harness.installation import Installation, write_config
from harness.namespaces import Namespace

NODE = "n1"
# Code that finds the same modules as the tests' own process.
CODE = f"import sys; sys.path[:] = {sys.path}; from dra_program import main; main()"
GPU_DRIVER = "gpu.nvidia.com"


def slice_name(gpu: str) -> str:
    """Return the name under which a GPU with this UUID is published."""
    return f"gpu-{gpu.removeprefix('GPU-').lower()}"


def result(device: str, request: str = "gpu", driver: str = GPU_DRIVER, **more: Any) -> Any:
    """Return the entry for one device in a claim's allocation."""
    return {"request": request, "driver": driver, "pool": NODE, "device": device, **more}


@dataclass
class Node:
    """A node: the kubelet, the claims, and ``gpuhook dra``, which tests start several times.

    The service counts as ready once all ``drivers`` are registered.
    """

    folder: Path
    installation: Installation
    config: Path
    drivers: tuple[str, ...] = (GPU_DRIVER,)
    more: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0
    namespace: Namespace | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.claims.mkdir()
        self.cdi.mkdir()
        self.kubelet = DraKubelet(self.folder)

    @property
    def claims(self) -> Path:
        return self.folder / "claims"

    @property
    def cdi(self) -> Path:
        return self.folder / "cdi"

    @property
    def records(self) -> Path:
        return self.config.parent / "state/devices"

    @property
    def log(self) -> str:
        """Return the messages of the service since its last start."""
        return (self.folder / f"log-{self.starts}").read_text()

    def claim(
        self, name: str, *results: Any, uid: str = "", namespace: str = "ns", **more: Any
    ) -> Claim:
        """Add an allocated claim to the cluster; return the kubelet's name for it."""
        uid = uid or str(uuid.uuid4())
        config = more.pop("config", [])
        devices = {"results": [*results], "config": config}
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
            "status": {"allocation": {"devices": devices}},
            **more,
        }
        (self.claims / f"{namespace}_{name}.json").write_text(json.dumps(claim))
        return Claim(namespace, name, uid)

    def forget(self, claim: Claim) -> None:
        """Delete a claim from the cluster."""
        (self.claims / f"{claim.namespace}_{claim.name}.json").unlink()

    @contextmanager
    def killed(self, verb: str, point: int) -> Iterator[None]:
        """Kill each killable service during the block, before a certain change of a file.

        ``verb`` is the work in which the service is killed. ``point`` is the number of the
        change, counted from 1.
        """
        told = self.claims / KILL
        told.with_suffix(".new").write_text(f"{verb} {point}")
        told.with_suffix(".new").rename(told)
        try:
            yield
        finally:
            told.unlink()

    def options(self) -> dict[str, str]:
        """Return the folders that the service gets as options."""
        return {
            "plugins": str(self.kubelet.plugins),
            "registry": str(self.kubelet.registry),
            "cdi_folder": str(self.cdi),
        }

    @contextmanager
    def service(
        self,
        ready: Callable[[], bool] | None = None,
        instance: str = "",
        options: Mapping[str, str] | None = None,
        **words: Any,
    ) -> Iterator[Process]:
        """Run ``gpuhook dra`` until the end of the block."""
        self.starts += 1
        told = {
            "program": str(self.installation.command),
            "config": str(self.config),
            "claims": str(self.claims),
            "node": NODE,
            "options": {**self.options(), "instance": instance, **(options or {})},
            **self.more,
            **words,
        }
        before = {each: {id(one) for one in self.kubelet.instances(each)} for each in self.drivers}

        def registered() -> bool:
            return all(
                any(id(one) not in before[each] for one in self.kubelet.instances(each))
                for each in self.drivers
            )

        argv: list[str | Path] = [sys.executable, "-c", CODE, json.dumps(told)]
        if self.namespace is not None:
            argv = [*self.namespace.enter(*argv)]
        log = self.folder / f"log-{self.starts}"
        with daemon(argv, log, ready or registered) as process:
            yield process

    def documents(self) -> list[Path]:
        """Return the CDI specs of claims."""
        return sorted(self.cdi.iterdir())

    def written(self) -> list[Path]:
        """Return the records of claims."""
        return sorted(self.records.glob("claim_*.json"))

    def left(self) -> list[str]:
        """Return the names of all files of claims, including temporary ones."""
        names = [*self.documents(), *(each for each in self.records.iterdir() if each.is_file())]
        return sorted(each.name for each in names if each.name != "lock")

    def document(self, claim: Claim) -> Any:
        """Return the CDI spec of a claim."""
        found = [each for each in self.documents() if claim.uid in each.name]
        assert len(found) == 1, found
        return json.loads(found[0].read_text())


def nodes_of(document: Any, name: str) -> set[str]:
    """Return the device nodes for CUDA in a CDI spec, for a device by its qualified name."""
    kind, _, device = name.partition("=")
    assert document["kind"] == kind
    edits = [each["containerEdits"] for each in document["devices"] if each["name"] == device]
    assert len(edits) == 1, document
    every = {node["path"] for node in edits[0].get("deviceNodes", ())}
    return {path for path in every if not path.startswith("/dev/dri/")}


@contextmanager
def one_node(
    workspace: Path, installation: Installation, root: Path, **more: Any
) -> Iterator[Node]:
    """Run the kubelet of a node until the end of the block.

    Its sockets have a short path, and their folders belong to root.
    """
    folder = workspace / f"d{uuid.uuid4().hex[:8]}"
    config = write_config(folder.with_suffix(".etc"), root, ["runc"])
    made = Node(folder, installation, config, more=more)
    with made.kubelet:
        yield made
