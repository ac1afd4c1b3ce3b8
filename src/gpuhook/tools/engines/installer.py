"""Changes to the files of engines as one transaction: all files of a command, or none."""

from dataclasses import dataclass

from gpuhook.tools.engines.files import Change
from gpuhook.tools.engines.store import FileRecord, Store, TargetFile


@dataclass(frozen=True)
class Outcome:
    """A change made, or to be made, to an engine's file."""

    engine: str
    change: Change


def preview(store: Store, targets: list[TargetFile]) -> list[Outcome]:
    """Return the changes that ``install`` would make."""
    return [Outcome(target.engine, store.plan(target)) for target in targets]


def install(store: Store, targets: list[TargetFile]) -> list[Outcome]:
    """Write all files; if one can't be written, roll back the changes of this call."""
    before = {record.path for record in store.records()}
    try:
        return [Outcome(target.engine, store.apply(target)) for target in targets]
    except BaseException:
        for record in store.records():
            if record.path not in before:
                store.take_back(record)
        raise


def preview_removal(store: Store, records: list[FileRecord]) -> list[Outcome]:
    """Return the changes that ``uninstall`` would make."""
    return [Outcome(record.engine, store.plan_removal(record)) for record in records]


def uninstall(store: Store, records: list[FileRecord]) -> list[Outcome]:
    """Remove all changes in the records.

    Every file is checked before the first one is changed, so a file that no longer parses stops
    the whole removal.
    """
    preview_removal(store, records)
    return [Outcome(record.engine, store.take_back(record)) for record in records]
