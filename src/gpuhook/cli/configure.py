"""``gpuhook configure``: gpuhook install for hands that know ``nvidia-ctk runtime configure``."""

import os

import click

from gpuhook import names
from gpuhook.cli import _engines as shared
from gpuhook.cli._help import command
from gpuhook.cli.install import Job, carry_out
from gpuhook.config.loader import PATH_VARIABLE
from gpuhook.engines import ENGINES, Ask, Store, installer
from gpuhook.engines.podman import HOOK_KEYS, hook_document
from gpuhook.engines.store import Target
from gpuhook.errors import EngineError
from gpuhook.host.programs import our_program

_HOOK_MODES = ("oci-hook", "hook")


@command(
    examples={
        "gpuhook configure --runtime docker --set-as-default": "Use gpu-py where nothing is said",
        "gpuhook configure --runtime containerd --dry-run": "Show the change to containerd's files",
    },
)
@click.option(
    "--runtime", "engine", default="docker", show_default=True, help="The engine to tell."
)
@click.option("--config", metavar="FILE", help="The engine's configuration file.")
@click.option("--drop-in-config", metavar="FILE", help="The file for containerd, CRI-O, podman.")
@click.option(
    "--config-mode", default="", help="What to write: config-file, or oci-hook for a hook file."
)
@click.option("--oci-hook-path", metavar="FILE", help="The hook file to write.")
@click.option(
    "--nvidia-runtime-name",
    "runtime_name",
    default=names.RUNTIME,
    show_default=True,
    help="What the engine calls it.",
)
@click.option(
    "--nvidia-runtime-path",
    "--runtime-path",
    "runtime_path",
    metavar="PATH",
    help="Where gpu-py is.  [default: beside gpuhook]",
)
@click.option(
    "--nvidia-runtime-hook-path",
    "hook_path",
    metavar="PATH",
    help="Where gpuhook-prestart is, for oci-hook.  [default: beside gpuhook]",
)
@click.option(
    "--nvidia-set-as-default",
    "--set-as-default",
    "set_default",
    is_flag=True,
    help="Make it the default runtime.",
)
@click.option(
    "--cdi.enabled",
    "--cdi.enable",
    "--enable-cdi",
    "cdi",
    is_flag=True,
    help="Switch CDI on in the engine.",
)
@click.option("--state-dir", metavar="DIR", help="Where to remember what was changed.")
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff and make none.")
def configure(
    engine: str,
    config: str | None,
    drop_in_config: str | None,
    config_mode: str,
    oci_hook_path: str | None,
    runtime_name: str,
    runtime_path: str | None,
    hook_path: str | None,
    set_default: bool,
    cdi: bool,
    state_dir: str | None,
    dry_run: bool,
) -> None:
    """Tell one container engine about gpu-py, with the options of nvidia-ctk.

    ``gpuhook install`` does the same and more, and ``gpuhook uninstall`` takes it back.
    """
    if engine not in ENGINES:
        raise EngineError(f"Unrecognized runtime '{engine}'", f"Give one of {', '.join(ENGINES)}")
    if engine == "docker" and drop_in_config:
        raise EngineError("Docker does not support drop-in configs", "Leave --drop-in-config out")
    state = shared.state_folder(state_dir, "")
    if config_mode in _HOOK_MODES:
        hook = hook_path or our_program(names.HOOK)
        _write_hook(oci_hook_path, shared.checked_program(hook, ""), state, dry_run=dry_run)
        return
    shared.check_name(runtime_name)
    program = shared.checked_program(runtime_path or our_program(names.RUNTIME), "")
    ask = Ask(
        runtimes=((runtime_name, program),),
        set_default=set_default,
        cdi=cdi,
        config=shared.absolute(config),
        drop_in=shared.absolute(drop_in_config),
        rootless=shared.is_rootless(""),
    )
    carry_out(Job((engine,), ask, state, dry_run=dry_run))


def _write_hook(path: str | None, hook: str, state: str, *, dry_run: bool) -> None:
    """Write a hook file for engines that read a hooks-dir; print it where no file is named."""
    text = hook_document(hook, "prestart", os.environ.get(PATH_VARIABLE))
    if path is None:
        click.echo(text, nl=False)
        return
    path = os.path.abspath(path)
    target = Target("podman", path, "json", text, path, HOOK_KEYS, ours=True)
    store = Store(state)
    if dry_run:
        shared.tell(installer.preview(store, [target]), dry_run=True)
        return
    with store.locked():
        shared.tell(installer.install(store, [target]), dry_run=False)
