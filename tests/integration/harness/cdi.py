"""A CDI document of ours, and a bundle as an engine makes it of that."""

from pathlib import Path

from gpuhook.cdi import apply, folders
from harness.bundles import Bundle, Spec
from harness.commands import run
from harness.installation import Installation

KIND = "nvidia.com/gpu"


def generate(installation: Installation, config: Path, output: Path, *options: str) -> Path:
    """Write the document of a configuration's machine into a folder; return its file."""
    words: list[str | Path] = [installation.command, "cdi", "generate", "--config", config]
    run([*words, "--output", output, *options]).ok()
    return output / "nvidia.com-gpu.yaml"


def give(bundle: Bundle, document: Path, *devices: str, mounted: bool = False) -> None:
    """Put into config.json what an engine does for these devices of a document.

    With ``mounted``, nodes are mounted, as rootless engines have to do it.
    """
    found = folders.look([str(document.parent)])
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
