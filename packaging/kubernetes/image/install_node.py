"""install-node: put gpuhook on a Kubernetes node, and take it away again.

The installer of the container image. In a pod of the node's own it sees the folders of the node
that it changes at their own paths. Below FOLDER it keeps

    versions/NAME   gpuhook with an interpreter and C library of its own, as the image has it
    bin/PROGRAM     a link to the program of the version that counts
    lock            held while something is changed
    restart         is there from before an engine's files change until it was restarted
    restart-UNIT    is there from before a unit of ours changes until it was restarted
    settings        what the node's config.toml was, and what was made of it
    device-plugin.yaml  the device plugin's options, of a ConfigMap

A version's folder gets its name when it is complete, and each link changes by a rename: a start
finds the old version or the new one, whole. Whatever was interrupted is made good by the next run.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import click
from node import NO_ENGINE, TASKS, Node, say, say_last, systemctl, tasks_of
from node_lease import lease_of
from node_mps import put_mps, refuse_mps, remove_mps
from node_nri import UNIT as NRI
from node_nri import put_nri
from node_plugin import put_plugin, refuse_plugin, remove_plugin
from node_settings import refuse_runtime, settle, unsettle
from node_version import SOURCE, check_programs, link_programs, put_version, remove_old
from remove_from_all import remove_from_all

from gpuhook.base import names
from gpuhook.base.errors import EngineError, GpuhookError
from gpuhook.base.host import files as host_files
from gpuhook.base.host import proc
from gpuhook.monitor.host import processes as host_processes
from gpuhook.monitor.host.processes import Process
from gpuhook.tools.engines import containerd_files, distributions, in_use

FOLDER = "/opt/gpuhook"
CONTAINERD, CRIO, _ = ENGINES = ("containerd", "crio", NO_ENGINE)
DISTRIBUTIONS = ("", *(each.name.lower() for each in distributions.ALL))
NONE, SIGNAL, SYSTEMD = RESTARTS = ("none", "signal", "systemd")
RESTART_SECONDS = 90.0
POLL_SECONDS = 0.5
REST = 50  # a pause between two checks is this many times as long as a check
REPORT_SECONDS = 60.0
_ENDS = {signal.SIGTERM, signal.SIGINT}
_LISTENS = b"00010000"  # the flag __SO_ACCEPTCON in /proc/net/unix: net/unix/af_unix.c
# Errors for a file that doesn't exist, or a process that exits while it is inspected.
_GONE = (FileNotFoundError, NotADirectoryError, ProcessLookupError)


# The engine ------------------------------------------------------------------------------------


def check_file(node: Node, root: str = "") -> None:
    """Raise EngineError where the node's containerd reads another file than is to be changed."""
    if node.engine != CONTAINERD:
        return
    usual = containerd_files.USUAL
    ours = distributions.main_file(node.config or usual, containerd_files.text_of)
    read = [
        (process.option("--config", "-c") or [usual])[-1]
        for process in engines_running(CONTAINERD, root)
    ]
    others = [path for path in read if containerd_files.DOCKERS not in path]
    if not others or any(distributions.is_same(path, ours) for path in others):
        return
    owners = [each for each in distributions.ALL if distributions.is_same(each.read, others[0])]
    name = owners[0].name.lower() if owners else ""
    raise EngineError(
        f"containerd reads {others[0]} on this node, and gpu-py would go to {ours}",
        f"Add components/{name} (Helm: installer.distribution={name})"
        if name
        else "Set INSTALL_NODE_CONFIG to that file, and mount its folder",
    )


def tell_engine(node: Node) -> None:
    """Have the engine know gpu-py, and restart it if that is new to it."""
    check_file(node)  # protects: engines-file
    words = [f"{node.programs}/gpuhook", "install", f"--engine={node.engine}"]
    words += [f"--runtime-path={node.programs}/{names.RUNTIME}"]
    words += ["--set-default" if node.set_default else "--no-set-default"]
    words += [f"--config={node.config}"] if node.config else []
    if json.loads(_run([*words, "--dry-run", "--format=json"]))["changed"]:
        _mark(node)
        # Its text output isn't shown, because it advises the restart that follows here, and a
        # check of a host that it can't see.
        done = json.loads(_run([*words, "--format=json"]))
        for path in [path for each in done["engines"] for path in each["files"]]:
            say(f"wrote {path}")
    restart_if_marked(node)


