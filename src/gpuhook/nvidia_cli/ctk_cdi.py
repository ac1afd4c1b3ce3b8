"""``nvidia-ctk cdi generate`` and ``cdi list``, with gpuhook's CDI specs and folders."""

import os
from typing import Any

import click

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import CdiError, listed, shown
from gpuhook.core import contract
from gpuhook.core.cdi import folders, versions
from gpuhook.core.cdi.generate import ALL, DEFAULT_STRATEGIES, STRATEGIES
from gpuhook.core.cdi.generate import generate as generate_document
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.nvidia_cli.ctk_words import PROGRAM, config_path, items, say
from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cdi import write
from gpuhook.tools.cdi import write as writing
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli.runtime import switch
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.locations import data_folders
from gpuhook.vendors.nvidia.names import NAME

_ENV = "NVIDIA_CTK_CDI_GENERATE_"
_MODES = ("auto", "nvml", "wsl", "csv")
_MODES_WITHOUT = ("management", "gds", "mofed", "gdrcopy", "nvswitch", "imex")
_ENDINGS = (".yaml", ".yml", ".json")
# Options specific to NVIDIA's generator -> why they have no effect.
_ONE_HOOK = "gpuhook's CDI specs call one hook, which does everything"
_INEFFECTIVE = {
    "ldconfig_path": "gpuhook's hook runs no ldconfig",
    "csv_file": "the folder is modes.csv.mount-spec-path in config.toml",
    "csv_ignore_pattern": "set csv-ignore in config.toml",
    "csv_compat_container_root": "gpuhook doesn't look for newer CUDA in an image on Tegra",
    "disable_hook": _ONE_HOOK,
    "enable_hook": _ONE_HOOK,
    "feature_flag": "they tune NVIDIA's own generator",
}


def _ineffective(function: Any) -> Any:
    """Add the options that are accepted but have no effect."""
    spelled = {
        "csv_file": ("--csv.file", "CSV_FILES"),
        "csv_ignore_pattern": ("--csv.ignore-pattern", "CSV_IGNORE_PATTERNS"),
        "csv_compat_container_root": (
            "--csv.compat-container-root",
            "CSV_CONTAINER_COMPAT_ROOT",
        ),
        "ldconfig_path": ("--ldconfig-path", "LDCONFIG_PATH"),
        "disable_hook": ("--disable-hook", "--disable-hooks", "DISABLED_HOOKS"),
        "enable_hook": ("--enable-hook", "--enable-hooks", "ENABLED_HOOKS"),
        "feature_flag": ("--feature-flag", "--feature-flags", "FEATURE_FLAGS"),
    }
    for field, (*options, variable) in reversed(spelled.items()):
        function = click.option(
            *options, field, multiple=True, metavar="TEXT", envvar=_ENV + variable,
            help=f"Has no effect: {_INEFFECTIVE[field]}.",
        )(function)  # fmt: skip
    return function


