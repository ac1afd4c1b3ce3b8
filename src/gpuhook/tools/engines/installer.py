"""Change the engines' files together: all of what one command asks for, or none of it."""

from dataclasses import dataclass

from gpuhook.tools.engines.files import Change
from gpuhook.tools.engines.store import Record, Store, Target


@dataclass(frozen=True)
class Outcome:
    """What was done, or would be done, to one file of an engine."""

    engine: str
    change: Change


def preview(store: Store, targets: list[Target]) -> list[Outcome]:
    """Return what ``install`` would do."""
    return [Outcome(target.engine, store.plan(target)) for target in targets]


def install(store: Store, targets: list[Target]) -> list[Outcome]:
    """Write all files; where one can't be written, take back those that this call began."""
    before = {record.path for record in store.records()}
    try:
        return [Outcome(target.engine, store.apply(target)) for target in targets]
    except BaseException:
        for record in store.records():
            if record.path not in before:
                store.take_back(record)
        raise


def preview_removal(store: Store, records: list[Record]) -> list[Outcome]:
    """Return what ``uninstall`` would do."""
    return [Outcome(record.engine, store.plan_removal(record)) for record in records]


def uninstall(store: Store, records: list[Record]) -> list[Outcome]:
    """Take back everything that the records tell of.

    Every file is looked at before the first one is changed, so that one that doesn't parse
    any more stops the whole.
    """
    preview_removal(store, records)
    return [Outcome(record.engine, store.take_back(record)) for record in records]
