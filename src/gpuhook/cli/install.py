"""``gpuhook install``: tell container engines about gpu-py."""

import contextlib
import dataclasses
import os
import sys

import click

from gpuhook import names
from gpuhook.cdi import versions
from gpuhook.cdi.kept import Kept, kept
from gpuhook.cli import _documents as documents
from gpuhook.cli import _engines as shared
from gpuhook.cli import _files as place
from gpuhook.cli import _swarm as swarm
from gpuhook.config import load
from gpuhook.config.loader import PATH_VARIABLE
from gpuhook.engines import ENGINES, Answer, Ask, Store, installer
from gpuhook.errors import EngineError
from gpuhook.host import files as host_files
from gpuhook.host.programs import our_program
from gpuhook.nvidia_cli import links as aliases

_NVIDIAS_NAME = "nvidia"


@dataclasses.dataclass(frozen=True)
class Job:
    """One installation: the engines, what each is told, and where that is remembered.

    ``documents`` says whether CDI documents are to be kept for the engines.
    """

    engines: tuple[str, ...]
    ask: Ask
    state: str
    links: str | None = None
    reload: bool = False
    dry_run: bool = False
    documents: bool = False


def chosen_engines(engines: tuple[str, ...], ask: Ask) -> tuple[str, ...]:
    """Return the engines meant: ``all`` are those that are present."""
    if shared.ALL not in engines:
        return tuple(dict.fromkeys(engines))
    found = tuple(name for name, engine in ENGINES.items() if engine.is_present(ask))
    if not found:
        raise EngineError(
            "No container engine was found", f"Name one with --engine: {', '.join(ENGINES)}"
        )
    return found


def carry_out(job: Job) -> None:
    """Do an installation and print what was done."""
    if job.links is not None:
        host_files.check_way(job.links)
    if job.documents:
        documents.check_folders(job.ask.prefix)
    store = Store(job.state)
    # Read under the lock too: what another installation writes meanwhile must not be lost.
    with contextlib.nullcontext() if job.dry_run else store.locked():
        before = kept(job.state)
        asks = _asks(job, before)
        answers = {name: ENGINES[name].install(ask) for name, ask in asks.items()}
        targets = [target for answer in answers.values() for target in answer.targets]
        act = installer.preview if job.dry_run else installer.install
        shared.tell(act(store, targets), dry_run=job.dry_run)
        _make_links(job)
        is_done = _keep_documents(job, before)
    for name, answer in answers.items():
        _tell_answer(name, answer, asks[name], job)
    if not is_done:
        sys.exit(1)


def _asks(job: Job, before: Kept | None) -> dict[str, Ask]:
    """Return what each engine is asked: CDI as well where documents have been kept for it."""
    asks = {}
    for name in job.engines:
        asks[name] = job.ask
        if job.documents or (before and name in before.engines):
            [version] = documents.versions_of([name], job.ask.prefix).values()
            setting = versions.is_switched(name, version)
            asks[name] = dataclasses.replace(job.ask, cdi=True, cdi_setting=setting)
    return asks


def _keep_documents(job: Job, before: Kept | None) -> bool:
    """Keep CDI documents for the engines that ask, or have asked; False where one failed."""
    ask = job.ask
    engines = [each for each in job.engines if job.documents or (before and each in before.engines)]
    if not engines:
        return True
    if ask.rootless:
        shared.warn("CDI documents are for the whole machine: have root run gpuhook install --cdi")
        return True
    site = documents.Site(job.state, ask.prefix, job.dry_run)
    programs = os.path.dirname(ask.runtimes[0][1])
    config = before.config if before and not job.documents else ask.gpuhook_config
    return documents.install(site, programs, config, engines, before)


def _make_links(job: Job) -> None:
    if job.links is None:
        return
    programs = os.path.dirname(job.ask.runtimes[0][1])
    links, reasons = aliases.plan(job.links, programs, job.ask.prefix)
    for reason in reasons:
        shared.warn(reason)
    if job.dry_run:
        missing = [link for link in links if not link.is_there]
        word = "would link"
    else:
        missing = aliases.LinkRecord(job.state).make(links)
        word = "linked"
    for link in missing:
        click.echo(f"{word} {link.path} to {link.program}")