@command(
    examples={
        f"{PROGRAM} cdi generate --output=/etc/cdi/nvidia.yaml": "Write it where engines look",
        f"{PROGRAM} cdi generate --format=json": "Print it as JSON",
    },
)
@click.option(
    "--output", metavar="FILE", default="", envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH",
    help="The file to write.  [default: standard output]",
)  # fmt: skip
@click.option(
    "--format", "form", metavar="yaml|json", envvar=f"{_ENV}OUTPUT_FORMAT",
    help="The format.  [default: by the file's extension, else yaml]",
)  # fmt: skip
@click.option(
    "--mode", "--discovery-mode", "mode", default="auto", show_default=True, metavar="WORD",
    envvar=f"{_ENV}MODE", help="How to find devices: auto, nvml, wsl or csv.",
)  # fmt: skip
@click.option(
    "--driver-root", metavar="DIR", envvar="NVIDIA_CTK_DRIVER_ROOT",
    help="The driver root, which must be that of config.toml.",
)  # fmt: skip
@click.option(
    "--dev-root", metavar="DIR", envvar="NVIDIA_CTK_DEV_ROOT",
    help="The folder above /dev, which must be the driver root.",
)  # fmt: skip
@click.option(
    "--library-search-path", "search_paths", multiple=True, metavar="DIR",
    envvar=f"{_ENV}LIBRARY_SEARCH_PATHS",
    help="Folders of libraries, which must be those of config.toml.",
)  # fmt: skip
@click.option(
    "--config-search-path", "data_paths", multiple=True, metavar="DIR",
    envvar=f"{_ENV}CONFIG_SEARCH_PATHS",
    help="Folders of manifests: those that gpuhook searches, or some of data-search-paths.",
)  # fmt: skip
@click.option(
    "--device-name-strategy", "strategies", multiple=True, metavar="WORD",
    envvar=f"{_ENV}DEVICE_NAME_STRATEGIES",
    help="How to name devices: index, uuid, type-index.  [default: index, uuid]",
)  # fmt: skip
@click.option(
    "--device-id", "--device-ids", "--device", "--devices", "devices", multiple=True,
    metavar="ID", envvar=f"{_ENV}DEVICE_IDS",
    help="Only these devices; none leaves out the device all.  [default: all]",
)  # fmt: skip
@switch("--no-all-device", envvar=f"{_ENV}NO_ALL_DEVICE", help="Leave out the device all.")
@click.option(
    "--cuda-compat-container-root", "compat_root", metavar="DIR",
    envvar=f"{_ENV}CUDA_COMPAT_CONTAINER_ROOT",
    help="Folder of newer CUDA in images, which must be that of config.toml.",
)  # fmt: skip
@click.option(
    "--nvidia-cdi-hook-path", "--nvidia-ctk-path", "hook_path", metavar="PATH",
    envvar="NVIDIA_CTK_CDI_HOOK_PATH", help="The hook to call, a link to gpuhook-cdi-hook.",
)  # fmt: skip
@click.option(
    "--vendor", "--cdi-vendor", "vendor", default="nvidia.com", show_default=True,
    metavar="NAME", envvar=f"{_ENV}VENDOR", help="The first part of the CDI kind.",
)  # fmt: skip
@click.option(
    "--class", "--cdi-class", "device_class", default="gpu", show_default=True,
    metavar="NAME", envvar=f"{_ENV}CLASS", help="The second part of the CDI kind.",
)  # fmt: skip
@_ineffective
def generate(
    output: str,
    form: str | None,
    strategies: tuple[str, ...],
    devices: tuple[str, ...],
    no_all_device: bool,
    vendor: str,
    device_class: str,
    **given: Any,
) -> None:
    """Write a CDI spec of the NVIDIA devices on this host.

    gpuhook cdi generate does so for the devices of all vendors.
    """
    config = load(config_path())
    _check(config, given)
    ids = items(devices)
    kind = _kind(vendor, device_class)
    hook = _hook(given["hook_path"])
    source = refreshing.source_of(
        contract.load(registry.all_vendors(config)[NAME]),
        config,
        hook,
        write.oldest_reader(),
        save=False,
    )
    selectors = tuple(each for each in ids if each != "none") or (ALL,)
    everything = not no_all_device and "none" not in ids
    made = generate_document(source, _strategies(strategies), selectors, all_device=everything)
    document = {**made.document, "kind": kind}
    document["cdiVersion"] = versions.needed(document)
    for warning in made.warnings:
        say(f"warning: {warning}")
    _deliver(document, output, form)


def _check(config: Config, given: dict[str, Any]) -> None:
    """Warn about options without effect; CdiError for unsupported ones."""
    for field, why in _INEFFECTIVE.items():
        if given[field]:
            say(f"warning: --{field.replace('_', '-')} has no effect: {why}")
    mode = given["mode"].lower()
    if mode in _MODES_WITHOUT:
        raise CdiError(
            f"gpuhook writes no CDI specs of mode {mode}",
            "Let containers request devices with a variable, such as those of docs/requests.md",
        )
    if mode not in _MODES:
        raise CdiError(
            f"invalid discovery mode: {shown(given['mode'])}", f"Give one of {', '.join(_MODES)}"
        )
    root = _normal(config.driver_root)
    for option, path in (("driver-root", given["driver_root"]), ("dev-root", given["dev_root"])):
        if path and _normal(path) != root:
            raise CdiError(
                f"--{option} is {shown(path)}, but containers would get the files in {root}",
                f"Run gpuhook config set nvidia-container-cli.root={path}",
            )
    compat = given["compat_root"]
    if compat and _normal(compat) != _normal(config.cuda_compat_root):
        raise CdiError(
            f"--cuda-compat-container-root is {shown(compat)}, but containers' CUDA is searched "
            f"in {config.cuda_compat_root}",
            f"Run gpuhook config set gpuhook.cuda-compat-root={compat}",
        )
    paths = items(given["search_paths"])
    if paths and paths != tuple(config.library_search_paths):
        raise _other_paths("library", paths)
    known = data_folders(config)
    more = [path for path in items(given["data_paths"]) if _normal(path) not in known]
    if more:
        raise _other_paths("config", (*config.data_search_paths, *more))