def forget_engine(node: Node) -> None:
    """Take everything out of the engine's files again, and restart it."""
    words = [f"{SOURCE}/bin/gpuhook", "uninstall", f"--engine={node.engine}", "--force"]
    words += [f"--config={node.config}"] if node.config else []
    if "\n--- " in "\n" + _run([*words, "--dry-run"]):
        _mark(node)
    sys.stdout.write(_run(words))
    restart_if_marked(node)


def keep_for_users(node: Node) -> None:
    """Have the engine start no more containers with gpu-py of its own accord, but know it."""
    if node.set_default:
        tell_engine(replace(node, set_default=False))


def _run(words: list[str]) -> str:
    """Run our command; return what it printed."""
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EngineError(
            f"{' '.join(words)} failed", "Correct what it says above; it is tried again then"
        )
    return done.stdout


def _mark(node: Node) -> None:
    with open(node.marker, "wb") as file:
        os.fsync(file)


def restart_if_marked(node: Node) -> None:
    """Restart the engine where its files changed since it was."""
    if not os.path.exists(node.marker):
        return
    lease = None if node.restart == NONE else lease_of(node.lease, node.holder)
    with lease.held() if lease else contextlib.nullcontext(lambda: None) as renew:
        if node.restart == SYSTEMD:
            systemctl("restart", node.unit)
            say(f"restarted {node.unit}")
        elif node.restart == SIGNAL:
            restart_by_signal(node.engine, renew)
        else:
            say(f"restart {node.engine} on this node: it reads its files only at its start")
        os.unlink(node.marker)


def restart_by_signal(engine: str, renew: Callable[[], None] = lambda: None) -> None:
    """End the node's engine, and wait until its service manager has started it again.

    ``renew`` is called again and again meanwhile.
    """
    before = engines_running(engine)
    if not before:
        raise EngineError(
            f"No {engine} was found that runs as a service of this node",
            "Give the installer hostPID, or restart it yourself and choose --restart=none",
        )
    listens = any(serves(engine, process) for process in before)  # false if its socket is elsewhere
    say(f"{engine} is stopped, and its supervisor starts it again")
    for process in before:
        host_processes.send(process, signal.SIGTERM)
    ended = {process.pid for process in before}
    end = time.monotonic() + RESTART_SECONDS
    while not any(
        serves(engine, process) or not listens
        for process in engines_running(engine)
        if process.pid not in ended
    ):
        if time.monotonic() > end:
            # An installer that exits while no engine runs leaves no log and no status, so this loop
            # continues.
            say_last(
                EngineError(
                    f"{engine} was ended to be restarted and doesn't serve after "
                    f"{RESTART_SECONDS:.0f} seconds",
                    f"Start it: systemctl start {engine}; its unit needs Restart=always for this, "
                    "or choose --restart=none",
                )
            )
            end = float("inf")
        renew()
        time.sleep(POLL_SECONDS)
    say(f"{engine} was restarted")


def serves(engine: str, process: Process, root: str = "") -> bool:
    """Tell whether an engine listens on its socket, by the table of its network's sockets.

    An engine that has just been started listens last, and loses what containers say until then.
    """
    table = _try_read(f"{root}/proc/{process.pid}/net/unix")
    sockets = map(proc.words, proc.lines(table))
    name = os.fsencode(f"/{engine}.sock")
    return any(each[3] == _LISTENS and each[-1].endswith(name) for each in sockets if each[3:])


def engines_running(engine: str, root: str = "") -> list[Process]:
    """Return the processes of the node's engine.

    Those are root's own and in a service's cgroup: one in a pod isn't, whatever it is called.
    """
    return [process for process in _roots(engine, root) if _is_service(process, root)]


def _roots(name: str, root: str) -> list[Process]:
    """Return root's processes of a name; ``root`` is / for us, and has the /proc of the node."""
    return host_processes.running(name, root, (0,), unseen=True)  # protects: strangers-conmon


def _is_service(process: Process, root: str) -> bool:
    cgroups = _try_read(f"{root}/proc/{process.pid}/cgroup")
    folders = cgroups.replace(b"\n", b"/").split(b"/")
    is_pods = any(folder.startswith(b"kubepods") for folder in folders)
    return any(folder.endswith(b".service") for folder in folders) and not is_pods


# What is in use -----------------------------------------------------------------------------------


