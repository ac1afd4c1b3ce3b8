"""Calls that are forbidden in some modules, each with its reason.

A module that handles an image never reaches it by a path. A path that was resolved a moment
ago can mean something else when it is used: that is the class of CVE-2024-0132, CVE-2024-0133,
CVE-2024-0134, CVE-2025-23359 and CVE-2025-23267.

A command that root runs opens, locks or queries things that another user may have made only
through the modules for that.

Text of the kernel or of another program is never cut where Python sees an end of a line or a
blank, but its writer meant a letter.
"""

import ast
from pathlib import Path

from sources import calls, of_all

import gpuhook

SOURCE = Path(gpuhook.__file__).parent

# Call -> why it is forbidden. Calls that take a dir_fd argument act on a held folder with it.
FORBIDDEN = {
    "open": "CVE-2024-0133: open(path) follows links out of the image; use Rootfs.open_file",
    "os.open": "CVE-2024-0133: use Rootfs.open, or a descriptor of the folder as dir_fd",
    "os.mkdir": "CVE-2024-0134: use Container.mount_point",
    "os.makedirs": "CVE-2024-0134: use Container.mount_point",
    "os.symlink": "CVE-2024-0134: use Container.make_link",
    "os.link": "CVE-2024-0134: nothing needs it",
    "os.rename": "CVE-2024-0134: use Container.replace_file",
    "os.replace": "CVE-2024-0134: use Container.replace_file",
    "os.unlink": "CVE-2025-23267: the journal removes what we made, and nothing else",
    "os.remove": "CVE-2025-23267: the journal removes what we made, and nothing else",
    "os.rmdir": "CVE-2025-23267: the journal removes what we made, and nothing else",
    "os.chmod": "the peer's chmod hook followed links; use kernel.set_mode on a descriptor",
    "os.chown": "as os.chmod; use kernel.change_owner",
    "os.truncate": "CVE-2025-23267: use Container.replace_file",
    "os.mknod": "device nodes are mounted from the driver root, never made",
    "os.listdir": "CVE-2024-0132: use Rootfs.list_folder",
    "os.scandir": "CVE-2024-0132: use Rootfs.list_folder",
    "os.walk": "CVE-2024-0132: use Rootfs.list_folder",
    "os.stat": "CVE-2024-0132: use Rootfs.stat, or a descriptor of the folder as dir_fd",
    "os.lstat": "CVE-2024-0132: use Rootfs.stat",
    "os.readlink": "CVE-2024-0132: use rootfs.read_link",
    "os.access": "CVE-2024-0132: a check before the use; use Rootfs.exists",
    "os.chroot": "the root's own programs and links would be ours",
    "os.chdir": "the working folder would be the image's (CVE-2025-23266)",
    "os.path.realpath": "CVE-2024-0132: resolves first, to be used later",
    "os.path.exists": "CVE-2024-0132: a check before the use; use Rootfs.exists",
    "os.path.isfile": "CVE-2024-0132: a check before the use; use Rootfs.stat",
    "os.path.isdir": "CVE-2024-0132: a check before the use; use Rootfs.stat",
    "os.path.islink": "CVE-2024-0132: a check before the use; use rootfs.read_link",
    "os.system": "CVE-2024-0136: no program runs where the image could reach it",
    "os.execve": "CVE-2024-0136: no program runs where the image could reach it",
    "os.posix_spawn": "CVE-2024-0136: no program runs where the image could reach it",
}
FORBIDDEN_MODULES = {
    "shutil": "CVE-2024-0134: works on paths",
    "subprocess": "CVE-2024-0136: no program runs where the image could reach it",
    "pathlib": "CVE-2024-0134: works on paths",
    "tempfile": "CVE-2024-0134: works on paths",
    "glob": "CVE-2024-0132: follows links out of the image",
}

