"""The gate: nothing that reads a container's words gives it more than the kubelet gave."""

import copy
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import machines
import nri_engines as engines
import paper
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import GpuhookError, RequestError
from gpuhook.start.inventory import cache
from gpuhook.start.resolve import resolve
from gpuhook.tools.nri.answer import Answer, Way, decide
from gpuhook.tools.nri.asked import Asked
from gpuhook.tools.nri.verdicts import Verdicts
from gpuhook.vendors import registry

HOOK = "/opt/gpuhook/bin/gpuhook-cdi-hook"
ID = "4f0c"
FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000000", "0x84cafeae17e7610"


class Machine:
    """A machine with four GPUs of NVIDIA's, four of AMD's and four accelerators of Gaudi's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nvidia = machines.machine(*(machines.gpu(index, index + 100) for index in range(4)))
        every = {"nvidia": nvidia}
        for name in ("amd", "gaudi"):
            every[name] = paper.machine(name, folder / name)  # type: ignore[assignment]
        self.inventories = every
        known = {name: registry.KNOWN[name] for name in every}
        monkeypatch.setattr(registry, "known", lambda _: known)
        monkeypatch.setattr(cache, "get_inventory", self._inventory)
        status, real = os.stat("/dev/null"), os.stat
        monkeypatch.setattr(
            "gpuhook.tools.nri.service.os.stat",
            lambda path, *rest, **more: (
                status if "/dev/" in str(path) else real(path, *rest, **more)
            ),
        )
        self.known = known
        self.state = folder / "state"

    def _inventory(self, _: Config, vendor: Any, **__: Any) -> Any:
        return self.inventories[vendor.names.NAME]

    def ids(self, spec: dict[str, Any], config: Config) -> set[str]:
        """Return which devices gpu-py gives; none where it refuses."""
        try:
            found = resolve(spec, config, self.known, container=ID)
        except GpuhookError:
            return set()
        return {name for grant in (found.grants if found else ()) for name in grant.ids}

    def of_edits(self, edits: Mapping[str, Any]) -> set[str]:
        """Return which devices edits give, by their nodes."""
        paths = {node["path"] for node in edits.get("deviceNodes", ())}
        return {
            device.id
            for inventory in self.inventories.values()
            for device in inventory.devices
            if paths.intersection(device.nodes)
        }


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def settings_of(machine: Machine, **chosen: Any) -> Config:
    config = Config()
    config.state_dir = str(machine.state)
    for name, value in chosen.items():
        setattr(config, name, value)
    return config


def spec_of(env: Iterable[str], asked: Asked) -> dict[str, Any]:
    return {
        "process": {"env": [*env], "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}},
        "mounts": [{"destination": to, "source": source} for to, source in asked.mounts],
        "annotations": dict(asked.annotations),
    }


# All ways of reading ------------------------------------------------------------------------------

ENGINES = (engines.adjusted, engines.replaced, engines.replaced_first)


def first_entries(env: Iterable[str]) -> list[str]:
    """Return what a runtime reads that takes the first entry of a name, as Ascend's does."""
    found: dict[str, str] = {}
    for entry in env:
        found.setdefault(entry.partition("=")[0], entry)
    return [*found.values()]


def strangers(machine: Machine, env: list[str], asked: Asked, config: Config) -> set[str]:
    """Return which devices runtimes give that know no verdict, whatever they go by."""
    found: set[str] = set()
    for read in (list, first_entries):
        for by_mounts, by_notes in itertools.product((False, True), repeat=2):
            theirs = copy.copy(config)
            theirs.gate = False
            theirs.accept_envvar_unprivileged = True
            theirs.accept_volume_mounts, theirs.accept_annotations = by_mounts, by_notes
            found |= machine.ids(spec_of(read(env), asked), theirs)
            for each in machine.known.values():  # one that is about one vendor's devices alone
                only = {each.NAME: each}
                try:
                    got = resolve(spec_of(read(env), asked), theirs, only)
                except GpuhookError:
                    continue
                found |= {name for grant in (got.grants if got else ()) for name in grant.ids}
    return found | of_amds(machine, env)


def of_amds(machine: Machine, env: Iterable[str]) -> set[str]:
    """Return what AMD's runtime gives by a swarm's variables, of which it reads any."""
    values = [each.partition("=")[2] for each in env if each.startswith("DOCKER_RESOURCE_")]
    words = {word.strip().lower() for value in values[-1:] for word in value.split(",")}
    return {
        device.id
        for device in machine.inventories["amd"].devices
        if words & {"all", device.id.lower(), device.label}
    }


def check(machine: Machine, asked: Asked, config: Config, names: list[tuple[str, str]]) -> Answer:
    """Have the gate decide, and see that nobody gives more; RequestError where it refuses."""
    way = Way(config, HOOK, given=lambda *_: names)
    answer = decide(asked, way)
    if answer.verdict is not None:
        Verdicts().write(config.state_dir, ID, answer.verdict)
    given = {name for _, name in names}
    changes = dict(each.partition("=")[::2] for each in answer.edits.get("env", ()))
    assert machine.of_edits(answer.edits) <= given
    for engine in ENGINES:
        env = engine(asked.env, changes)
        if config.gate:
            for reader in (config, settings_of(machine, **{**vars(config), "mode": "spec"})):
                assert machine.ids(spec_of(env, asked), reader) <= given, (engine, env)
        if not (config.gate and asked.handler == "gpu-py"):
            assert strangers(machine, env, asked, config) <= given, (engine, env)
    return answer


