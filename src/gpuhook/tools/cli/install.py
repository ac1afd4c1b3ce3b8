"""``gpuhook install``: configure container engines to use gpu-py."""

import contextlib
import dataclasses
import os
import sys
from typing import Any

import click

from gpuhook.base import names
from gpuhook.base.config.loader import PATH_VARIABLE, load
from gpuhook.base.errors import EngineError
from gpuhook.core.cdi import versions
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cdi.managed_specs import ManagedSpecs, kept
from gpuhook.tools.cli import _documents as documents
from gpuhook.tools.cli import _engines as shared
from gpuhook.tools.cli import _guests as guests
from gpuhook.tools.cli import _next_steps as next_steps
from gpuhook.tools.cli import _questions as questions
from gpuhook.tools.cli import _swarm as swarm
from gpuhook.tools.cli import _training as training
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import format_option, print_json, say, warn
from gpuhook.tools.engines import ask as options
from gpuhook.tools.engines import docker, installed, installer
from gpuhook.tools.engines.ask import EngineChanges, EngineRequest
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.prefix import checked, is_rootless, state_folder
from gpuhook.tools.engines.store import FileRecord, Store
from gpuhook.tools.vendors.nvidia import program_links as aliases
from gpuhook.vendors import registry

_NO_HOOK = "none"
_VARIABLE = next(iter(registry.BUILT_IN["nvidia"].VARIABLES))
_ROOTS = {"docker": "no rootless Docker of yours was found; for the system's Docker, "}


@dataclasses.dataclass(frozen=True)
class InstallOptions:
    """The command's options, named like click's parameters; None if not given."""

    engines: tuple[str, ...]
    set_default: bool | None
    gpus: bool | None
    nvidia_names: bool | None
    cdi: bool | None
    for_swarm: bool | None
    for_training: bool
    hook: str | None
    machine: str | None
    container: str | None
    variables: tuple[str, ...]
    devices: tuple[str, ...]
    rootfs: str
    config: str | None
    drop_in_config: str | None
    runtime_name: str
    runtime_path: str | None
    bin_dir: str | None
    prefix: str
    state_dir: str | None
    reload: bool
    dry_run: bool
    output_format: str


@dataclasses.dataclass(frozen=True)
class Installation:
    """One installation: the engines, their settings, and the folder of the records.

    ``documents`` are the engines that are to have managed CDI specs. ``roots`` are engines of this
    host that only root can configure. ``as_json`` requests the result as JSON. ``without_gpus``
    says that Docker's --gpus doesn't work, and that the user hasn't refused it. ``for_training``
    raises the limits of containers with devices.
    """

    engines: tuple[str, ...]
    ask: EngineRequest
    state: str
    links: str | None = None
    reload: bool = False
    dry_run: bool = False
    documents: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    as_json: bool = False
    without_gpus: bool = False
    for_training: bool = False