def users(node: Node, root: str = "") -> list[str]:
    """Return the containers that can't be stopped or deleted without our programs.

    containerd's shims and CRI-O's conmons know by which runtime theirs was made. What can't be read
    is an error: it may be in use.
    """
    if node.engine == CONTAINERD and not os.path.isdir(node.tasks):
        raise EngineError(
            f"{node.tasks} isn't here, so it is unknown which containers need {node.folder}",
            "Mount it from the node, read-only, as overlays/remove does",
        )
    _check_tasks(node, root)
    ours = f"{node.folder}/"
    shims = [
        container
        for namespace in _entries(node.tasks)
        for container in _entries(namespace)
        if _try_read(f"{container}/runtime").startswith(os.fsencode(ours))
    ]
    conmons = [
        process.pid
        for process in _roots("conmon", root)
        if in_use.of_conmon(process, "-r", "--runtime").startswith(ours)
    ]
    found = [f"container {os.path.basename(container)}" for container in shims]
    return [*found, *(f"the container of process {pid}" for pid in conmons)]


def _check_tasks(node: Node, root: str) -> None:
    """Raise EngineError where the node's containerd notes its containers elsewhere, as k3s' does.

    The kubelet, or we ourselves, would have made the folder that was named, with nothing in it.
    """
    for shim in _roots("containerd-shim-runc-v2", root):
        namespace, container = ([*shim.option(name), ""][0] for name in ("-namespace", "-id"))
        noted = os.path.isdir(f"{node.tasks}/{namespace}/{container}")
        ended = noted or not _try_read(f"{root}/proc/{shim.pid}/cmdline")
        if namespace == "k8s.io" and not ended:  # protects: tasks-of-the-node
            raise EngineError(
                f"{node.tasks} doesn't have the container {container}, which runs on this node",
                "Set INSTALL_NODE_TASKS to where containerd notes its containers, and mount that",
            )


def remove_documents(node: Node) -> None:
    """Remove the CDI specs that name our hook.

    Without the hook no container with them starts, and they hide those of other tools.
    """
    hook = os.fsencode(f"{node.programs}/{names.CDI_HOOK}")
    for path in _entries(node.documents):
        with contextlib.suppress(OSError):  # not a readable file, so not a CDI spec
            if hook in host_files.read(path):
                os.unlink(path)
                say(f"removed {path}")


