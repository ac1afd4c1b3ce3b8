"""Names that several rooms need, each written once."""

import os
import sys

# The folders of the vendors there is code for, in the order in which they are served.
VENDORS = ("nvidia", "amd", "neuron", "gaudi", "ascend", "intel_gpu", "intel_npu")

RUNTIME = "gpu-py"  # the OCI runtime's program, and what engines register it as
HOOK = "gpuhook-prestart"
# A verb of that hook: take exclusive devices, limit the devices' memory, and do nothing else.
LEASE_VERB = "lease"
HOOK_STAGES = ("prestart", "createRuntime")
CDI_HOOK = "gpuhook-cdi-hook"  # the one that our CDI documents name
CDI_HOOK_STAGE = "createContainer"
CDI_NO_ACCESS = "none"  # in place of a node's permissions: it has no entry in the cgroup
BUNDLE_OPTION = "--bundle"  # before the bundle's path, in the hook that gpu-py writes
HELPER_OPTION = "--helper"  # before the words that lead a hook to its helper
HELPER_KILLED = "--helper-killed"  # from launchers/gpu-py, which saw it

# By which a container says how much memory of its devices it may use.
MEMORY_VARIABLE = "GPUHOOK_DEVICE_MEMORY"
MEMORY_ANNOTATION = "gpuhook.io/device-memory"

# NVIDIA's hook, whose work ours does: Docker's --gpus adds it by the first name.
TOOLKIT_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
# By which Docker 29.2 and newer know that --gpus may be served from CDI documents.
TOOLKIT_CDI_HOOK = "nvidia-cdi-hook"

# A PATH without anybody's own folders, and the one that an administrator usually has.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SEARCH_PATH = f"/usr/local/sbin:/usr/local/bin:{SYSTEM_PATH}"

# What all programs of root's make has the modes that it is made with, whoever calls them: with
# umask 077, as on hardened machines, folders of engines and of containers were closed to users.
UMASK = 0o022

HOOK_ENVIRONMENT = [f"PATH={SYSTEM_PATH}", "LC_ALL=C.UTF-8"]

# The verbs of a low-level runtime that make a container.
CREATING_VERBS = frozenset({"create", "run"})
RESTORING_VERB = "restore"  # a container from a checkpoint, which is a new one, too

# Qualified CDI device names, vendor/class=device, by the grammar of the CDI specification.
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_ALNUM = _LETTERS | frozenset("0123456789")
_KIND = _ALNUM | frozenset("-_.")
_DEVICE = _KIND | frozenset(":")

# What uname(2) calls machines of 64 bits to a process with the personality of one of 32 bits.
_WIDE = {
    "i686": "x86_64", "armv8l": "aarch64", "ppcle": "ppc64le", "riscv32": "riscv64",
}  # fmt: skip


def machine_name() -> str:
    """Return what uname -m says, whatever the personality(2) of this process (linux32) is."""
    told = os.uname().machine
    return _WIDE.get(told, told) if sys.maxsize >> 32 else told  # protects: own-machine


def cdi_parts(name: str) -> tuple[str, str, str] | None:
    """Return (vendor, class, device) of a qualified CDI name, None if it is not one."""
    kind, equals, device = name.partition("=")
    vendor, slash, device_class = kind.partition("/")
    if not (equals and slash):
        return None
    if not _is_word(vendor, _LETTERS, _KIND) or not _is_word(device_class, _LETTERS, _KIND):
        return None
    return (vendor, device_class, device) if _is_word(device, _ALNUM, _DEVICE) else None


def _is_word(text: str, first: frozenset[str], allowed: frozenset[str]) -> bool:
    return bool(text) and text[0] in first and text[-1] in _ALNUM and allowed.issuperset(text)
