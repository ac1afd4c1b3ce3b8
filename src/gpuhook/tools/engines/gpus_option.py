"""The option ``--gpus`` of engines: whether a version serves it by CDI specs or by programs.

Docker before 29.2 and ctr before 2.3 call a program with NVIDIA's name. Later versions, and podman,
use CDI specs. Sources: moby's daemon/nvidia_linux.go, containerd's cmd/ctr and podman-run(1).
"""

from gpuhook.core.cdi import versions

# Engine -> its first version that serves --gpus by CDI specs.
_BY_CDI = {"docker": "29.2", "containerd": "2.3", "podman": "5.0"}
# Engines without --gpus before that version.
_NONE_BEFORE = ("podman",)


def is_by_cdi(engine: str, version: str | None) -> bool:
    """Tell whether this version serves --gpus by CDI specs; an unknown one doesn't."""
    first = _BY_CDI.get(engine)
    return first is not None and version is not None and not versions.is_below(version, first)


def missing(engine: str, version: str | None) -> str:
    """Return a sentence if this version has no --gpus at all, else ""."""
    if engine not in _NONE_BEFORE or version is None or is_by_cdi(engine, version):
        return ""
    return f"{engine} {version} has no --gpus, which needs {engine} {_BY_CDI[engine]}"
