"""Sequences of gpuhook install and uninstall, on files that stand for a system."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

ENGINES = (
    "docker", "containerd", "crio", "podman", "enroot", "charliecloud", "podman-hpc",
)  # fmt: skip
# Engines' files as an administrator may have them; a folder stands for an engine without a file.
TEXTS = {
    "etc/docker/daemon.json": (
        "",
        '{"log-driver": "json-file"}\n',
        '{\r\n  "debug": true\r\n}\r\n',
    ),
    "etc/docker/other.json": ('{"runtimes": {"nvidia": {"path": "/usr/bin/nvidia"}}}',),
    "etc/containerd/config.toml": (
        "",
        'version = 2\n# mine\nimports = ["/etc/containerd/conf.d/*.toml"]\n',
        'version = 3\r\n[debug]\r\n  level = "info"\r\n',
        '[plugins.cri.containerd]\ndefault_runtime_name = "crun"\n',
        "\ufeffversion = 2\n[grpc]\n  gid = 0 # root's\n",
    ),
    "etc/containerd/conf.d/10.toml": ("version = 2\n",),
    "etc/crio/crio.conf": ("", '[crio.runtime]\ndefault_runtime = "crun"\n'),
    "etc/crio/crio.conf.d/10-x.conf": ("",),
    "etc/containers/containers.conf": ('[engine]\nruntime = "crun"\n',),
    "etc/containers/oci/hooks.d/other.json": ("{}",),
    "etc/enroot/hooks.d/98-nvidia.sh": ("#!/bin/sh\nexit 0\n",),
    "etc/podman_hpc/modules.d/gpu.yaml": ("name: gpu\n",),
    "etc/cdi/other.yaml": ("",),
    "etc/systemd/system/other.service": ("",),
    "etc/profile.d/other.sh": ("",),
    "usr/local/bin/other": ("",),
    "opt/names/nvidia-ctk": ("",),
    "run/other": ("",),
    "var/run/other": ("",),
    "var/lib/gpuhook/other": ("",),
}
_OPTIONS = (
    ("--set-default", "--no-set-default"),
    ("--nvidia-names", "--no-nvidia-names"),
    ("--cdi", "--no-cdi"),
    ("--hook=prestart", "--hook=precreate", "--hook=none"),
    ("--runtime-name=other",),
    ("--bin-dir=/opt/names",),
)
_FILES = {
    "docker": "etc/docker/other.json",
    "containerd": "etc/containerd/other.toml",
    "crio": "etc/crio/other/crio.conf",
    "podman": "etc/containers/containers.conf.d/zz.conf",
}


def systems() -> st.SearchStrategy[dict[str, str]]:
    """Return texts by the path of a file, as there may be some before gpuhook is installed."""
    files = {path: st.sampled_from(texts) for path, texts in TEXTS.items()}
    return st.fixed_dictionaries({}, optional=files)


def commands(*more: str, also: Sequence[list[str]] = ()) -> st.SearchStrategy[list[list[str]]]:
    """Return the words of commands in turn.

    ``more`` are options that need devices, ``also`` whole commands.
    """
    options = [*_OPTIONS, more] if more else _OPTIONS
    chosen = st.tuples(*(st.sampled_from(("", "", *words)) for words in options))
    engines = st.lists(st.sampled_from(ENGINES), max_size=3, unique=True)
    install = st.builds(
        _install, engines, chosen, st.sampled_from(("", "", "config", "drop-in-config"))
    )
    uninstall = st.builds(_uninstall, engines, st.booleans())
    kinds = [install, install, uninstall, *map(st.just, also)]
    return st.lists(st.one_of(kinds), min_size=1, max_size=6)


def _install(engines: list[str], options: tuple[str, ...], file: str) -> list[str]:
    words = ["install", *(f"--engine={name}" for name in engines), *filter(None, options)]
    if file and len(engines) == 1 and engines[0] in _FILES:
        words.append(f"--{file}=PREFIX/{_FILES[engines[0]]}")
    return words


def _uninstall(engines: list[str], of_file: bool) -> list[str]:
    words = ["uninstall", *(f"--engine={name}" for name in engines)]
    if of_file and engines and engines[0] in _FILES:
        words.append(f"--config=PREFIX/{_FILES[engines[0]]}")
    return words


def write(system: Path, texts: dict[str, str]) -> None:
    """Write a system's files."""
    for path, text in texts.items():
        (system / path).parent.mkdir(parents=True, exist_ok=True)
        (system / path).write_bytes(text.encode())


def content(system: Path) -> dict[str, object]:
    """Return every folder, file and link below a system's root, with its mode."""
    found: dict[str, object] = {}
    for path in system.rglob("*"):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            found[str(path)] = os.readlink(path)
        elif stat.S_ISDIR(status.st_mode):
            found[str(path)] = mode
        else:
            found[str(path)] = (mode, path.read_bytes())
    return found
