"""A CDI document of ours, and a bundle as an engine makes it of that."""

from pathlib import Path
from typing import Any

import yaml

from harness.bundles import Bundle, Spec
from harness.commands import run
from harness.installation import Installation

KIND = "nvidia.com/gpu"


def generate(installation: Installation, config: Path, output: Path, *options: str) -> Path:
    """Write the document of a configuration's machine into a folder; return its file."""
    words = ["cdi", "generate", "--config", config, "--output", output, *options]
    run([installation.command, *words]).ok()
    return output / "nvidia.com-gpu.yaml"


def give(bundle: Bundle, document: Path, *devices: str) -> None:
    """Put into config.json what an engine does for these devices of a document."""
    made = yaml.safe_load(document.read_text())
    by_name = {device["name"]: device["containerEdits"] for device in made["devices"]}
    every = [made["containerEdits"], *(by_name[name] for name in devices)]
    bundle.change(lambda spec: [_apply(spec, edits) for edits in every])


def _apply(spec: Spec, edits: dict[str, Any]) -> None:
    linux = spec["linux"]
    spec["process"]["env"] += edits.get("env", [])
    for node in edits.get("deviceNodes", []):
        status = Path(node.get("hostPath", node["path"])).stat()
        numbers = {"major": status.st_rdev >> 8, "minor": status.st_rdev & 0xFF}
        linux.setdefault("devices", []).append({"path": node["path"], "type": "c", **numbers})
        rule = {"allow": True, "type": "c", **numbers, "access": node["permissions"]}
        linux["resources"]["devices"].append(rule)
    for mount in edits.get("mounts", []):
        entry = {"source": mount["hostPath"], "destination": mount["containerPath"]}
        spec["mounts"].append({**entry, "type": "bind", "options": mount["options"]})
    for hook in edits.get("hooks", []):
        entry = {key: hook[key] for key in ("path", "args", "env")}
        spec.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)
