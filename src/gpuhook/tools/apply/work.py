"""Give a root folder its devices, and take them back."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuhook import inject
from gpuhook.ground.config.model import Config
from gpuhook.ground.container.changes import Container
from gpuhook.ground.errors import FolderError
from gpuhook.ground.oci.spec import Spec
from gpuhook.start.plan import image
from gpuhook.start.plan.operations import Operation, Plan, usable
from gpuhook.start.planner import make_plan
from gpuhook.start.resolve import Resolved
from gpuhook.tools import apply
from gpuhook.tools.apply import before, fstab, mounted
from gpuhook.tools.apply import record as records
from gpuhook.tools.apply.folder import Folder
from gpuhook.tools.apply.record import Record
from gpuhook.tools.engines.lock import Lock

_PATIENCE = 60.0  # seconds


@dataclass
class Done:
    """What was done, what it is left to others to do, and what is missing, a sentence each."""

    operations: list[Operation] = field(default_factory=list)
    undone: list[Operation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fstab: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)


def give(rootfs: str, resolved: Resolved, config: Config, spec: Spec, state: str) -> Done:
    """Mount and write in a folder what was granted; GpuhookError, and no change, if that fails.

    What an earlier run gave is taken back before. ``spec`` is what was asked for. ``state`` is the
    folder in which it is remembered what the folder was, "" for nowhere.
    """
    apply.check(resolved, config, spec)
    with _locked(state):
        forgotten = _make_room(rootfs, state) if state else []
        with inject.open_folder(rootfs, Folder) as folder:
            found = inject.examine(folder, config, resolved.examiners())
            plan = make_plan(resolved.grants, found, resolved.groups)
            if state:
                folder.record = _begun(rootfs, folder, plan, state)
            try:
                inject.inject(plan, folder, enter=False)
            except BaseException:
                # The journal has taken all back, as a rule; what it couldn't is kept for --undo.
                if folder.record is not None and not _put_back(folder, folder.record):
                    folder.record.forget()
                raise
            undone = apply.undone(plan)
            steps = [op for op in plan.operations if op not in undone]
            warnings = [*resolved.warnings(), *forgotten, *folder.skipped]
            return Done(steps, undone, warnings)


def take_back(rootfs: str, state: str) -> list[str]:
    """Take back what a folder was given before, where nothing is asked for now.

    Return what is forgotten, a sentence each.
    """
    if not os.path.isdir(_folder(state)):
        return []  # nothing was noted, and who asks for nothing may have no right to note it
    with _locked(state):
        return _make_room(rootfs, state)


def _begun(rootfs: str, folder: Folder, plan: Plan, state: str) -> Record:
    """Return what is noted of a folder before the first change, written down."""
    place = folder.real_place()
    folder.settle_identity()
    try:
        places = before.look(folder, plan.operations)
    except OSError as error:
        raise FolderError(
            f"{rootfs} can't be looked at: {error.strerror} ({error.filename})",
            "Mend or remove that path in the folder",
        ) from None
    there = mounted.table(place)
    begun = Record(
        records.file_of(state, place), place, folder.identity(), records.boot(),
        mounted.namespace(), there, places,
    )  # fmt: skip
    begun.save()
    return begun


def _make_room(rootfs: str, state: str) -> list[str]:
    """Take back what a folder was given before; return what is forgotten, a sentence each."""
    known, stranger = _known(rootfs, state)
    if known is not None:
        _take_back(rootfs, known)
    if stranger is None:
        return []
    stranger.forget()
    return [f"What another folder was that has been at {rootfs} is forgotten"]


def lines(rootfs: str, resolved: Resolved, config: Config, spec: Spec) -> Done:
    """Return as lines of fstab what was granted; nothing is changed."""
    done, plan = planned(rootfs, resolved, config, spec)
    done.fstab = fstab.lines(plan)
    return done


def planned(
    rootfs: str | None, resolved: Resolved, config: Config, spec: Spec
) -> tuple[Done, Plan]:
    """Return the plan for a program that mounts by itself, and what is to be said of it.

    Without a root folder the image is taken for one like Debian's.
    """
    apply.check(resolved, config, spec)
    if rootfs is None:
        plan = make_plan(resolved.grants, image.unknown(), resolved.groups)
    else:
        with inject.open_folder(rootfs, Container) as container:
            found = inject.examine(container, config, resolved.examiners())
            plan = make_plan(resolved.grants, found, resolved.groups)
            plan = Plan([op for op in plan.operations if not op.is_kept(container)])
    operations, left_out = usable(plan.operations)
    plan = Plan(operations)
    undone = [*apply.undone(plan), *fstab.FstabWriter().write(operations).unwritten]
    steps = [op for op in operations if op not in undone]
    return Done(steps, undone, [*resolved.warnings(), *left_out]), plan


def undo(rootfs: str, state: str) -> str:
    """Make a folder what it was before ``give``; return in words whether there was anything.

    FolderError, and what is known is kept, where something can't be undone.
    """
    with _locked(state):
        known, stranger = _known(rootfs, state)
        if known is not None:
            _take_back(rootfs, known)
            return "as it was before"
        return "nothing to undo" + (": another folder was given devices here" if stranger else "")


def _known(rootfs: str, state: str) -> tuple[Record | None, Record | None]:
    """Return what is noted of a folder, and what is of another one that was in its place.

    FolderError where that one, wherever it is now, has what we have mounted.
    """
    with inject.open_folder(rootfs, Folder) as folder:
        place = folder.real_place()
    here = records.load(records.file_of(state, place))
    if here is not None:
        # A run that is killed may leave the folder covered as a whole (Container._cover_by_data).
        mounted.take_off(here, place, on=place)  # protects: uncovered
    with inject.open_folder(rootfs, Folder) as folder:
        identity = folder.identity()
    if here is not None and here.is_of(identity):
        return here, None
    if here is not None and (left := mounted.left(here)):
        raise FolderError(
            f"{rootfs} isn't the folder that was given devices, which are mounted at {left[0]}",
            "Run gpuhook apply --undo with --rootfs where that folder is now",
        )
    return records.search(state, identity), here


def _take_back(rootfs: str, record: Record) -> None:
    """Make a folder what it was, and forget it; FolderError where something can't be undone."""
    with _opened(rootfs, record) as folder:
        problems = mounted.take_off(record, folder.real_place())
    # Opened once more, because what is mounted tells what is the folder's own.
    with _opened(rootfs, record) as folder:
        problems += before.put_back(folder, record.places)
    if problems:
        more = f" ({len(problems) - 1} more like that)" if len(problems) > 1 else ""
        raise FolderError(
            f"{rootfs} couldn't be made what it was: {problems[0]}{more}",
            "End the programs that use the folder, unmount what others have mounted there since, "
            "and run gpuhook apply --undo again",
        )
    if process := mounted.elsewhere(record):
        raise FolderError(
            f"{rootfs} has devices mounted still in the mount namespace of process {process}",
            f"Run gpuhook apply --undo there: nsenter --mount --target {process} gpuhook ...",
        )
    record.forget()


@contextlib.contextmanager
def _opened(rootfs: str, record: Record) -> Iterator[Folder]:
    """Open the folder of which that is noted; FolderError where another one is there."""
    with inject.open_folder(rootfs, Folder) as folder:
        if not record.is_of(folder.identity()):  # protects: undone-folder
            raise FolderError(
                f"{rootfs} has become another folder meanwhile",
                "See who may change what is above it, and run this again",
            )
        yield folder


def _put_back(folder: Folder, record: Record) -> list[str]:
    return [*mounted.take_off(record, folder.real_place()), *before.put_back(folder, record.places)]


def _locked(state: str) -> contextlib.AbstractContextManager[None]:
    if not state:
        return contextlib.nullcontext()
    return Lock(_folder(state), "changing a root folder", _PATIENCE, FolderError).held()


def _folder(state: str) -> str:
    return os.path.join(state, "applied")
