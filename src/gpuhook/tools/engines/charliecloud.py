"""Charliecloud: CDI specs for ``ch-run --cdi`` in a separate folder, and the variable for it.

``ch-run`` runs no hook, so these specs have mounts instead of links. They are not in /etc/cdi,
because engines refuse two specs of the same devices there. Source: Charliecloud's ch-run(1).
"""

import json
import os
import shutil
from dataclasses import dataclass

from gpuhook.base.config.loader import load
from gpuhook.base.errors import DriverError, NoDeviceError
from gpuhook.core import contract
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.cdi.names import file_stem, split_kind
from gpuhook.core.inventory import cache
from gpuhook.monitor.vendors import survey
from gpuhook.tools.engines import installer, whole_text
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.store import FileRecord, Store, TargetFile

VARIABLE = "CH_RUN_CDI_DIRS"
_SYSTEM = "/etc/charliecloud/cdi"
_USERS = "charliecloud/cdi"
_PROFILE = "/etc/profile.d/gpuhook-charliecloud.sh"
_TEXT = f"""# {DROP_IN_HEADER}
#
# ch-run --cdi reads its CDI specs from this folder.
export {VARIABLE}="${{{VARIABLE}:-{_SYSTEM}}}"
"""


@dataclass(frozen=True)
class _GeneratedSpecs:
    """Generated CDI specs by file name, messages, and the errors of failed drivers."""

    texts: dict[str, str]
    said: list[str]
    failed: list[DriverError]


class Charliecloud(Engine):
    """Charliecloud, which has no configuration file: CDI specs of the system or of a user."""

    name = "charliecloud"
    has_runtimes = False

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Return a CDI spec per vendor, and the variable that names their folder."""
        made = _documents(ask.gpuhook_config)
        afterwards = (
            f"Log in again, or set {VARIABLE}={_folder(ask)}, so that ch-run --cdi looks there"
        )
        said = [*made.said, *map(str, made.failed)]
        if not made.texts and not made.failed:
            said.append("There are no devices yet; gpuhook watch adds them when they appear")
        return EngineChanges(tuple(_targets(made, ask)), (afterwards,), tuple(said))

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return nothing: Charliecloud creates a new container for each run."""
        del names, ask
        return []

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether Charliecloud is installed."""
        del ask
        return bool(shutil.which("ch-run"))

    def is_users(self, ask: EngineRequest) -> bool:
        """Return True: every user can have CDI specs."""
        del ask
        return True


def _folder(ask: EngineRequest) -> str:
    return ask.user(_USERS) if ask.rootless else ask.system(_SYSTEM)


def _targets(made: _GeneratedSpecs, ask: EngineRequest) -> list[TargetFile]:
    """Return the target files; users without root set the variable themselves."""
    folder, name = _folder(ask), Charliecloud.name
    targets = [
        TargetFile(name, os.path.join(folder, file), "whole", text, folder)
        for file, text in made.texts.items()
    ]
    if not ask.rootless:
        path, owned = ask.system(_PROFILE), ((whole_text.KEY,),)
        targets.append(TargetFile(name, path, "whole", _TEXT, folder, owned, ours=True))
    return targets


def _documents(path: str | None) -> _GeneratedSpecs:
    """Generate the CDI specs of this host; ``path`` is the configuration, None for the default."""
    config = load(path)

    def source_of(vendor: contract.Vendor) -> SpecSource:
        inventory = cache.get_inventory(config, vendor, save=False)
        return SpecSource(vendor, inventory, config, "", without_hook=True)

    found, _, failed = survey.examine(config, source_of)
    texts: dict[str, str] = {}
    said: list[str] = []
    for source in found.values():
        try:
            made = generate(source)
        except NoDeviceError:
            continue
        name = f"{file_stem(*split_kind(made.document['kind']))}.json"
        texts[name] = json.dumps(made.document, indent=4) + "\n"
        said += made.warnings
    return _GeneratedSpecs(texts, said, [*failed.values()])


def refresh(state: str, path: str | None) -> tuple[list[str], list[DriverError]]:
    """Write the CDI specs again where they are installed.

    Return the changed files, and the errors of failed drivers.

    ``path`` is the configuration file, None for the default one. A spec is removed with the
    last of its devices, but stays while its driver fails to answer.
    """
    store = Store(state)
    if not _records(store):
        return [], []
    made = _documents(path)
    with store.locked():
        targets = _targets(made, EngineRequest(runtimes=()))
        outcomes = installer.install(store, targets)
        there = {target.path for target in targets}
        gone = [each for each in _records(store) if each.path not in there and not made.failed]
        outcomes += installer.uninstall(store, gone)
    return [each.change.path for each in outcomes if each.change], made.failed


def _records(store: Store) -> list[FileRecord]:
    return [each for each in store.records() if each.engine == Charliecloud.name]
