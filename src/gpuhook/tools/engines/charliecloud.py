"""Charliecloud: CDI documents for ``ch-run --cdi``, in a folder of their own, and where they are.

``ch-run`` runs no hook, so these have links as mounts. Two documents of the same devices in one
folder count for neither engine, and others read /etc/cdi. Source: Charliecloud's ch-run(1).
"""

import json
import os
import shutil
from dataclasses import dataclass

from gpuhook.ground.config.loader import load
from gpuhook.ground.errors import DriverError, NoDeviceError
from gpuhook.start import contract
from gpuhook.start.cdi.generate import Source, generate
from gpuhook.start.cdi.names import file_stem, split_kind
from gpuhook.start.inventory import cache
from gpuhook.tools.engines import installer, whole_text
from gpuhook.tools.engines.ask import Answer, Ask, Engine
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.store import Record, Store, Target
from gpuhook.tools.vendors import survey

VARIABLE = "CH_RUN_CDI_DIRS"
_SYSTEM = "/etc/charliecloud/cdi"
_USERS = "charliecloud/cdi"
_PROFILE = "/etc/profile.d/gpuhook-charliecloud.sh"
_TEXT = f"""# {DROP_IN_HEADER}
#
# ch-run --cdi finds the documents that are made for it there.
export {VARIABLE}="${{{VARIABLE}:-{_SYSTEM}}}"
"""


@dataclass(frozen=True)
class _Documents:
    """What the machine has: texts by file name, what to say, and which drivers fail."""

    texts: dict[str, str]
    said: list[str]
    failed: list[DriverError]


class Charliecloud(Engine):
    """Charliecloud, which has no configuration: of the system, or a user's own documents."""

    name = "charliecloud"
    has_runtimes = False

    def install(self, ask: Ask) -> Answer:
        """Return a document of each vendor's devices, and the variable that names their folder."""
        made = _documents(ask.gpuhook_config)
        afterwards = (
            f"Log in again, or set {VARIABLE}={_folder(ask)}, so that ch-run --cdi looks there"
        )
        said = [*made.said, *map(str, made.failed)]
        if not made.texts and not made.failed:
            said.append("There is no device to describe yet; gpuhook watch looks for some")
        return Answer(tuple(_targets(made, ask)), (afterwards,), tuple(said))

    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return nothing: a container of Charliecloud is made new each time."""
        del names, ask
        return []

    def is_present(self, ask: Ask) -> bool:
        """Tell whether Charliecloud is here."""
        del ask
        return bool(shutil.which("ch-run"))

    def is_users(self, ask: Ask) -> bool:
        """Return True: every user may have documents."""
        del ask
        return True


def _folder(ask: Ask) -> str:
    return ask.user(_USERS) if ask.rootless else ask.system(_SYSTEM)


def _targets(made: _Documents, ask: Ask) -> list[Target]:
    """Return the files; a user sets the variable by himself."""
    folder, name = _folder(ask), Charliecloud.name
    targets = [
        Target(name, os.path.join(folder, file), "whole", text, folder)
        for file, text in made.texts.items()
    ]
    if not ask.rootless:
        path, owned = ask.system(_PROFILE), ((whole_text.KEY,),)
        targets.append(Target(name, path, "whole", _TEXT, folder, owned, ours=True))
    return targets


def _documents(path: str | None) -> _Documents:
    """Return what this machine has, by the configuration in a file, None for the usual one."""
    config = load(path)

    def source_of(vendor: contract.Vendor) -> Source:
        inventory = cache.get_inventory(config, vendor, save=False)
        return Source(vendor, inventory, config, "", without_hook=True)

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
    return _Documents(texts, said, [*failed.values()])


def refresh(state: str, path: str | None) -> tuple[list[str], list[DriverError]]:
    """Write the documents again where they have been installed.

    Returns the files that changed, and which drivers fail.

    ``path`` is the configuration that they are made with, None for the usual one. A document goes
    with the last of its devices, but stays while a driver fails to answer.
    """
    store = Store(state)
    if not _records(store):
        return [], []
    made = _documents(path)
    with store.locked():
        targets = _targets(made, Ask(runtimes=()))
        outcomes = installer.install(store, targets)
        there = {target.path for target in targets}
        gone = [each for each in _records(store) if each.path not in there and not made.failed]
        outcomes += installer.uninstall(store, gone)
    return [each.change.path for each in outcomes if each.change], made.failed


def _records(store: Store) -> list[Record]:
    return [each for each in store.records() if each.engine == Charliecloud.name]