# Module, function and call -> why its path isn't in an image.
ALLOWED = {
    "base/container/rootfs.__init__: os.open": "the root itself, named by its maker",
    "base/container/rootfs.reopen: os.open": "our own descriptor, through /proc/self/fd",
    "base/container/rootfs._inside: os.readlink": "our own descriptors, through /proc/self/fd",
    "base/container/rootfs._socket_in: os.scandir": "a descriptor",
    "base/container/rootfs.list_folder: os.listdir": "a descriptor",
    "base/container/rootfs.list_folder: os.scandir": "a descriptor",
    "base/container/mounts.__init__: os.open": "our own mount table",
    "base/container/changes.real_place: os.readlink": "our own descriptor, through /proc/self/fd",
    "inject.open_folder: os.open": "our own /proc/PID, opened once",
    "hpc/rootfs/fstab.is_folder: os.stat": "the driver's file",
    "core/plan/volumes._is_same: os.stat": "the driver's file",
    "hpc/rootfs/work.take_back: os.path.isdir": "our own state folder",
    "hpc/rootfs/requests._save: os.rmdir": "our own state folder",
    "tools/root_folder/user_files.inside: os.stat": "where the caller's path meets the root",
    "hpc/rootfs/appended._opened: os.open": "our own descriptor, through /proc/self/fd",
    "hpc/rootfs/appended.append: os.open": "a folder of the caller's, after a look at the way",
    "vendors/nvidia/own_files._kernel_has_none: os.path.exists": "our own /proc",
    "vendors/nvidia/mps_mounts._own_name: os.open": "our own /proc/self",
    "core/edit.add_hook: os.access": "our own hook, beside gpu-py",
    "inject.open_container: os.open": "/proc/PID, opened once",
    "core/resource_limits._opened: os.open": "a folder of the host, by the descriptor's mount",
    "inject.open_inside: os.open": "our own /proc/PID, opened once",
    "monitor/containers/live._enter: os.open": "the host's root folder",
    "monitor/containers/live._enter: os.chroot": "the host's root folder, and nothing is executed",
    "monitor/containers/live._has: os.stat": "the driver's file",
    "monitor/containers/live._deny_v1: os.open": "a file of the host's cgroup filesystem",
    "inject._is_first_namespace: os.stat": "our own namespace, and the first process'",
    "inject._refuse_host_root: os.stat": "the host's own root",
    "inject._refuse_host_namespace: os.stat": "our own namespace",
    "inject.container_owner: os.stat": "our own namespace",
}


# Packages of commands and of other code that changes no image, including those of vendors.
WITHOUT_IMAGES = ("cli", "config", "doctor", "engines", "nvidia_cli")


def room_of(module: str) -> str:
    """Return the package of a module, such as doctor for tools/vendors/nvidia/doctor/nodes."""
    parts = [part for part in module.split("/") if part not in ("base", "core", "tools")]
    return parts[2] if parts[0] == "vendors" and len(parts) > 2 else parts[0]


def handling_images() -> dict[str, str]:
    """Return the text of each module that holds a Rootfs or a ContainerRootfs, by name."""
    words = (
        "gpuhook.base.container.rootfs",
        "gpuhook.base.container.changes",
        "gpuhook.hpc.rootfs.folder",
        "gpuhook.core.plan.operations",
    )
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name, text = str(path.relative_to(SOURCE).with_suffix("")), path.read_text()
        itself = name in ("base/container/mounts", "base/container/rootfs")
        holds = any(f"from {word} import" in text for word in words)
        if itself or (holds and room_of(name) not in WITHOUT_IMAGES):
            found[name] = text
    return found


# Modules that hold a Rootfs of the host or of the driver, or change nothing in an image.
OF_THE_HOST = {
    "tools/vendors/nvidia/driver_folder": "reads a plan, and carries out none",
    "monitor/host/driver_program": "runs in the driver root",
    "tools/driver_folder/keep": "reads the driver root; writes to a folder of the host's",
    "core/inventory/fingerprint": "looks at the driver root",
    "vendors/nvidia/vendor": "looks at the driver root",
    "vendors/nvidia/discover": "looks at the driver root",
    "vendors/nvidia/device_nodes": "looks at the driver root",
    "vendors/nvidia/driver_files": "looks at the driver root",
    "vendors/nvidia/graphics_files": "looks at the driver root",
    "monitor/containers/nodes": "reads, for gpuhook list",
    "vendors/nvidia/kernel_modules": "runs in the driver root",
    "base/loader/ldconfig_fallback": "runs the host's ldconfig, sealed, in namespaces of its own",
}


def violations(module: str, text: str) -> list[str]:
    """Return the forbidden calls and imports of a module, with their reasons."""
    tree = ast.parse(text)
    found = []
    for function, name, call in calls(tree):
        held = any(keyword.arg in ("dir_fd", "src_dir_fd") for keyword in call.keywords)
        place = f"{module}.{function}: {name}"
        if name in FORBIDDEN and not held and place not in ALLOWED:
            found.append(f"{place}: {FORBIDDEN[name]}")
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{module}: {name}: {FORBIDDEN_MODULES[name]}" for name in names
                  if name in FORBIDDEN_MODULES]  # fmt: skip
    return found


def test_images_are_accessed_only_through_descriptors() -> None:
    modules = {name: text for name, text in handling_images().items() if name not in OF_THE_HOST}
    needed = {
        "base/container/changes", "core/plan/operations", "inject", "core/plan/image",
        "base/loader/layout",
    }  # fmt: skip
    assert needed <= set(modules)
    assert [each for item in modules.items() for each in violations(*item)] == []


