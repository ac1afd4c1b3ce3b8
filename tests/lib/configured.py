"""The shared cases about ``runtime configure``, for each program that has the command."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result


def check(case: dict[str, Any], folder: Path, configure: Callable[..., Result]) -> None:
    """Run a case with all files in its own folder; AssertionError if the results differ from it."""
    given, expected = case["input"], case["expected"]
    config, drop_in = folder / "config", folder / "conf.d" / "99-nvidia.toml"
    text = given.get("config")
    if text is not None:
        config.write_text(text if isinstance(text, str) else json.dumps(text))
    words = [*given["args"], f"--config={config}", f"--state-dir={folder}/state"]
    words += ["--runtime-path=/bin/true"]
    if given["args"][1] != "docker":
        words.append(f"--drop-in-config={drop_in}")
    done = configure(*words)
    if "error_contains" in expected:
        assert expected["error_contains"].lower() in str(done.exception).lower()
        return
    assert done.exit_code == 0, done.output
    assert config.exists() is expected.get("main_config_exists", True)
    if "top_level" in expected:
        top = expected["top_level"].replace("/etc/containerd/conf.d", str(drop_in.parent))
        assert tomllib.loads(config.read_text()) == tomllib.loads(top)
    for line in expected.get("dropin_contains", []):
        assert line.replace("/usr/bin/nvidia-container-runtime", "/bin/true") in drop_in.read_text()
    if "runtimes" in expected:
        assert list(json.loads(config.read_text())["runtimes"]) == expected["runtimes"]
    if "default-runtime" in expected:
        assert expected.items() <= json.loads(config.read_text()).items()
