"""Names that several rooms need, each written once."""

RUNTIME = "gpu-py"  # the OCI runtime's program, and what engines register it as
HOOK = "gpuhook-prestart"
HOOK_STAGES = ("prestart", "createRuntime")

# NVIDIA's hook, whose work ours does: Docker's --gpus adds it by the first name.
NVIDIA_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")

# A PATH without anybody's own folders, and the one that an administrator usually has.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SEARCH_PATH = f"/usr/local/sbin:/usr/local/bin:{SYSTEM_PATH}"

HOOK_ENVIRONMENT = [f"PATH={SYSTEM_PATH}", "LC_ALL=C.UTF-8"]

# The verbs of a low-level runtime that make a container.
CREATING_VERBS = frozenset({"create", "run"})