def _entries(folder: str) -> list[str]:
    """Return the paths in a folder, none where it is gone meanwhile."""
    try:
        return [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
    except _GONE:
        return []


def _try_read(path: str) -> bytes:
    """Return what a file holds, nothing where it is gone meanwhile."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except _GONE:
        return b""


# What is done -------------------------------------------------------------------------------------


def install(node: Node) -> None:
    """Put this version on the node, and tell its engine and its systemd."""
    with node.locked().held():
        check_programs(node)
        if not node.plugin:
            refuse_plugin(node)
        if not node.mps:
            refuse_mps(node)
        if not node.nri:
            NRI.refuse(node)
        if node.engine == NO_ENGINE:
            refuse_runtime(node)
        version = put_version(node)
        settle(node)  # after the programs that read these settings are on the node
        link_programs(node, version)
        if node.engine != NO_ENGINE:
            tell_engine(node)
        if node.mps:
            put_mps(node, version)
        if node.nri:
            put_nri(node, version)
        if node.plugin:
            put_plugin(node, version, os.environ)
        remove_old(node, version)
    say("done")


def remove(node: Node, *, patient: bool) -> None:
    """Remove everything, once no container uses it.

    gpu-py is removed from the engine last: before, commands must run in containers that were made
    with it. If it isn't ``patient`` and a container uses our files, they stay. A simultaneous
    installation isn't disturbed: its files are removed again.
    """
    while True:
        with node.locked().held():
            check_programs(node)
            remove_plugin(node)
            remove_mps(node)
            NRI.remove(node)
            found = users(node)
            if node.engine != NO_ENGINE:
                if found and patient:
                    keep_for_users(node)
                else:
                    forget_engine(node)
                    found = users(node)  # a container may have been started meanwhile
            if not found:
                unsettle(node)
                remove_documents(node)
                for path in (node.programs, node.versions):
                    shutil.rmtree(path, ignore_errors=not os.path.lexists(path))
                break
        if not patient:
            say(f"{node.folder} stays for now: {', '.join(found)} still need it")
            return
        wait_for_users(node)
    say(f"removed gpuhook from {node.folder}")


def wait_for_users(node: Node) -> None:
    """Return when no container uses our programs; report the remaining ones now and then."""
    reported = -REPORT_SECONDS
    began = time.monotonic()
    while found := users(node):
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            reported = now
            say(f"waiting until these have ended: {', '.join(found)}")
        # A check reads all processes of the node, and the wait may take days.
        time.sleep(max(POLL_SECONDS, REST * (now - began)))
        began = time.monotonic()


def wait_for_end() -> None:
    """Return when the pod is to end."""
    signal.sigwait(_ENDS)


ACTIONS = ("install", "stay", "remove", "wait", "remove-from-all")
_GATE = "gpuhook.gate"  # the setting that tells gpu-py that the engine's plugin is a gate


@click.command(context_settings={"auto_envvar_prefix": "INSTALL_NODE"})
@click.argument("action", type=click.Choice(ACTIONS))
@click.option("--folder", default=FOLDER, show_default=True, help="Where gpuhook is to be.")
@click.option("--engine", type=click.Choice(ENGINES), default=CONTAINERD, show_default=True)
@click.option("--config", default="", help="The engine's configuration file.")
@click.option(
    "--distribution", type=click.Choice(DISTRIBUTIONS), default="",
    help="Whose containerd it is, where that has files in a place of its own.",
)  # fmt: skip
@click.option("--set-default", is_flag=True, help="Make gpu-py the engine's default runtime.")
@click.option("--restart", type=click.Choice(RESTARTS), default=SIGNAL, show_default=True)
@click.option("--unit", default="", help="The unit for --restart=systemd.  [default: the engine]")
@click.option("--tasks", default=TASKS, help="Where containerd's shims note their containers.")
@click.option("--settings", default="", help="KEY=VALUE... for the node's config.toml.")
@click.option("--plugin", is_flag=True, help="Run the device plugin as a unit of the node.")
@click.option("--mps", is_flag=True, help="Keep MPS' control daemon by a unit; with --plugin.")
@click.option("--nri", is_flag=True, help="Run the engine's plugin as a unit of the node.")
@click.option("--remove-at-end", is_flag=True, help="stay: remove it when the pod ends.")
@click.option("--lease", default="", help="NAMESPACE/NAME of the lease on restarting an engine.")
@click.option("--holder", default="", help="This node's name, for --lease.")
@click.option("--cluster-namespace", default="", help="remove-from-all: that of the DaemonSets.")
@click.option("--runtime-class", default="", help="remove-from-all: what is deleted first.")
def cli(
    action: str,
    folder: str,
    engine: str,
    config: str,
    distribution: str,
    set_default: bool,
    restart: str,
    unit: str,
    tasks: str,
    settings: str,
    plugin: bool,
    mps: bool,
    nri: bool,
    remove_at_end: bool,
    lease: str,
    holder: str,
    cluster_namespace: str,
    runtime_class: str,
) -> None:
    """Put gpuhook on this node, or take it away again.

    install puts it there and ends, stay waits then until the pod ends, remove takes it away,
    wait does nothing until the pod ends, remove-from-all removes it from all nodes of the cluster.
    An option is also a variable: INSTALL_NODE_ENGINE.
    """
    if action in ("stay", "wait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    if mps and not plugin:
        raise click.UsageError("--mps needs --plugin: a plugin in a pod doesn't see the daemon")
    if distribution:
        if restart == SYSTEMD and not unit:
            raise click.UsageError("--restart=systemd needs --unit: servers and agents differ")
        owner = distributions.named(distribution)
        config = config or owner.read
        tasks = tasks_of(owner.state) if tasks == TASKS else tasks
    folder = os.path.abspath(folder)
    words = tuple(filter(None, settings.split(" ")))
    if nri and not any(word.startswith(f"{_GATE}=") for word in words):
        words = (*words, f"{_GATE}=true")  # protects: node-gate
    unit = unit or engine
    node = Node(
        folder, engine, config, restart, unit, set_default, tasks, words, plugin, mps, nri,
        lease=lease, holder=holder,
    )  # fmt: skip
    actions: dict[str, Callable[[], None]] = {
        "install": partial(install, node),
        "stay": partial(install, node),
        "remove": partial(remove, node, patient=True),
        "wait": lambda: None,
        "remove-from-all": partial(remove_from_all, cluster_namespace, runtime_class),
    }
    actions[action]()
    if action in ("stay", "wait"):
        wait_for_end()
    if action == "stay" and remove_at_end:
        remove(node, patient=False)


def main() -> None:
    """Run the command; errors become exit status 1."""
    try:
        cli(prog_name="install-node")
    except (GpuhookError, OSError) as error:
        say_last(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
