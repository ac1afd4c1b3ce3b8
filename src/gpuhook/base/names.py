"""Names that several packages use, each defined once."""

import os
import sys

RUNTIME = "gpu-py"  # the OCI runtime's program, and its name in engines
HOOK = "gpuhook-prestart"
# Variable of gpu-py's environment: the path of the low-level runtime that the engine itself calls.
ENGINES_RUNTIME = "GPUHOOK_RUNTIME"
# A verb of that hook: only take exclusive devices and limit the devices' memory.
LEASE_VERB = "lease"
HOOK_STAGES = ("prestart", "createRuntime")
CDI_HOOK = "gpuhook-cdi-hook"  # the hook in our CDI specs
CDI_HOOK_STAGE = "createContainer"
CDI_NO_ACCESS = "none"  # in place of a node's permissions: no entry in the cgroup
BUNDLE_OPTION = "--bundle"  # before the bundle's path, in the hook that gpu-py writes
HELPER_OPTION = "--helper"  # before the arguments that lead a hook to its worker
HELPER_KILLED = "--helper-killed"  # from the launcher, which noticed it

# Variable of a container for the memory that it may use of its devices.
MEMORY_VARIABLE = "GPUHOOK_DEVICE_MEMORY"
MEMORY_ANNOTATION = "gpuhook.io/device-memory"

# NVIDIA's hook, which gpuhook replaces: Docker's --gpus adds it by the first name.
TOOLKIT_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
# Docker 29.2 and newer look for this program before they serve --gpus from CDI specs.
TOOLKIT_CDI_HOOK = "nvidia-cdi-hook"
MEMORY_LIMITS_VERB = "apply-cuda-memory-limits"  # of that program, from NVIDIA's toolkit 1.20.1 on

# A PATH without users' own folders, and the one that an administrator usually has.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SEARCH_PATH = f"/usr/local/sbin:/usr/local/bin:{SYSTEM_PATH}"

# Files and folders that root's programs create get the requested modes, whatever the caller's
# umask: with 077, as on hardened hosts, users couldn't enter folders of engines and containers.
UMASK = 0o022

HOOK_ENVIRONMENT = [f"PATH={SYSTEM_PATH}", "LC_ALL=C.UTF-8"]

# The verbs of a low-level runtime that create a container.
CREATING_VERBS = frozenset({"create", "run"})
RESTORING_VERB = "restore"  # creates a container from a checkpoint

# Qualified CDI device names, vendor/class=device, in the grammar of the CDI specification.
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_ALNUM = _LETTERS | frozenset("0123456789")
_KIND = _ALNUM | frozenset("-_.")
_DEVICE = _KIND | frozenset(":")

# Names of 64-bit machines that uname(2) returns to processes with a 32-bit personality.
_WIDE = {
    "i686": "x86_64", "armv8l": "aarch64", "ppcle": "ppc64le", "riscv32": "riscv64",
}  # fmt: skip


def machine_name() -> str:
    """Return the result of uname -m, independent of this process' personality(2) (linux32)."""
    machine = os.uname().machine
    return _WIDE.get(machine, machine) if sys.maxsize >> 32 else machine  # protects: own-machine


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