def chosen_engines(
    engines: tuple[str, ...], ask: EngineRequest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the engines to configure, and those that only root can configure.

    ``all`` selects the engines that are present. EngineError if no engine can be configured.
    """
    every = shared.ALL in engines
    chosen = questions.present(ask) if every else [*dict.fromkeys(engines)]
    roots = [name for name in chosen if not _may_be_told(name, ask, by_name=not every)]
    rest = tuple(name for name in chosen if name not in roots)
    if roots and not (rest and every):
        raise EngineError(
            f"Only root can change the files of {' and '.join(roots)}",
            f"Run this as root: gpuhook install --engine {roots[0]}; other users can install "
            "for rootless Docker and podman",
        )
    return rest, tuple(roots)


def _may_be_told(name: str, ask: EngineRequest, *, by_name: bool) -> bool:
    """Tell whether we may write an engine's files; a Docker given by name counts as the user's."""
    if not ask.rootless or ask.config or ask.drop_in:
        return True
    return ENGINES[name].is_users(ask) or (by_name and name == "docker")


def carry_out(job: Installation) -> None:
    """Run an installation and print its result, as text or as JSON."""
    with shared.silent() if job.as_json else contextlib.nullcontext():
        is_whole, report = _carry_out(job)
    if job.as_json:
        print_json(report)
    if not is_whole:
        sys.exit(1)


def _carry_out(job: Installation) -> tuple[bool, dict[str, Any]]:
    """Run the installation; return whether all of it succeeded, and its report for JSON."""
    if job.links is not None:
        aliases.LinkRecord(job.state, job.ask.prefix).check(job.links)
    if job.documents:
        documents.check_folders(job.ask.prefix)
    dry, prefix = job.dry_run, job.ask.prefix
    raised = training.raise_resource_limits(prefix, dry_run=dry) if job.for_training else []
    store = Store(job.state, job.ask.prefix)
    # Read under the lock, too, so that no concurrent installation's changes are lost.
    with contextlib.nullcontext() if job.dry_run else store.locked():
        before = kept(job.state, job.ask.prefix)
        records = store.records()
        asks = _asks(job, before, records)
        answers = {name: ENGINES[name].install(ask) for name, ask in asks.items()}
        targets = [target for answer in answers.values() for target in answer.targets]
        act = installer.preview if job.dry_run else installer.install
        outcomes = act(store, targets)
        shared.tell(outcomes, dry_run=job.dry_run)
        links = _make_links(job) + _take_links_back(job, records)
        kept_now = _keep_documents(job, before)
    told = [
        _tell_answer(name, answer, asks[name], job, shared.changed(name, outcomes), links)
        for name, answer in answers.items()
    ]
    for name in job.roots:
        say(f"{name}: {_ROOTS.get(name, '')}run gpuhook install --engine {name} as root")
    changed = any(each["changed"] for each in told) or bool(links or raised) or kept_now.changed
    steps = [] if job.dry_run else _next(job, told)
    if steps and not changed:
        steps.insert(0, "Nothing has changed: these settings were already in the engine's files")
    for line in steps:
        say(line)
    report = {"changed": changed, "engines": told, "links": links, "settings": raised}
    return kept_now.is_whole, {**report, "needs_root": [*job.roots], "next": steps}


def _next(job: Installation, told: list[dict[str, Any]]) -> list[str]:
    """Return the lines on what to do next."""
    record = aliases.LinkRecord(job.state, job.ask.prefix)
    gpus = {"docker": any(link.is_there for link in record.links()), "podman": _podmans_gpus(job)}
    name = job.ask.names[0]
    changed = [each["engine"] for each in told if each["changed"]] or [*job.engines]
    every = [next_steps.lines(each, name, gpus=bool(gpus.get(each))) for each in changed]
    found = list(dict.fromkeys(line for lines in every for line in lines[:-1]))
    found += every[0][-1:]
    if job.without_gpus and "docker" in job.engines:
        found.append(next_steps.how_to_get_gpus("docker"))
    if gpus["podman"] is False and options.ALIASES not in job.ask.without:
        found.append(next_steps.how_to_get_gpus("podman"))
    return found


def _podmans_gpus(job: Installation) -> bool | None:
    """Tell whether podman's --gpus works, by our CDI specs; None if this one can't have it."""
    if "podman" not in job.engines or job.ask.rootless:
        return None
    [version] = documents.versions_of(["podman"], job.ask.prefix).values()
    if not installed.serves_gpus_by_cdi("podman", version):
        return None
    specs = kept(job.state, job.ask.prefix)
    return specs is not None and "podman" in specs.engines


def _asks(
    job: Installation, before: ManagedSpecs | None, records: list[FileRecord]
) -> dict[str, EngineRequest]:
    """Return each engine's settings; CDI stays on for engines with managed CDI specs."""
    asks = {}
    for name in job.engines:
        owned = [path for record in records if record.engine == name for path in record.owned]
        asked = dataclasses.replace(job.ask, known=frozenset(shared.runtimes_in(owned)))
        if name in job.documents or _is_kept(name, job, before):
            [version] = documents.versions_of([name], job.ask.prefix).values()
            setting = versions.is_switched(name, version)
            asked = dataclasses.replace(asked, cdi=True, cdi_setting=setting)
        asks[name] = asked
    return asks


def _is_kept(name: str, job: Installation, before: ManagedSpecs | None) -> bool:
    """Tell whether an engine has managed CDI specs, and keeps them."""
    return before is not None and name in before.engines and options.CDI not in job.ask.without


def _keep_documents(job: Installation, before: ManagedSpecs | None) -> documents.Result:
    """Start, update or stop managing CDI specs for the engines."""
    site = documents.Site(job.state, job.ask.prefix, job.dry_run)
    if options.CDI in job.ask.without:
        ends = [each for each in job.engines if before and each in before.engines]
        return documents.uninstall(site, ends, before) if before and ends else documents.Result()
    engines = [each for each in job.engines if each in job.documents or _is_kept(each, job, before)]
    if not engines:
        return documents.Result()
    if job.ask.rootless:
        warn("CDI specs are for the whole host: run gpuhook install --engine all --cdi as root")
        return documents.Result()
    programs = os.path.dirname(job.ask.runtimes[0][1])
    config = before.config if before and not job.documents else job.ask.gpuhook_config
    return documents.install(site, programs, config, engines, before)


def _make_links(job: Installation) -> list[str]:
    """Create links with NVIDIA's program names if requested; return the paths of new ones.

    Links of an earlier installation are created again if they are dangling.
    """
    record = aliases.LinkRecord(job.state, job.ask.prefix)
    folder = job.links
    if folder is None and options.ALIASES not in job.ask.without:
        folder = record.folder_of_dead()
    if folder is None:
        return []
    programs = os.path.dirname(job.ask.runtimes[0][1])
    links, reasons = aliases.plan(folder, programs, job.ask.prefix, record.links())
    for reason in reasons:
        warn(reason)
    if job.dry_run:
        missing = [link for link in links if not link.is_there]
        word = "would link"
    else:
        missing = record.make(links)
        word = "linked"
    for link in missing:
        say(f"{word} {link.path} to {link.program}")
    return [link.path for link in missing]


def _take_links_back(job: Installation, records: list[FileRecord]) -> list[str]:
    """Remove the links with NVIDIA's program names if requested; return their paths."""
    if options.ALIASES not in job.ask.without:
        return []
    others = {record.engine for record in records} - set(job.engines)
    record = aliases.LinkRecord(job.state, job.ask.prefix)
    return shared.take_links_back(record, is_last=not others, dry_run=job.dry_run)


def _tell_answer(
    name: str,
    answer: EngineChanges,
    ask: EngineRequest,
    job: Installation,
    changed: list[str],
    links: list[str],
) -> dict[str, Any]:
    """Print the remaining steps for an engine; return them with the changes, for JSON.

    There are no remaining steps if nothing changed.
    """
    for warning in answer.warnings:
        warn(warning)
    reloaded = False
    if job.reload and not job.dry_run:
        reloaded = shared.reload(name, answer.targets[0].config)
    advice: list[str] = []
    if changed and (not reloaded or answer.restart):
        advice += answer.afterwards
    if name == "docker" and ask.swarm:
        advice += swarm.advice(answer.targets[0], ask.swarm, load())
    if name == "docker" and links and job.links is not None:
        # One command is enough: a restarted Docker also reads its configuration file.
        advice = [line for line in advice if line not in answer.afterwards]
        advice.append(
            "For --gpus, restart Docker, which looks for nvidia-container-runtime-hook only at "
            f"start-up: {docker.restart_command(answer.targets[0].config)} (containers that run "
            "end, unless live-restore is on)"
        )
    for line in advice if not job.dry_run else ():
        say(f"{name}: {line}")
    restart = bool(changed and answer.restart) or (name == "docker" and bool(links))
    return {
        "engine": name,
        "changed": bool(changed),
        "files": changed,
        "restart": restart,
        "advice": advice,
    }


@command(
    examples={
        "gpuhook install --engine docker --dry-run": "Show what would change",
        "gpuhook install --engine docker --gpus": "Support docker run --gpus and compose, too",
        "gpuhook install --engine podman --hook precreate": "Support every runtime of podman",
        f"gpuhook install --engine nspawn --machine box -e {_VARIABLE}=0": "Add a GPU to a machine",
        f"gpuhook install --engine lxc --container box -e {_VARIABLE}=0": "Add one to a container",
        "gpuhook install --engine all --cdi": "Let engines add devices themselves, with CDI",
    },
)
@click.option(
    "--engine", "engines", type=click.Choice([*ENGINES, shared.ALL]), multiple=True,
    help="Container engine to set up (repeatable).",
)  # fmt: skip
@click.option(
    "--set-default/--no-set-default", default=None, help="Make gpu-py the default runtime."
)
@click.option(
    "--gpus/--no-gpus", default=None,
    help="Make --gpus of docker, ctr and podman work, and devices in compose files.",
)  # fmt: skip
@click.option("--nvidia-names/--no-nvidia-names", default=None, hidden=True)
@click.option(
    "--cdi/--no-cdi", default=None, help="Write CDI specs, keep them up to date, and enable CDI."
)
@click.option(
    "--swarm/--no-swarm", "for_swarm", default=None,
    help="Offer the devices as resources of a Docker swarm node.",
)  # fmt: skip
@click.option(
    "--for-training", is_flag=True,
    help="Raise memlock, stack and /dev/shm of containers with devices, in config.toml.",
)  # fmt: skip
@click.option(
    "--hook", type=click.Choice(["prestart", "precreate", _NO_HOOK]),
    help="Run the hook in all of podman's containers, with any runtime.",
)  # fmt: skip
@click.option("--machine", metavar="NAME", help="The nspawn machine to add devices to.")
@click.option("--container", metavar="NAME", help="The LXC container to add devices to.")
@click.option(
    "-e", "--env", "variables", metavar="NAME[=VALUE]", multiple=True,
    help="For it: environment variable that requests devices (repeatable).",
)  # fmt: skip
@click.option(
    "--device", "devices", metavar="KIND=NAME", multiple=True,
    help="For it: CDI name of a device (repeatable).",
)  # fmt: skip
@click.option(
    "--rootfs", metavar="DIR", default="",
    help="Its root folder.  [default: /var/lib/machines/NAME, or that of the container]",
)  # fmt: skip
@click.option("--config", metavar="FILE", help="Configuration file of the engine.")
@click.option(
    "--drop-in-config", metavar="FILE", help="Drop-in file of containerd, CRI-O or podman."
)
@click.option(
    "--runtime-name", default=names.RUNTIME, show_default=True, help="Name of gpu-py in the engine."
)
@click.option("--runtime-path", metavar="PATH", help="Path of gpu-py.  [default: next to gpuhook]")
@click.option(
    "--bin-dir", metavar="DIR", help="Folder for NVIDIA's program names.  [default: /usr/local/bin]"
)
@click.option("--prefix", metavar="DIR", default="", help="Folder to use as /.")
@click.option(
    "--state-dir",
    metavar="DIR",
    help="Folder for the records of changes.  [default: /var/lib/gpuhook]",
)
@click.option("--reload", is_flag=True, help="Reload the running Docker's configuration.")
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff without making them.")
@format_option
def install(**given: Any) -> None:
    """Set up container engines to use gpu-py.

    Earlier installations are kept: options add to them, and options that start with --no- remove
    a part (--hook none removes the hook). Without new options, nothing changes. ``gpuhook
    uninstall`` removes everything.

    Without --engine, a terminal is asked which engines to set up. --gpus (formerly
    --nvidia-names) installs NVIDIA's program names, for docker run --gpus, devices in a compose
    file, ctr run --gpus and other callers of these programs, and a runtime named nvidia, unless
    there is one. It includes --cdi for engines whose version needs that for --gpus. --cdi writes
    CDI specs, with which engines add GPUs without gpu-py, and keeps them up to date. --swarm
    makes each device a resource of this node, which services can request. It also makes gpu-py
    the default runtime, because a service can't select one. --for-training sets the limits of
    [gpuhook.containers] that config.toml doesn't set, as gpuhook config set does.
    """
    told = _renamed(InstallOptions(**given))
    _check(told)
    guest = guests.of(told)
    ask = _asked(told, guest)
    as_json = told.output_format == "json"
    interactive = questions.can_ask() and not as_json
    engines = told.engines or questions.engines(ask, interactive=interactive)
    chosen, roots = chosen_engines(engines, ask)
    if told.for_swarm and "docker" not in chosen:
        raise click.UsageError("--swarm is only for Docker: it needs --engine docker.")
    state, folder = state_folder(told.state_dir, ask.prefix), _links_folder(told.bin_dir, ask)
    gpus, lacks = told.gpus, False
    if gpus is None and "docker" in chosen:
        gpus, lacks = _gpus_unsaid(ask, state, folder, ask_user=interactive and not told.dry_run)
    ask = _with_nvidias_runtime(ask, state, folder if gpus else None)
    carry_out(
        Installation(
            chosen, ask, state, folder if gpus else None, told.reload, told.dry_run,
            _with_specs(told, chosen, ask.prefix, gpus=bool(gpus)), roots, as_json, lacks,
            told.for_training,
        )
    )  # fmt: skip
    if guest and not told.dry_run:
        guests.support(*told.engines).remember(state, guest)


def _renamed(told: InstallOptions) -> InstallOptions:
    """Return the options with the value of --nvidia-names, the old name of --gpus."""
    if told.nvidia_names is None:
        return told
    if told.gpus not in (None, told.nvidia_names):
        raise click.UsageError("--nvidia-names is the old name of --gpus: leave it out.")
    return dataclasses.replace(told, gpus=told.nvidia_names)


def _with_nvidias_runtime(ask: EngineRequest, state: str, folder: str | None) -> EngineRequest:
    """Return the settings with a runtime ``nvidia`` for --gpus; none without a folder for links.

    Docker gets the path of a link, because dev containers look for NVIDIA's name in it.
    """
    record = aliases.LinkRecord(state, ask.prefix)
    if folder is None:
        return dataclasses.replace(ask, links=record.runtimes())
    program = ask.runtimes[0][1]
    links, _ = aliases.plan(folder, os.path.dirname(program), ask.prefix, record.links())
    also = ((options.NVIDIAS_NAME, program),)
    return dataclasses.replace(ask, also=also, links=record.runtimes(links))


def _gpus_unsaid(
    ask: EngineRequest, state: str, folder: str, *, ask_user: bool
) -> tuple[bool | None, bool]:
    """Return whether to add --gpus to Docker, and whether Docker is left without it.

    It is left unchanged where an earlier installation, or NVIDIA's toolkit, provides it.
    """
    ours = aliases.LinkRecord(state, ask.prefix).links()
    if any(link.is_there for link in ours):
        return None, False
    programs = os.path.dirname(ask.runtimes[0][1])
    _, theirs = aliases.plan(folder, programs, ask.prefix, ours)
    if ask_user:
        return questions.gpus(folder, default=not theirs), False
    return None, not theirs


def _with_specs(
    told: InstallOptions, chosen: tuple[str, ...], prefix: str, *, gpus: bool
) -> tuple[str, ...]:
    """Return the engines for which to manage CDI specs: if requested, or needed for --gpus."""
    if told.cdi:
        return chosen
    found = documents.versions_of(chosen, prefix) if gpus and told.cdi is None else {}
    for engine, version in found.items():
        if said := installed.missing_gpus(engine, version):
            warn(said)
    by_cdi = [
        each for each, version in found.items() if installed.serves_gpus_by_cdi(each, version)
    ]
    for engine in by_cdi if told.output_format == "text" else ():
        say(f"{engine} {found[engine]} serves --gpus by CDI specs: this includes --cdi for it")
    return tuple(by_cdi)


def _check(told: InstallOptions) -> None:
    """Raise UsageError for conflicting options, and warn of one without effect."""
    if (told.config or told.drop_in_config) and (
        len(told.engines) != 1 or shared.ALL in told.engines
    ):
        raise click.UsageError("--config and --drop-in-config need one --engine.")
    every = told.engines or (shared.ALL,)
    if told.hook not in (None, _NO_HOOK) and not {shared.ALL, "podman"} & {*every}:
        warn("--hook is only for podman, and has no effect on other engines")
    shared.check_name(told.runtime_name)


def _asked(told: InstallOptions, guest: Any) -> EngineRequest:
    """Return the settings for engines; EngineError if gpu-py can't be executed."""
    prefix = told.prefix and os.path.abspath(told.prefix)

    def path_of(option: str | None) -> str | None:
        path = shared.absolute(option)
        return path and checked(prefix, path)

    program = shared.checked_program(told.runtime_path or our_program(names.RUNTIME), told.prefix)
    return EngineRequest(
        runtimes=((told.runtime_name, program),),
        set_default=bool(told.set_default),
        cdi=bool(told.cdi),
        swarm=swarm.resources(load()) if told.for_swarm else (),
        config=path_of(told.config),
        drop_in=path_of(told.drop_in_config),
        prefix=prefix,
        hook=None if told.hook == _NO_HOOK else told.hook,
        hook_path=os.path.join(os.path.dirname(program), names.HOOK),
        gpuhook_config=shared.absolute(os.environ.get(PATH_VARIABLE)),
        rootless=is_rootless(told.prefix),
        without=_taken_back(told),
        units=guests.units(told, guest),
    )


def _taken_back(told: InstallOptions) -> frozenset[str]:
    """Return the options of earlier installations to remove."""
    said = {
        options.SET_DEFAULT: told.set_default is False,
        options.ALIASES: told.gpus is False,
        options.CDI: told.cdi is False,
        options.SWARM: told.for_swarm is False,
        options.HOOK: told.hook == _NO_HOOK,
    }
    return frozenset(option for option, is_said in said.items() if is_said)


def _links_folder(bin_dir: str | None, ask: EngineRequest) -> str:
    """Return the folder for NVIDIA's program names."""
    usual = os.path.expanduser("~/.local/bin") if ask.rootless else aliases.DEFAULT_FOLDER
    return checked(ask.prefix, os.path.abspath(bin_dir or ask.system(usual)))
