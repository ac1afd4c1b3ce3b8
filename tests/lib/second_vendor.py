"""The vendor of tests/vendors, registered in gpuhook, and simulated machines with its devices."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import paper
import pytest
from sample import Sample
from steps import resolve

import gpuhook.cluster.vendors
import gpuhook.tools.vendors
import gpuhook.vendors
import gpuhook_simulate.vendors
from gpuhook.base.config.model import Config
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.inventory.selection import select
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import Plan
from gpuhook.core.planner import make_plan
from gpuhook.core.request.reader import Request, SpecReader
from gpuhook.core.resolve import Allocation
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import names as nvidia

FOLDER = Path(__file__).parents[1] / "vendors"
GROUP = 1234

Inventories = dict[str, Inventory]


def know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register NVIDIA and ACME in gpuhook during a test, as if ACME were in the package."""
    for package, folder in (
        (gpuhook.vendors, FOLDER),
        (gpuhook.cluster.vendors, FOLDER / "cluster"),
        (gpuhook.tools.vendors, FOLDER / "tools"),
        (gpuhook_simulate.vendors, FOLDER / "simulate"),
    ):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    # A table of its own: an entry deleted from the real one would come back in another order.
    monkeypatch.setattr(
        registry, "BUILT_IN", {nvidia.NAME: nvidia, "acme": registry.complete(part("names"))}
    )


def part(name: str) -> ModuleType:
    """Return a module of ACME, for container starts or for commands."""
    packages = ("tools", "cluster")
    found = [each for each in packages if (FOLDER / each / "acme" / f"{name}.py").exists()]
    whole = ".".join(["gpuhook", *found, "vendors.acme", name])
    return importlib.import_module(whole)


def sample() -> Sample:
    """Return ACME's sample, which gpuhook's own tests don't use."""
    spec = importlib.util.spec_from_file_location("acme_sample", FOLDER / "samples/acme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Sample = module.SAMPLE
    return found


def machine(root: Path, count: int = 4, **settings: object) -> Inventory:
    """Simulate a machine in a folder and return its inventory; no device nodes are created."""
    discover = part("discover")
    simulator = importlib.import_module("gpuhook_simulate.vendors.acme")
    words = {name: str(value) for name, value in settings.items()}
    return paper.simulated(simulator, discover, root, count, words, discover._inside)


def spec_with(*env: str, **more: Any) -> dict[str, Any]:
    """Return an OCI spec whose process has these variables."""
    return {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 1000, "gid": 1000}, "env": list(env)},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [{"type": "mount"}]},
        **more,
    }


def read(spec: Mapping[str, Any], config: Config | None = None) -> Request:
    """Return a container's request for ACME devices."""
    names, vendor = part("names"), part("vendor").VENDOR
    return SpecReader(dict(spec), config or Config()).read(names, vendor)


def names_of_variable(variable: str) -> tuple[str, ...]:
    spaces: tuple[str, ...] = part("names").VARIABLES[variable]
    return spaces


def selected(found: Inventory, *words: str, by: str = "ACME_VISIBLE_DEVICES") -> list[str]:
    devices = select(words, found, part("names"), names_of_variable(by))
    return [device.label for device in devices]


def resolved(spec: dict[str, Any], found: Inventories, config: Config | None = None) -> Allocation:
    answer = resolve(spec, config or Config(), inventories=found)
    assert answer is not None
    return answer


def planned(spec: dict[str, Any], found: Inventories, config: Config | None = None) -> Plan:
    answer = resolved(spec, found, config)
    return make_plan(answer.grants, image.unknown(), answer.groups)


def of_kind(plan: Plan, kind: str) -> list[dict[str, Any]]:
    return [op.to_json() for op in plan.operations if op.kind == kind]
