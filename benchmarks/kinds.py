"""The kinds of containers that are measured, by the names that the tables have for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from containers import Container
from groups import Groups, is_unified
from machine import Machine

RUNC = "plain runc"
NO_GPU = "no GPU"
EIGHT = "8 GPUs"
PAUSED = "8 GPUs, first after a pause"
PLAIN = "8 GPUs, helper off"
SLOW = "8 GPUs, nvmlInit 2 s"
BY_NAME = "8 GPUs, mode cdi"
BY_NAME_PAUSED = "8 GPUs, mode cdi, first after a pause"
BY_ENGINE = "8 GPUs, document applied by engine"
BY_ENGINE_ALONE = "8 GPUs, the same, nothing stands"
WITHOUT_HOOK = "8 GPUs, the same, without our hook"
LIMITED = "8 GPUs, a limit of memory"
LIMITED_SLOW = "8 GPUs, the same, nvmlInit 150 ms"

_SOME = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
_EVERY = "NVIDIA_DRIVER_CAPABILITIES=all"
_ONE_GPU = ("NVIDIA_VISIBLE_DEVICES=0", _SOME)
_ALL_GPUS = ("NVIDIA_VISIBLE_DEVICES=all", _SOME)
_BY_NAME = ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=all",)


@dataclass(frozen=True)
class _Kind:
    """What a container asks for, and what is set in the config.toml that it is started with."""

    environ: tuple[str, ...] = ()
    init_seconds: float = 0.0
    mode: str = "hook"
    settings: str = ""
    by_engine: bool = False
    hooks: bool = True


# By default, a prefork server runs after the first container. With standby = 0 there is none, so
# each container forks its own helper, as the first one after a pause does.
_OURS = {
    NO_GPU: _Kind(),
    "1 GPU": _Kind(_ONE_GPU),
    EIGHT: _Kind(_ALL_GPUS),
    "8 GPUs, all capabilities": _Kind(("NVIDIA_VISIBLE_DEVICES=all", _EVERY)),
    PAUSED: _Kind(_ALL_GPUS, settings="standby = 0\n"),
    PLAIN: _Kind(_ALL_GPUS, settings="helper = false\n"),
    "8 GPUs, mode spec": _Kind(_ALL_GPUS, mode="spec"),
    SLOW: _Kind(_ALL_GPUS, init_seconds=2.0),
    BY_NAME: _Kind(_BY_NAME, mode="cdi"),
    BY_NAME_PAUSED: _Kind(_BY_NAME, mode="cdi", settings="standby = 0\n"),
    BY_ENGINE: _Kind(settings="standby = 600\n", by_engine=True),
    BY_ENGINE_ALONE: _Kind(settings="standby = 0\n", by_engine=True),
    WITHOUT_HOOK: _Kind(settings="standby = 0\n", by_engine=True, hooks=False),
}
# A memory limit needs cgroup v2 at /sys/fs/cgroup.
_LIMIT = (*_ALL_GPUS, "GPUHOOK_DEVICE_MEMORY=50%")
_LIMITED = {LIMITED: _Kind(_LIMIT), LIMITED_SLOW: _Kind(_LIMIT, init_seconds=0.15)}


def kinds(machine: Machine, groups: Groups, others: Sequence[str]) -> dict[str, Container]:
    """Return every kind, each with a group and a config.toml of its own.

    Those of other runtimes set nothing that an older gpuhook doesn't know.
    """
    found = {
        RUNC: Container(groups.new(), "runc"),
        "plain runc, an empty hook": Container(groups.new(), "runc", hook="/bin/true"),
    }
    every = {**_OURS, **(_LIMITED if is_unified() else {})}
    ours = [(name, machine.runtime, kind) for name, kind in every.items()]
    theirs = [
        (f"against {number}: {name}", other, _OURS[name])
        for number, other in enumerate(others, 1)
        for name in (NO_GPU, EIGHT, BY_NAME, BY_NAME_PAUSED, BY_ENGINE)
    ]
    for number, (name, runtime, kind) in enumerate(ours + theirs):
        group = groups.new()
        config = machine.config(str(number), kind.init_seconds, kind.mode, kind.settings)
        found[name] = Container(group, runtime, kind.environ, config)
        if kind.mode == "cdi" or kind.by_engine:
            document = machine.document(config, runtime)
            machine.use_documents(config, document)
        if kind.by_engine:
            # The prefork server is left by another container with the same configuration.
            leaves = Container(group, runtime, _ALL_GPUS, config)
            found[name] = Container(
                group, "runc", (), config, document=document, hooks=kind.hooks, before=leaves
            )
    return found
