"""``gpuhook runtime configure``: gpuhook install with the options of nvidia-ctk."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpuhook.base import names
from gpuhook.base.config.loader import PATH_VARIABLE
from gpuhook.base.errors import EngineError
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli import _engines as shared
from gpuhook.tools.cli._help import command, group
from gpuhook.tools.cli.install import Installation, carry_out
from gpuhook.tools.engines import installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.podman import HOOK_KEYS, hook_document
from gpuhook.tools.engines.prefix import is_rootless, state_folder
from gpuhook.tools.engines.store import Store, TargetFile
from gpuhook.tools.vendors.nvidia.program_links import LinkRecord

_HOOK_MODES = ("oci-hook", "hook")

Function = TypeVar("Function", bound=Callable[..., Any])


def switch(*names: str, **settings: Any) -> Callable[[Function], Function]:
    """Return a boolean click option as in Go: --dry-run, or --dry-run=true."""
    return click.option(
        *names, type=click.BOOL, is_flag=False, flag_value="true", default=False,
        metavar="[true|false]", **settings,
    )  # fmt: skip


def options(runtime_name: str) -> Callable[[Function], Function]:
    """Return a decorator that adds the options of nvidia-ctk runtime configure."""
    every: tuple[Callable[[Any], Any], ...] = (
        click.option(
            "--runtime", "engine", default="docker", show_default=True, metavar="NAME",
            shell_complete=completing.engines, help="Engine to set up.",
        ),
        click.option("--config", metavar="FILE", help="Configuration file of the engine."),
        click.option(
            "--drop-in-config", metavar="FILE",
            help="Drop-in file of containerd, CRI-O or podman.",
        ),
        click.option(
            "--config-mode", default="", metavar="WORD",
            help="Kind of file to write: config-file, or oci-hook for a hook file.",
        ),
        click.option("--oci-hook-path", metavar="FILE", help="Hook file to write."),
        click.option(
            "--nvidia-runtime-name", "runtime_name", default=runtime_name, show_default=True,
            help="Name of gpu-py in the engine.",
        ),
        click.option(
            "--nvidia-runtime-path", "--runtime-path", "runtime_path", metavar="PATH",
            help="Path of gpu-py.  [default: next to gpuhook]",
        ),
        click.option(
            "--nvidia-runtime-hook-path", "hook_path", metavar="PATH",
            help="Path of gpuhook-prestart, for oci-hook.  [default: next to gpuhook]",
        ),
        switch(
            "--nvidia-set-as-default", "--set-as-default", "set_default",
            help="Make gpu-py the default runtime.",
        ),
        switch(
            "--cdi.enabled", "--cdi.enable", "--enable-cdi", "cdi",
            help="Enable CDI in the engine.",
        ),
        click.option("--state-dir", metavar="DIR", help="Folder for the records of changes."),
    )  # fmt: skip

    def add(function: Function) -> Function:
        for option in reversed(every):
            function = option(function)
        return function

    return add


@group()
def runtime() -> None:
    """Configure an engine with the options of nvidia-ctk."""


@command(
    examples={
        "gpuhook runtime configure --runtime docker --set-as-default": (
            "Make gpu-py the default runtime"
        ),
        "gpuhook runtime configure --runtime containerd --dry-run": (
            "Show the change to containerd's files"
        ),
    },
)
@options(names.RUNTIME)
@switch("--dry-run", help="Print the changes as a diff without making them.")
def configure(**given: Any) -> None:
    """Set up one container engine to use gpu-py, with the options of nvidia-ctk.

    ``gpuhook install`` does the same and more; ``gpuhook uninstall`` removes the changes.
    """
    dry_run = given.pop("dry_run")
    job = job_of(**given)
    if job is None:
        write_hook(dry_run, **given)
    else:
        carry_out(dataclasses.replace(job, dry_run=dry_run))


def job_of(
    engine: str,
    config: str | None,
    drop_in_config: str | None,
    config_mode: str,
    runtime_name: str,
    runtime_path: str | None,
    set_default: bool,
    cdi: bool,
    state_dir: str | None,
    **_: Any,
) -> Installation | None:
    """Return the installation requested by the options, None for a hook file.

    EngineError if it isn't possible.
    """
    every = [name for name, each in ENGINES.items() if each.has_runtimes]
    if engine not in every:
        raise EngineError(f"Unrecognized runtime '{engine}'", f"Give one of {', '.join(every)}")
    if engine == "docker" and drop_in_config:
        raise EngineError("Docker does not support drop-in configs", "Leave --drop-in-config out")
    if config_mode in _HOOK_MODES:
        return None
    shared.check_name(runtime_name)
    program = runtime_path or our_program(names.RUNTIME)
    program = shared.checked_program(program, "", later=runtime_path is not None)
    state = state_folder(state_dir, "")
    ask = EngineRequest(
        runtimes=((runtime_name, program),),
        set_default=set_default,
        cdi=cdi,
        config=shared.absolute(config),
        drop_in=shared.absolute(drop_in_config),
        rootless=is_rootless(""),
        leads=runtime_path is None,
        links=LinkRecord(state).runtimes(),
    )
    return Installation((engine,), ask, state)


def write_hook(
    dry_run: bool, hook_path: str | None, oci_hook_path: str | None, state_dir: str | None, **_: Any
) -> None:
    """Write a hook file for engines that read a hooks-dir; print it if no file is named."""
    hook = shared.checked_program(hook_path or our_program(names.HOOK), "")
    text = hook_document(hook, "prestart", os.environ.get(PATH_VARIABLE))
    if oci_hook_path is None:
        click.echo(text, nl=False)
        return
    path = os.path.abspath(oci_hook_path)
    target = TargetFile("podman", path, "json", text, path, HOOK_KEYS, ours=True)
    store = Store(state_folder(state_dir, ""))
    if dry_run:
        shared.tell(installer.preview(store, [target]), dry_run=True)
        return
    with store.locked():
        shared.tell(installer.install(store, [target]), dry_run=False)


runtime.add_command(configure)
