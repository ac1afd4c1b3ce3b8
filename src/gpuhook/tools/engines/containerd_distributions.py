"""Changes for containerd where a distribution writes its configuration file.

k3s and RKE2 import a folder since March 2026; for older ones our runtimes go into their template.
The template of MicroK8s is edited in place, because placeholders are replaced only there. k0s
merges the files of its own folder.
"""

import os
from dataclasses import dataclass, replace

from gpuhook.base.errors import EngineError
from gpuhook.core.cdi.versions import order
from gpuhook.tools.engines import distributions, installed, placeholders, toml_text, unit_text
from gpuhook.tools.engines.ask import EngineChanges, EngineRequest
from gpuhook.tools.engines.containerd_files import restart
from gpuhook.tools.engines.containerd_settings import (
    ENGINE,
    MainConfig,
    Version,
    add_runtimes,
    effective_cri,
    following,
    imported_files,
    imports_of,
    matches,
    owned_paths,
    programs_of,
    read_source,
    whole_file,
    with_tables,
)
from gpuhook.tools.engines.distributions import Distribution
from gpuhook.tools.engines.files import has_header, read, read_text
from gpuhook.tools.engines.merge import Document, get
from gpuhook.tools.engines.prefix import checked
from gpuhook.tools.engines.store import TargetFile

_NAME = "99-gpuhook.toml"
# Written by earlier versions, which treated a template as the file.
_OLD_DROP_IN = "conf.d/99-gpuhook.toml"
_BASE = '{{ template "base" . }}\n'
# The first version of each release line whose templates support _BASE, in k3s or RKE2.
_KNOW_BASE = {"1.24": "1.24.17", "1.25": "1.25.13", "1.26": "1.26.8", "1.27": "1.27.5"}
_NO_BASE_BEFORE, _BASE_SINCE = "1.24", "1.28.1"
_VERSION_3 = (2, 0)  # the containerd whose template is config-v3.toml.tmpl, if there is one
_BLOCK = "unit"  # the syntax of a file with a block of ours at its end
_TABLE = ".containerd.runtimes."


@dataclass(frozen=True)
class DropIn:
    """A drop-in file that the distribution's containerd reads without an import of ours."""

    source: MainConfig
    path: str


def place(
    owner: Distribution, path: str, ask: EngineRequest, program: Version
) -> EngineChanges | DropIn:
    """Return the changes where the distribution ``owner`` writes the file at ``path``.

    EngineError, with a remedy, if no change is possible.
    """
    if owner.name == distributions.MICROK8S:
        return _microk8s(owner, path, ask, program)
    if read(path) is None:
        raise EngineError(
            f"{path} doesn't exist yet: {owner.name} writes it when it starts, and gpuhook's "
            "changes depend on it",
            f"Start {owner.name} once, and run this again",
        )
    source = read_source(path, program)
    if owner.name == distributions.K0S:
        folder = os.path.join(os.path.dirname(path), "containerd.d")
        return _drop_in(owner, replace(source, merged_by_owner=True), folder, ask)
    return _ranchers(owner, with_tables(source, ask), ask)


def _drop_in(owner: Distribution, source: MainConfig, folder: str, ask: EngineRequest) -> DropIn:
    path = checked(ask.prefix, os.path.join(folder, _NAME))
    if ask.drop_in and os.path.dirname(os.path.abspath(ask.drop_in)) != folder:
        raise EngineError(
            f"{owner.name} reads drop-in files only from {folder}",
            f"Name a file there with --drop-in-config, such as {path}, or leave it out",
        )
    return DropIn(source, ask.drop_in or path)


# MicroK8s ----------------------------------------------------------------------------------------


