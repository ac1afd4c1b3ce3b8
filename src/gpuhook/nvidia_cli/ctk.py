"""nvidia-ctk's command line, implemented by gpuhook for existing scripts.

It is started as gpuhook-ctk, to which the name nvidia-ctk is a link. The requested output goes to
standard output, everything else to standard error. The exit status is 0 or 1.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
from typing import Any, NoReturn

import click

from gpuhook import __version__
from gpuhook.base import names
from gpuhook.base.errors import CdiError, EngineError, GpuhookError, printable, shown
from gpuhook.monitor.host import streams
from gpuhook.nvidia_cli import ctk_cdi, ctk_config, ctk_system
from gpuhook.nvidia_cli.ctk_words import PROGRAM, SERVED_VERSION, say
from gpuhook.tools.cli import runtime as configuring
from gpuhook.tools.cli._help import Group
from gpuhook.tools.cli.cdi_generate import transform
from gpuhook.tools.cli.install import carry_out
from gpuhook.tools.engines import installer
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store

_RUNTIME_NAME = "nvidia"
_SOURCES = ("file", "command")


def main() -> NoReturn:
    """Run this process's command line and exit."""
    if os.geteuid() == 0:
        os.umask(names.UMASK)
    streams.run(PROGRAM, lambda: sys.exit(status_of(sys.argv[1:])))


def status_of(argv: list[str]) -> int:
    """Run a command line; return the exit status."""
    try:
        status = ctk.main(argv, prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = 1
    except click.Abort:
        status = 1
    except GpuhookError as error:
        click.echo(f"{PROGRAM}: {printable(str(error))}", err=True)
        status = 1
    return status if isinstance(status, int) else 0


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        f"{PROGRAM} runtime configure --runtime=docker": "Add gpu-py to Docker's configuration",
        f"{PROGRAM} cdi generate --output=/etc/cdi/nvidia.yaml": "Write a CDI spec",
    },
)
@click.version_option(
    SERVED_VERSION, "-v", "--version",
    message=f"NVIDIA Container Toolkit CLI version {SERVED_VERSION}\ncommit: gpuhook {__version__}",
)  # fmt: skip
@click.option("-d", "--debug", is_flag=True, envvar="NVIDIA_CTK_DEBUG", help="Has no effect.")
@click.option(
    "-q", "--quiet", is_flag=True, envvar="NVIDIA_CTK_QUIET",
    help="Print only errors and the requested output.",
)  # fmt: skip
@click.option(
    "--config", "config_path", metavar="FILE",
    envvar=["NVIDIA_CTK_CONFIG", "GPUHOOK_CONFIG", "NVIDIA_CTK_CONFIG_FILE_PATH"],
    help="The configuration file to use.  [default: gpuhook's config.toml]",
)  # fmt: skip
def ctk(**_: Any) -> None:
    """Run nvidia-ctk's commands with gpuhook.

    gpuhook's own commands do more: gpuhook install, gpuhook cdi, gpuhook config.
    """


@ctk.group()
def runtime() -> None:
    """Configure container engines to use gpu-py."""


@runtime.command(
    examples={
        f"{PROGRAM} runtime configure --runtime=docker --set-as-default": "Make it the default",
        f"{PROGRAM} runtime configure --runtime=containerd --dry-run": "Print the new files",
    },
)
@configuring.options(_RUNTIME_NAME)
@click.option(
    "--config-source", multiple=True, metavar="WORD",
    help="Has no effect: gpuhook reads the engine's files.",
)  # fmt: skip
@click.option("--executable-path", metavar="PATH", help="Has no effect: no engine is run.")
@configuring.switch("--dry-run", help="Print the resulting files, and change none.")
def configure(
    dry_run: bool, config_source: tuple[str, ...], executable_path: str | None, **given: Any
) -> None:
    """Configure a container engine to use gpu-py, under the name nvidia.

    The changes are recorded, and gpuhook uninstall reverts them.
    """
    for word in config_source:
        if word.partition("=")[0] not in _SOURCES:
            raise EngineError(
                f"{shown(word)} isn't a source of a configuration",
                f"Give {' or '.join(_SOURCES)}, or leave --config-source out",
            )
        if word == "command":
            say("warning: --config-source=command has no effect: the engine's files are read")
    if executable_path:
        say("warning: --executable-path has no effect: no engine is run")
    given["runtime_path"] = _absolute(given["runtime_path"])
    job = configuring.job_of(**given)
    if job is None:
        configuring.write_hook(dry_run, **given)
    elif dry_run:
        [engine] = job.engines
        answer = ENGINES[engine].install(job.ask)
        for outcome in installer.preview(Store(job.state), [*answer.targets]):
            click.echo((outcome.change.new or b"").decode(), nl=False)
    else:
        with _to_standard_error():
            carry_out(dataclasses.replace(job, dry_run=False))


def _absolute(program: str | None) -> str | None:
    """Return the path of a program that may be given by only its name."""
    if program is None or "/" in program:
        return program
    found = shutil.which(program)
    if found is None:
        raise EngineError(
            f"There is no program {shown(program)} on PATH",
            f"Give a full path, or leave it out for {names.RUNTIME}",
        )
    return os.path.abspath(found)


@contextlib.contextmanager
def _to_standard_error() -> Any:
    """Redirect progress messages to standard error, or discard them with --quiet."""
    quiet = click.get_current_context().find_root().params["quiet"]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: SIM117 - the next one uses it
        with contextlib.redirect_stdout(nowhere if quiet else sys.stderr):
            yield


@ctk.group()
def cdi() -> None:
    """Generate CDI specs of NVIDIA devices, and list CDI devices."""


cdi.add_command(ctk_cdi.generate)
cdi.add_command(ctk_cdi.list_)
cdi.add_command(transform)
ctk.add_command(ctk_config.config)
ctk.add_command(ctk_system.system)


@ctk.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    hidden=True,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def hook(words: tuple[str, ...]) -> None:
    """Refuse to run as the hook of a CDI spec that NVIDIA's toolkit has generated."""
    del words
    raise CdiError(
        f"A CDI spec calls {PROGRAM} hook, but gpuhook's CDI specs call {names.CDI_HOOK}",
        "Generate the spec again with `gpuhook cdi generate`, and delete the other one",
    )


if __name__ == "__main__":
    main()