def test_every_allowed_call_is_still_needed() -> None:
    used = {
        f"{module}.{function}: {name}"
        for module, text in handling_images().items()
        for function, name, _ in calls(ast.parse(text))
    }
    assert set(ALLOWED) - used == set()
    assert set(handling_images()) >= set(OF_THE_HOST)


# Packages of commands, and their calls that must be replaced by calls of host_files,
# host_processes and the like.
PACKAGES = (
    "tools/engines", "tools/doctor", "tools/cli", "tools/driver_folder", "tools/vendors/*/doctor",
    "cluster/commands", "metrics/commands", "hpc/commands", "tools/root_folder",
)  # fmt: skip
COMMANDS_MODULES = ("monitor/host/processes",)
OF_OTHERS = {
    "open": "waits for a pipe's other end, and reads without bound; use host_files.read",
    "os.open": "as open; use host_files.read or host_files.create_private",
    "io.open": "as open",
    "fcntl.flock": "who may open a file may lock it for ever; use host.lock",
    "fcntl.lockf": "as fcntl.flock",
    "socket.socket": "who answers may do so for ever; use docker_api.ask",
    "http.client.HTTPConnection": "as socket.socket",
    "os.path.expanduser": "a home is its user's, who puts links into it; root has no part in it",
    "subprocess.Popen": "a program may never end; use subprocess.run with a timeout",
    "os.system": "as subprocess.Popen",
}
OWN_CONFIG = "(resources.files('gpuhook') / 'tools/config/config.toml')"
OF_OTHERS_METHODS = (".read_text", ".read_bytes", ".open", ".expanduser", ".Popen")

# Module, function and call -> why no other user can influence it.
ALLOWED_TO_COMMANDS = {
    f"tools/cli/_manual.config_page: {OWN_CONFIG}.read_text": "a file of our own package",
    "tools/cli/_shipped._texts: entry.read_text": "a file of our own package",
    f"tools/cli/config.default_text: {OWN_CONFIG}.read_text": "a file of our own package",
    "tools/cli/install._links_folder: os.path.expanduser": "only where we aren't root",
    "tools/doctor/case.settings: os.path.expanduser": "only where we aren't root",
    "tools/doctor/report.write_report: tarfile.open": "a descriptor of host_files.create_private",
    "tools/engines/files.users_folder: os.path.expanduser": "only where we aren't root",
    "tools/engines/docker_api._talk: socket.socket": "bound in time and size, its peer checked",
    "tools/driver_folder/keep._bring: open": "descriptors: the driver's file, a new one of ours",
    "tools/driver_folder/keep._bring: os.open": "a new file, in a folder that is root's alone",
    "tools/driver_folder/keep._label_below: root.open": "the driver root, which is trusted",
    "tools/driver_folder/keep._link: os.open": "a folder that was made just now",
    "tools/driver_folder/keep._link_copy: os.open": "a file of an older folder, which is root's",
    "tools/driver_folder/keep._write: open": "a new file, in a folder that is root's alone",
    "tools/driver_folder/place._open: os.open": "after a look at its owner, and no link",
}


def of_commands() -> dict[str, str]:
    """Return the sources of the modules that root's commands consist of, by name."""
    paths = [SOURCE / f"{name}.py" for name in COMMANDS_MODULES]
    paths += [path for package in PACKAGES for path in sorted(SOURCE.glob(f"{package}/*.py"))]
    paths += sorted(SOURCE.glob("tools/vendors/*/doctor.py"))
    return {str(path.relative_to(SOURCE).with_suffix("")): path.read_text() for path in paths}


def trusting(module: str, text: str) -> list[str]:
    """Return the places and calls by which a module would trust another user."""
    found = []
    for function, name, call in calls(ast.parse(text)):
        unbound = name == "subprocess.run" and not any(
            keyword.arg == "timeout" for keyword in call.keywords
        )
        if name in OF_OTHERS or name.endswith(OF_OTHERS_METHODS) or unbound:
            found.append(f"{module}.{function}: {name}")
    return found


def test_commands_make_no_call_that_trusts_another_user() -> None:
    found = [each for item in of_commands().items() for each in trusting(*item)]
    assert [each for each in found if each not in ALLOWED_TO_COMMANDS] == []
    assert set(ALLOWED_TO_COMMANDS) - set(found) == set()


def test_vendors_doctor_checks_count_as_commands() -> None:
    assert {"tools/vendors/nvidia/doctor/driver", "tools/vendors/nvidia/doctor/nodes"} <= set(
        of_commands()
    )