def _microk8s(
    owner: Distribution, path: str, ask: EngineRequest, program: Version
) -> EngineChanges:
    """Edit the template, keeping its placeholders unchanged."""
    template = checked(ask.prefix, distributions.template_of(path))
    if ask.drop_in:
        raise EngineError(
            f"{owner.name} replaces placeholders only in {template}: no other file can be used",
            "Leave --drop-in-config out",
        )
    source = with_tables(read_source(template, program), ask)
    _check_literal(ask, owner)
    later = [
        name
        for name, document in imported_files(source, ask).items()
        if isinstance(get(document, source.cri), dict) and not has_header(read(name))
    ]
    unmerged = f"{', '.join(later)} is imported by {template}, and containerd before 2.1 takes the"
    unmerged += " CRI settings only from the last file: those in the template are ignored"
    remedy = "Move those settings into the template"
    if later and program is not None and not source.merges:
        raise EngineError(unmerged, f"{remedy}, and run this again")
    warnings = [f"{unmerged}. {remedy}"] if later and program is None else []
    settings = get(source.document, source.cri) or {}
    ask = following(source, ask, settings, settings, in_place=True)
    old = checked(ask.prefix, os.path.join(os.path.dirname(path), _OLD_DROP_IN))
    targets: list[TargetFile] = []
    if has_header(read(old)):
        written = read_text(old) or ""
        targets.append(TargetFile(ENGINE, old, "toml", written, path, ours=True, gone=True))
        source = _without_import(source, os.path.dirname(old))
    made = whole_file(source, ask)
    targets.insert(0, replace(made, config=path))
    return EngineChanges(tuple(targets), (restart(path),), tuple(warnings), restart=True)


def _without_import(source: MainConfig, folder: str) -> MainConfig:
    """Return a template without the import that an earlier version added to it."""
    document = dict(source.document)
    imports = [each for each in document.pop("imports", []) if each != f"{folder}/*.toml"]
    if imports:
        document["imports"] = imports
    text = toml_text.edited(source.text, document, source.path)
    return replace(source, document=document, text=text)


# k3s and RKE2 ------------------------------------------------------------------------------------


def _ranchers(
    owner: Distribution, source: MainConfig, ask: EngineRequest
) -> EngineChanges | DropIn:
    folder = os.path.dirname(source.path)
    template = checked(ask.prefix, os.path.join(folder, _template(owner, source)))
    others = unit_text.parse(read_text(template) or "", template)
    imported = _imported_folder(source, ask)
    if source.merges and imported and unit_text.OURS not in others:
        return _drop_in(owner, source, imported, ask)
    if ask.drop_in:
        raise EngineError(
            f"This {owner.name} writes {source.path} without an import of {ask.drop_in}",
            f"Leave --drop-in-config out: the runtime goes into {template}",
        )
    if read(template) is None:
        _check_base(owner, template)
        others[unit_text.OTHERS] = _BASE
    return _block(owner, source, ask, template, others)


def _template(owner: Distribution, source: MainConfig) -> str:
    """Return the name of the template in effect at the next start.

    The older one is for containerd 1.7 and before; newer containerds use it as well, if there is
    no template of version 3.
    """
    newer, older = distributions.TEMPLATES
    folder = os.path.dirname(source.path)
    has_newer, has_older = (read(f"{folder}/{name}") is not None for name in (newer, older))
    program = source.program
    is_new = source.version > 2 if program is None else program >= _VERSION_3
    if is_new:
        return older if has_older and not has_newer else newer
    if has_newer and program is None:
        raise EngineError(
            f"It is unknown whether {owner.name} uses {newer} or {older}: {source.path} was "
            "written before the newer one existed, or by a version that doesn't support it",
            f"Restart {owner.name} ({owner.restart}), and run this again",
        )
    return older


def _imported_folder(source: MainConfig, ask: EngineRequest) -> str:
    """Return the folder of drop-in files that the distribution's file imports, "" for none."""
    own = os.path.dirname(source.path)
    for pattern in imports_of(source.path, source.document, ask):
        folder = os.path.dirname(pattern)
        if os.path.dirname(folder) == own and matches(os.path.join(folder, _NAME), pattern):
            return folder
    return ""