NAMES = (
    "NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_PCI_BUS_IDS", "CUDA_VERSION",
    "NVIDIA_REQUIRE_CUDA", "NVIDIA_IMEX_CHANNELS", "DOCKER_RESOURCE_GPU",
    "DOCKER_RESOURCE_AMD_GPU", "nvidia_visible_devices", "A", "",
)  # fmt: skip
ODD_NAMES = ("NVIDIA_VISIBLE_DEVICES ", "\tNVIDIA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES\0")
VALUES = (
    "all", "void", "none", "", "0", "1", "0,1", "3", "0-3", " 0 ", "void,all", "all,void",
    "none,all", "0,all", FIRST, SECOND, "nvidia.com/gpu=0", "nvidia.com/gpu=all", "amd.com/gpu=1",
    "ALL", "None",
)  # fmt: skip
ODD_VALUES = (
    "0:0", "9", "0x84cafeae17e7620", "runtime.nvidia.com/gpu=all", "a.com/b=1", "11.0", "all\n",
    "all\0", "0000:1b:00.0",
)  # fmt: skip
ODD_ENTRIES = ("NVIDIA_VISIBLE_DEVICES", "=all", "", "A=\0NVIDIA_VISIBLE_DEVICES=all")
FOLDERS = [f"/var/run/{name}-container-devices" for name in ("nvidia", "amd", "gaudi")]
USUAL = some.builds(
    "{}={}".format, some.sampled_from((*NAMES[:2] * 3, *NAMES)), some.sampled_from(VALUES)
)
ODD = some.one_of(
    some.builds(
        "{}={}".format,
        some.sampled_from((*NAMES, *ODD_NAMES)),
        some.sampled_from((*VALUES, *ODD_VALUES)),
    ),
    some.sampled_from(ODD_ENTRIES),
)
ENTRIES = some.one_of(
    some.lists(USUAL, max_size=4),
    some.lists(USUAL, max_size=3),
    some.lists(some.one_of(USUAL, ODD), max_size=4),
)


def rarely(strategy: Any, otherwise: Any) -> Any:
    """Return a strategy that comes one time in four."""
    nothing = some.just(otherwise)
    return some.one_of(nothing, nothing, nothing, strategy)


MOUNTS = some.lists(
    some.tuples(
        some.builds(
            "{}{}{}".format,
            some.sampled_from((*FOLDERS, "//var/run/./nvidia-container-devices", "/data")),
            some.sampled_from(("/", "//", "/x/../")),
            some.sampled_from(
                ("all", "0", "1", "2", FIRST, SECOND, "cdi/nvidia.com/gpu/0", "cdi/x", "imex/0")
            ),
        ),
        some.sampled_from(("/dev/null", "/dev//null", "/etc")),
    ),
    max_size=2,
)
NOTES = some.dictionaries(
    some.sampled_from(
        ("cdi.k8s.io/x", "nvidia.cdi.k8s.io/container.main", "nvidia.cdi.k8s.io", "a.io/cdi.k8s.io")
    ),
    some.sampled_from(("nvidia.com/gpu=0", "amd.com/gpu=all", "a.com/b=1", "nvidia.com/gpu=all")),
    max_size=1,
)
GIVEN = some.lists(
    some.sampled_from(
        (
            ("nvidia.com/gpu", FIRST), ("amd.com/gpu", SECOND), ("a.com/b", "1"),
            ("nvidia.com/gpu", "GPU-00000001-0000-0000-0000-000000000000"),
        )
    ),
    unique=True, max_size=3,
)  # fmt: skip
FLAGS = some.fixed_dictionaries(
    {
        name: some.booleans()
        for name in (
            "gate", "accept_envvar_unprivileged", "accept_volume_mounts", "accept_annotations",
        )
    }
)  # fmt: skip


@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    image=ENTRIES, pod=ENTRIES, mounts=rarely(MOUNTS, []), notes=rarely(NOTES, {}), names=GIVEN,
    flags=FLAGS,
    handler=some.sampled_from(("", "gpu-py", "nvidia", "gpu-x")),
    merge=some.sampled_from((engines.of_containerd, engines.of_crio)),
)  # fmt: skip
def test_no_reader_gives_more(
    machine: Machine, image: list[str], pod: list[str], mounts: list[tuple[str, str]],
    notes: dict[str, str], names: list[tuple[str, str]], flags: dict[str, bool], handler: str,
    merge: Any,
) -> None:  # fmt: skip
    asked = Asked(
        "team", "pod", "main", handler, tuple(merge(image, pod)), tuple(mounts),
        tuple(notes.items()), tuple(notes.items()), ID,
    )  # fmt: skip
    try:
        check(machine, asked, settings_of(machine, **flags), names)
    except GpuhookError as error:
        assert not isinstance(error, AssertionError)  # noqa: PT017 - a refusal gives nothing


def refused(machine: Machine, asked: Asked, config: Config, match: str, *names: Any) -> None:
    with pytest.raises(RequestError, match=match):
        check(machine, asked, config, [*names])


def asking(*env: str, handler: str = "", **more: Any) -> Asked:
    return Asked("team", "pod", "main", handler, env, id=ID, **more)