def test_calls_that_trust_another_user_are_detected() -> None:
    assert trusting("x", "open('/a')\n")
    assert trusting("x", "from pathlib import Path\nPath('/a').read_text()\n")
    assert trusting("x", "import subprocess\nsubprocess.run(['a'])\n")
    assert not trusting("x", "import subprocess\nsubprocess.run(['a'], timeout=1)\n")


def test_forbidden_path_calls_are_detected() -> None:
    assert violations("x", "import os\nos.open('/a', 0)\n")
    assert violations("x", "def f():\n    open('/a')\n")
    assert violations("x", "from shutil import copy\n")
    assert violations("x", "import os\nos.path.realpath('/a')\n")
    assert not violations("x", "import os\nos.open('a', 0, dir_fd=3)\n")


# Any user can put \r, \v, \f, \x1c to \x1e, U+0085, U+2028 and U+2029 into a name.
# str.splitlines, str.split() and text files cut the name there.
CUTTING = {
    ".splitlines": 'names hold what it takes for an end of a line; use split("\\n"), or host.proc',
    ".split": 'without an argument as splitlines; use split(" "), or host.proc.words',
    "open": "in text mode \\r ends a line; read bytes, those of /proc by host.proc",
    ".read_text": "as open",
}
# Module, function and call -> why its text may be cut.
ALLOWED_TO_CUT = {
    "core/cdi/yaml_reader._decoded: .split": "base64, in which every blank is one",
    "tools/cdi/units.shipped: .read_text": "a file of our own package",
    "packaging/kubernetes/image/node_unit.py.shipped: .read_text": "a file of our own package",
    "tools/cli/_help.first_sentence: .split": "our own docstrings",
    "tools/cli/_manual.text: .split": "our own docstrings",
    "tools/cli/_manual.config_page: .read_text": "a file of our own package",
    "tools/cli/_shipped._texts: .read_text": "a file of our own package",
    "tools/cli/config.default_text: .read_text": "a file of our own package",
    "base/loader/ldcache.order_key: .split": "names in which all but letters became blanks",
    "nvidia_cli/ctk._to_standard_error: open": "written to, and nowhere",
    "nvidia_cli/gpu_docker._split: .split": "a user's own command line",
    "prefork/hook_worker.answer: .split": "our own sentence, made one line",
    "prefork/instance.leave_caller_cgroups: open": "written to",
    "cluster/vendors/ascend/cluster.resource: .split": "our own name of a model",
    "vendors/nvidia/requirements.parse: .split": "one variable, as NVIDIA reads it",
    "vendors/nvidia/variables._meant: .split": "one name of a model",
    "simulate/vendors/nvidia/activity._places: .split": "our own file",
    "simulate/vendors/nvidia/activity._places: open": "our own file",
    "simulate/vendors/nvidia/check._of_file: open": "our own file, by its newlines alone",
    "simulate/vendors/nvidia/state.load: open": "our own file",
}


def cutting(module: str, text: str) -> dict[str, str]:
    """Return the places and calls by which a module cuts text where it must not, with reasons."""
    found = {}
    for function, name, call in calls(ast.parse(text)):
        said = name if name == "open" else f".{name.rpartition('.')[2]}" if "." in name else ""
        without = not call.args or ast.unparse(call.args[0]) == "None"
        modes = [ast.unparse(each) for each in call.args[1:2]]
        modes += [ast.unparse(each.value) for each in call.keywords if each.arg == "mode"]
        fine = {".split": not without or bool(call.keywords), "open": "b" in "".join(modes)}
        if said in CUTTING and not fine.get(said, False):
            found[f"{module}.{function}: {said}"] = CUTTING[said]
    return found


def test_line_splitting_calls_are_used_only_where_allowed() -> None:
    found: dict[str, str] = {}
    for module, text in of_all().items():
        found |= cutting(module, text)
    assert {place: why for place, why in found.items() if place not in ALLOWED_TO_CUT} == {}
    assert set(ALLOWED_TO_CUT) - set(found) == set()
    assert any(name.startswith("packaging/") for name in of_all())


def test_text_mode_and_line_splitting_calls_are_detected() -> None:
    for text in ("a.splitlines()", "b(c)[0].splitlines(True)", "a.split()", "a.split(None, 1)",
                 "open('/proc/mounts')", "open('a', 'w')", "open('a', encoding='utf-8')",
                 "Path('/proc/stat').read_text()"):  # fmt: skip
        assert cutting("x", text), text
    for text in ("a.split('\\n')", "a.split(b' ', 2)", "open('a', 'rb')", "open('a', mode='xb')"):
        assert not cutting("x", text), text