def _check_base(owner: Distribution, template: str) -> None:
    """Raise EngineError if a new template may be unable to include the built-in one."""
    name = owner.name.lower()
    if os.path.basename(template) == distributions.TEMPLATES[0]:
        return
    version = installed.version(name)
    if version is not None and _knows_base(version):
        return
    known = (
        f"This is {owner.name} {version}, and"
        if version
        else f"The version of {owner.name} is unknown:"
    )
    raise EngineError(
        f"{known} a template that includes the built-in one needs "
        f"{', '.join(_KNOW_BASE.values())} or {_BASE_SINCE} and newer",
        f"Upgrade {owner.name}; or, if it is new enough, create {template} with the line "
        f"{_BASE.strip()}, and run this again",
    )


def _knows_base(version: str) -> bool:
    line = ".".join(version.split(".")[:2])
    return order(version) >= order(_KNOW_BASE.get(line, _BASE_SINCE))


def _block(
    owner: Distribution, source: MainConfig, ask: EngineRequest, template: str, others: Document
) -> EngineChanges:
    """Return the template with our block at its end."""
    if ask.set_default:
        raise EngineError(
            f"{owner.name} writes the table with the default runtime itself, and can't take "
            "another one from its template",
            f"Leave --set-default out, and name the RuntimeClass {ask.names[0]} in pods; a "
            f"{owner.name} since March 2026, with containerd 2.1, supports it",
        )
    block = str(others.get(unit_text.OURS, ""))
    earlier = get(toml_text.parse(block, template), source.cri) or {}
    # Both search for NVIDIA's programs themselves, and add the runtime nvidia for them.
    ask = following(source, replace(ask, also=()), earlier, {})
    _check_literal(ask, owner)
    _check_unknown(ask, source, earlier, template, str(others.get(unit_text.OTHERS, "")))
    wanted = {**others, unit_text.OURS: _runtimes(source, ask)}
    text = unit_text.edited("", wanted, template)
    owned = ((unit_text.OURS,), *owned_paths(source, ask))
    target = TargetFile(ENGINE, template, _BLOCK, text, source.path, owned)
    warnings = []
    if ask.cdi and ask.cdi_setting and source.version < 3:  # later versions enable it by default
        warnings.append(f"enable_cdi wasn't set, because {owner.name} writes its table")
    return EngineChanges((target,), (restart(source.path),), tuple(warnings), restart=True)


def _runtimes(source: MainConfig, ask: EngineRequest) -> str:
    """Return our runtimes as TOML without tables that the distribution also defines."""
    settings = effective_cri(source, ask, "")
    known = {*(get(settings, ("containerd", "runtimes")) or {})}
    add_runtimes(settings, source, replace(ask, default=None, cdi=False), old=False)
    made = settings["containerd"]["runtimes"]
    added = {name: made[name] for name in made if name in ask.names or name not in known}
    head, plugin = source.cri
    text = toml_text.plain({head: {plugin: {"containerd": {"runtimes": added}}}})
    if any(line[:1] == "[" and _TABLE not in line for line in text.split("\n")):
        raise EngineError(
            f"The options of the default runtime in {source.path} can't be written in a template",
            "Write the runtime into the template by hand: docs/engines/containerd.md",
        )
    return text


def _check_unknown(
    ask: EngineRequest, source: MainConfig, earlier: Document, template: str, others: str
) -> None:
    """Raise EngineError if a runtime of our name exists: a duplicate table is an error."""
    known = programs_of(get(source.document, source.cri) or {})
    ours = {program for _, program in ask.runtimes} | {*programs_of(earlier).values()}
    lines = [line for line in others.split("\n") if not line.lstrip().startswith("#")]
    for name in ask.names:
        heads = (f"runtimes.{name}", f'runtimes."{name}"', f"runtimes.'{name}'")
        by_hand = any(f"{head}{end}" in line for line in lines for head in heads for end in "].")
        if by_hand or known.get(name, next(iter(ours))) not in ours:
            raise EngineError(
                f"{template} or the generator of {source.path} already has a runtime {name}",
                "Remove it there and restart, or choose another --runtime-name",
            )


def _check_literal(ask: EngineRequest, owner: Distribution) -> None:
    """Raise EngineError for a program path that the distribution would treat as a placeholder."""
    for _, program in ask.runtimes:
        for _, found in placeholders.find(program):
            raise EngineError(
                f"{owner.name} would replace {found} in {program}",
                "Name the program by another path with --runtime-path",
            )