def _tell_answer(name: str, answer: Answer, ask: Ask, job: Job) -> None:
    for warning in answer.warnings:
        shared.warn(warning)
    if job.dry_run:
        return
    reloaded = job.reload and shared.reload(name, answer.targets[0].config)
    if not reloaded or answer.restart:
        for line in answer.afterwards:
            click.echo(f"{name}: {line}")
    if name == "docker" and ask.swarm:
        for line in swarm.advice(answer.targets[0], ask.swarm, load()):
            click.echo(f"{name}: {line}")
    if name == "docker" and job.links is not None:
        click.echo(
            "docker: For --gpus, restart Docker, which looks for "
            "nvidia-container-runtime-hook only at its start: systemctl restart docker"
        )


@click.command()
@click.option(
    "--engine", "engines", type=click.Choice([*ENGINES, shared.ALL]), multiple=True,
    default=[shared.ALL], show_default=True, help="The engine; may be repeated.",
)  # fmt: skip
@click.option("--set-default", is_flag=True, help="Make gpu-py the default runtime.")
@click.option("--nvidia-names", is_flag=True, help="Serve NVIDIA's program names too.")
@click.option("--cdi", is_flag=True, help="Keep CDI documents for it, and switch CDI on.")
@click.option(
    "--swarm", "for_swarm", is_flag=True, help="Have Docker offer the devices to a swarm."
)
@click.option(
    "--hook", type=click.Choice(["prestart", "precreate"]),
    help="Have podman call the hook for all containers, whatever their runtime.",
)  # fmt: skip
@click.option(
    "--files", is_flag=True,
    help="Place the manual pages, completion and systemd units, and tell no engine.",
)  # fmt: skip
@click.option("--config", metavar="FILE", help="The engine's configuration file.")
@click.option("--drop-in-config", metavar="FILE", help="The file for containerd, CRI-O, podman.")
@click.option("--runtime-name", default=names.RUNTIME, show_default=True)
@click.option("--runtime-path", metavar="PATH", help="Where gpu-py is.  [default: beside gpuhook]")
@click.option("--bin-dir", metavar="DIR", help="For NVIDIA's names.  [default: /usr/local/bin]")
@click.option("--prefix", metavar="DIR", default="", help="A folder that stands for /.")
@click.option("--state-dir", metavar="DIR", help="Where to remember what was changed.")
@click.option("--reload", is_flag=True, help="Have the running Docker read its configuration.")
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff and make none.")
def install(
    engines: tuple[str, ...],
    set_default: bool,
    nvidia_names: bool,
    cdi: bool,
    for_swarm: bool,
    hook: str | None,
    files: bool,
    config: str | None,
    drop_in_config: str | None,
    runtime_name: str,
    runtime_path: str | None,
    bin_dir: str | None,
    prefix: str,
    state_dir: str | None,
    reload: bool,
    dry_run: bool,
) -> None:
    """Tell container engines about gpu-py.

    Everything that is changed is remembered, and ``gpuhook uninstall`` takes it back. With --cdi
    documents are written and kept up to date, by which engines give GPUs without gpu-py. With
    --swarm each device becomes a resource of this node, which services ask for, and gpu-py the
    default runtime, because a service can't choose one.
    """
    if files:
        place.install(place.site(prefix, state_dir, dry_run=dry_run))
        return
    if (config or drop_in_config) and (len(engines) != 1 or shared.ALL in engines):
        raise click.UsageError("--config and --drop-in-config need one --engine.")
    shared.check_name(runtime_name)
    program = shared.checked_program(runtime_path or our_program(names.RUNTIME), prefix)
    ask = Ask(
        runtimes=((runtime_name, program),),
        also=((_NVIDIAS_NAME, program),) if nvidia_names else (),
        set_default=set_default,
        cdi=cdi,
        swarm=swarm.resources(load()) if for_swarm else (),
        config=shared.absolute(config),
        drop_in=shared.absolute(drop_in_config),
        prefix=prefix and os.path.abspath(prefix),
        hook=hook,
        hook_path=os.path.join(os.path.dirname(program), names.HOOK),
        gpuhook_config=shared.absolute(os.environ.get(PATH_VARIABLE)),
        rootless=shared.is_rootless(prefix),
    )
    folder = os.path.expanduser("~/.local/bin") if ask.rootless else aliases.DEFAULT_FOLDER
    links = os.path.abspath(bin_dir or ask.system(folder)) if nvidia_names else None
    state = shared.state_folder(state_dir, ask.prefix)
    chosen = chosen_engines(engines, ask)
    if for_swarm and "docker" not in chosen:
        raise click.UsageError("--swarm is Docker's: it needs --engine docker.")
    carry_out(Job(chosen, ask, state, links, reload, dry_run, documents=cdi))
