"""Wrappers of HPC sites that Debian hasn't: what they do with our files, by their documentation.

podman-hpc puts a module's ``additional_args`` behind ``podman run`` (its siteconfig.py); Sarus puts
hook files into the bundle that runc runs. Both are stood in for; podman and runc are real.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.bundles import Bundle, GpuBundle
from harness.commands import Result, run
from harness.driver import Driver, lines_of_nvidia_smi
from harness.images import image
from harness.installation import Installation
from harness.podman import Podman
from harness.standing import ONE

SMI = ("nvidia-smi", "-L")
ASK = "NVIDIA_VISIBLE_DEVICES"
LIMITS = ("--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
          "--pids-limit=-1")  # fmt: skip


@pytest.fixture
def prefix(workspace: Path, tmp_path: Path) -> Path:
    """A folder to use as /, in a place that is root's all the way."""
    made = workspace / f"hpc-{tmp_path.name}"
    made.mkdir(mode=0o755)
    return made


class Site:
    """Installs for one of them below a prefix, and takes everything back."""

    def __init__(self, installation: Installation, engine: str, prefix: Path) -> None:
        self._command = installation.command
        self._words = (f"--engine={engine}", f"--prefix={prefix}", f"--state-dir={prefix}/state")
        self.program = f"--runtime-path={installation.runtime}"

    def install(self, *words: str, env: dict[str, str] | None = None) -> Result:
        return run([self._command, "install", *self._words, self.program, *words], env=env)

    def uninstall(self) -> None:
        run([self._command, "uninstall", *self._words]).ok()


# podman-hpc ----------------------------------------------------------------------------------


@pytest.fixture
def module(installation: Installation, prefix: Path) -> Iterator[dict[str, Any]]:
    """The module --gpu as podman-hpc reads it, in the place of the one that comes with it."""
    place = prefix / "etc/podman_hpc/modules.d/gpu.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("name: gpu\nenv: THEIRS\n")
    site = Site(installation, "podman-hpc", prefix)
    site.install().ok()
    yield yaml.safe_load(place.read_text())
    site.uninstall()
    assert place.read_text() == "name: gpu\nenv: THEIRS\n"


def hpc(podman: Podman, module: dict[str, Any], env: dict[str, str], *words: str) -> Result:
    """Do as ``podman-hpc run --gpu`` does."""
    given = (*module["additional_args"], "-e", f"{module['env']}=1")
    return podman.call("run", "--rm", *LIMITS, *given, image("debian"), *words, env=env)


def test_podman_hpcs_gpus(
    podman_hook_runc: Podman, podman_config: Path, module: dict[str, Any], driver: Driver
) -> None:
    assert (module["name"], module["cli_arg"]) == ("gpu", "gpu")
    plain = dataclasses.replace(podman_hook_runc, hooks=None)  # and no runtime of ours
    for env, chosen in (({}, driver.gpus), ({ASK: "1,2"}, driver.chosen(1, 2))):
        done = hpc(plain, module, env, *SMI).ok()
        assert done.stdout.splitlines() == lines_of_nvidia_smi(chosen)
    done = hpc(plain, module, {}, "sh", "-c", "echo $ENABLE_GPU").ok()
    assert done.stdout == "1\n"


# Sarus ---------------------------------------------------------------------------------------


@pytest.fixture
def sarus(prefix: Path, installation: Installation) -> Iterator[Site]:
    """Sarus' configuration with an empty folder of hooks."""
    settings = prefix / "opt/sarus/default/etc/sarus.json"
    (settings.parent / "hooks.d").mkdir(parents=True)
    hooks = "/opt/sarus/default/etc/hooks.d"
    settings.write_text(json.dumps({"hooksDir": hooks, "runcPath": "/usr/bin/runc"}))
    site = Site(installation, "sarus", prefix)
    yield site
    site.uninstall()
    assert os.listdir(settings.parent / "hooks.d") == []


def start(bundle: Bundle, hooks: Path, *environ: str) -> Result:
    """Do as Sarus does with a bundle and the files in its folder of hooks."""
    for file in sorted(hooks.glob("*.json")):
        for place in (file, *file.parents):
            found = place.stat()
            assert (found.st_uid, found.st_mode & 0o022) == (0, 0), place
        hook = json.loads(file.read_text())
        assert (hook["version"], hook["when"]) == ("1.0.0", {"always": True})
        added = {stage: [hook["hook"]] for stage in hook["stages"]}
        spec = bundle.spec()
        bundle.config.write_text(json.dumps({**spec, "hooks": added}))
    bundle.environ(*environ)
    return bundle.run("runc")


@ONE
def test_saruss_hook(bundle: GpuBundle, sarus: Site, prefix: Path, driver: Driver) -> None:
    sarus.install(env={"GPUHOOK_CONFIG": str(bundle.settings)}).ok()
    bundle.command(*SMI)
    hooks = prefix / "opt/sarus/default/etc/hooks.d"
    done = start(bundle, hooks, f"{ASK}=1,2").ok()  # Sarus makes it of CUDA_VISIBLE_DEVICES
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1, 2))


def test_what_sarus_would_refuse_is_refused(sarus: Site, prefix: Path) -> None:
    hooks = prefix / "opt/sarus/default/etc/hooks.d"
    for mode, owner in ((0o775, 0), (0o757, 0), (0o1777, 0), (0o755, 1000)):
        hooks.chmod(mode)
        os.chown(hooks, owner, 0)
        done = sarus.install().failed()
        assert f"Users other than root can change {hooks}" in done.stderr
        assert os.listdir(hooks) == []
    hooks.chmod(0o755)
    os.chown(hooks, 0, 0)
    settings = prefix / "opt/sarus/default/etc/sarus.json"
    settings.write_text("{}")
    assert "has no folder of hooks (hooksDir)" in sarus.install().failed().stderr