def _other_paths(option: str, paths: tuple[str, ...]) -> CdiError:
    setting = {"library": "library-search-paths", "config": "data-search-paths"}[option]
    return CdiError(
        f"--{option}-search-path differs from config.toml, which containers use",
        f"Run gpuhook config set gpuhook.{setting}={':'.join(paths)}",
    )


def _normal(path: str) -> str:
    return os.path.normpath(path or "/")


def _strategies(words: tuple[str, ...]) -> tuple[str, ...]:
    chosen = items(words) or DEFAULT_STRATEGIES
    unknown = [word for word in chosen if word not in STRATEGIES]
    if unknown:
        raise CdiError(
            f"{shown(unknown[0])} isn't a way to name devices",
            f"Give some of {listed([*STRATEGIES])}",
        )
    return chosen


def _kind(vendor: str, device_class: str) -> str:
    kind = f"{vendor}/{device_class}"
    if names.cdi_parts(f"{kind}=0") is None:
        raise CdiError(f"{shown(kind)} can't be a CDI kind", "Give a vendor such as nvidia.com")
    return kind


def _hook(given: str | None) -> str:
    """Return the hook's path: the given one if it leads to gpuhook's."""
    ours = our_program(names.CDI_HOOK, "Reinstall gpuhook, so that its programs are in one folder")
    if given and os.path.realpath(given) == os.path.realpath(ours):
        return given
    if given:
        say(f"warning: {given} isn't a link to {names.CDI_HOOK}: the CDI spec calls {ours}")
    return ours


def _deliver(document: dict[str, Any], output: str, form: str | None) -> None:
    """Print a CDI spec, or write it to a file with an extension that engines read."""
    ending = next((each for each in _ENDINGS if output.endswith(each)), "")
    style = (form or ending.lstrip(".").replace("yml", "yaml") or "yaml").lower()
    if style not in writing.FORMATS:
        raise CdiError(f"{shown(form)} isn't a format", "Give yaml or json")
    text = writing.to_text(document, style)
    if not output:
        click.echo(text, nl=False)
        return
    path = os.path.abspath(output if ending else f"{output}.{style}")
    writing.write(path, text)
    say(f"Generated CDI spec {path} with version {document['cdiVersion']}")
    if path.endswith(".yml"):
        say("warning: engines read only .yaml and .json")
    for warning in refreshing.others(path, document["kind"]):
        say(f"warning: {warning}")


@command(
    "list",
    examples={
        f"{PROGRAM} cdi list": "Print the names of all CDI devices",
        f"{PROGRAM} cdi list --spec-dir=/etc/cdi": "Read only one folder",
    },
)
@click.option(
    "--spec-dir", "spec_dirs", multiple=True, metavar="DIR", envvar="NVIDIA_CTK_CDI_SPEC_DIRS",
    help="A folder of CDI specs; may be repeated.  [default: those of config.toml]",
)  # fmt: skip
def list_(spec_dirs: tuple[str, ...]) -> None:
    """Print the names of the devices in CDI specs, one a line.

    gpuhook cdi list also prints the file of each.
    """
    found = folders.read_folders(items(spec_dirs) or load(config_path()).cdi_spec_dirs)
    for error in found.errors:
        say(f"warning: {error}")
    for name, files in sorted(found.conflicts.items()):
        say(f"warning: {name} is in {' and '.join(files)}, so these files are ignored for it")
    say(f"Found {len(found.devices)} CDI devices")
    for name in sorted(found.devices):
        click.echo(name)
