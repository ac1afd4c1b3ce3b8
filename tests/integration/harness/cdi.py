"""A CDI document of ours, and a bundle as an engine makes it of that."""

import os
from pathlib import Path
from typing import Any

import yaml

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
    made = yaml.safe_load(document.read_text())
    by_name = {device["name"]: device["containerEdits"] for device in made["devices"]}

    def mutate(spec: Spec) -> None:
        for edits in (made["containerEdits"], *(by_name[name] for name in devices)):
            _apply(spec, edits, mounted=mounted)

    bundle.change(mutate)


def _apply(spec: Spec, edits: dict[str, Any], *, mounted: bool) -> None:
    linux = spec["linux"]
    spec["process"]["env"] += edits.get("env", [])
    for node in edits.get("deviceNodes", []):
        source = node.get("hostPath", node["path"])
        device = os.stat(source).st_rdev
        numbers = {"major": os.major(device), "minor": os.minor(device)}
        if mounted:
            entry = {"source": source, "destination": node["path"], "options": ["bind"]}
            spec["mounts"].append(entry)
        else:
            entry = {"path": node["path"], "type": "c", **numbers}
            linux.setdefault("devices", []).append(entry)
        rule = {"allow": True, "type": "c", **numbers, "access": node["permissions"]}
        linux["resources"]["devices"].append(rule)
    for mount in edits.get("mounts", []):
        entry = {"source": mount["hostPath"], "destination": mount["containerPath"]}
        spec["mounts"].append({**entry, "type": "bind", "options": mount["options"]})
    for hook in edits.get("hooks", []):
        entry = {key: hook[key] for key in ("path", "args", "env")}
        spec.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)
