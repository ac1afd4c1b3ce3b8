"""Checks of a containerd whose file a distribution writes: gpu-py must be in the file's source."""

import os
import re
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.base.errors import shown
from gpuhook.tools.doctor.docker import is_gpu_py
from gpuhook.tools.doctor.engine_files import imports, programs_of, strings, toml
from gpuhook.tools.doctor.finding import Finding, failure, warning
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.engines import distributions, placeholders
from gpuhook.tools.engines.distributions import Distribution

_CHECK = "containerd-file"
_PROGRAM = re.compile(r"""^[^#\n]*\bBinaryName\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)


def owner_of(machine: Machine, path: str) -> Distribution | None:
    """Return the distribution that writes containerd's file, None if the administrator does."""
    return distributions.of_file(path, machine.text)


def literal(machine: Machine, files: list[str], install: str) -> Iterator[Finding]:
    """Find placeholders in files that containerd reads literally."""
    for path in files:
        for line, found in placeholders.find(machine.text(path) or ""):
            yield warning(
                _CHECK,
                f"{path}, line {line}, has {shown(found)}, which containerd reads literally",
                "Write the value there; if gpuhook install wrote the file: gpuhook uninstall "
                f"--engine containerd && {install}",
            )
            break


def pending(machine: Machine, owner: Distribution, path: str) -> Finding | None:
    """Return a finding if gpu-py is registered, and the distribution's file is older.

    None if that file has gpu-py, or if gpu-py isn't registered.
    """
    place = _kept(machine, owner, path)
    files = [path, *imports(machine, path)]
    if not place or any(_has_ours(machine, each) for each in files):
        return None
    return failure(
        _CHECK,
        f"{place} registers {names.RUNTIME}, and {owner.name} has not rewritten {path} since",
        f"Restart it: {owner.restart}",
    )


def lost(machine: Machine, owner: Distribution, path: str, install: str) -> Iterator[Finding]:
    """Warn of a registration that is lost when the distribution restarts."""
    if not _kept(machine, owner, path):
        yield warning(
            _CHECK,
            f"{owner.name} rewrites {path} when it starts, and then containerd loses "
            f"{names.RUNTIME}",
            f"Run {install}, which writes to the place that {owner.name} reads",
        )


def _kept(machine: Machine, owner: Distribution, path: str) -> str:
    """Return the file with gpu-py that the distribution uses as its source, "" for none."""
    folder = os.path.dirname(path)
    if owner.name == distributions.K0S:
        found = machine.glob(f"{folder}/containerd.d/*.toml")
        return next((each for each in found if _has_ours(machine, each)), "")
    templates = [f"{folder}/{name}" for name in distributions.TEMPLATES]
    if owner.name == distributions.MICROK8S:
        templates = [distributions.template_of(path)]
    for template in templates:
        if any(is_gpu_py(machine, each) for each in _PROGRAM.findall(machine.text(template) or "")):
            return template
    return next(_imported(machine, path, templates), "")


def _imported(machine: Machine, path: str, templates: list[str]) -> Iterator[str]:
    """Yield the files with gpu-py that a template or k3s itself imports."""
    texts = [machine.text(template) or "" for template in templates]
    for pattern in strings(toml(machine, path)[0].get("imports")):
        by_itself = os.path.dirname(pattern) in [
            each.removesuffix("tmpl") + "d" for each in templates
        ]
        if by_itself or any(pattern in text for text in texts):
            yield from (each for each in machine.glob(pattern) if _has_ours(machine, each))


def _has_ours(machine: Machine, path: str) -> bool:
    return any(is_gpu_py(machine, each) for _, each in programs_of(toml(machine, path)[0]))
