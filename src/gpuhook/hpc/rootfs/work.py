"""Addition of devices to a root folder, and their removal."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuhook import inject
from gpuhook.base.config.model import Config
from gpuhook.base.container.changes import ContainerRootfs
from gpuhook.base.errors import FolderError
from gpuhook.base.oci.spec import Spec
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import Operation, Plan, usable
from gpuhook.core.planner import make_plan
from gpuhook.core.resolve import Allocation
from gpuhook.hpc.rootfs import backup, fstab, mount_tracking
from gpuhook.hpc.rootfs import record as records
from gpuhook.hpc.rootfs.folder import Folder
from gpuhook.hpc.rootfs.record import FolderRecord
from gpuhook.tools import root_folder
from gpuhook.tools.engines.lock import FolderLock

_PATIENCE = 60.0  # seconds


@dataclass
class WorkResult:
    """The result: changes made, steps left to others, and missing parts, as sentences."""

    operations: list[Operation] = field(default_factory=list)
    undone: list[Operation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fstab: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)


def give(rootfs: str, resolved: Allocation, config: Config, spec: Spec, state: str) -> WorkResult:
    """Add the allocated devices to a folder; GpuhookError, and no change, if that fails.

    Devices of an earlier run are removed before. ``spec`` is the request. ``state`` is the folder
    for the record of the former state, "" for no record.
    """
    root_folder.check(resolved, config, spec)
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
                # The journal has usually rolled back everything; the record keeps the rest.
                if folder.record is not None and not _put_back(folder, folder.record):
                    folder.record.forget()
                raise
            undone = root_folder.undone(plan)
            steps = [op for op in plan.operations if op not in undone]
            warnings = [*resolved.warnings(), *forgotten, *folder.skipped]
            return WorkResult(steps, undone, warnings)


def take_back(rootfs: str, state: str) -> list[str]:
    """Remove a folder's devices of an earlier run if none are requested now.

    Return sentences on dropped records.
    """
    if not os.path.isdir(_folder(state)):
        return []  # there is no record, and the caller may have no right to write one
    with _locked(state):
        return _make_room(rootfs, state)


def _begun(rootfs: str, folder: Folder, plan: Plan, state: str) -> FolderRecord:
    """Return the saved record of a folder before the first change."""
    place = folder.real_place()
    folder.settle_identity()
    try:
        places = backup.look(folder, plan.operations)
    except OSError as error:
        raise FolderError(
            f"{rootfs} can't be examined: {error.strerror} ({error.filename})",
            "Fix or remove that path in the folder",
        ) from None
    there = mount_tracking.table(place)
    begun = FolderRecord(
        records.file_of(state, place), place, folder.identity(), records.boot(),
        mount_tracking.namespace(), there, places,
    )  # fmt: skip
    begun.save()
    return begun


def _make_room(rootfs: str, state: str) -> list[str]:
    """Remove a folder's devices of an earlier run; return sentences on dropped records."""
    known, stranger = _known(rootfs, state)
    if known is not None:
        _take_back(rootfs, known)
    if stranger is None:
        return []
    stranger.forget()
    return [f"The record of another folder that was at {rootfs} is dropped"]


def lines(rootfs: str, resolved: Allocation, config: Config, spec: Spec) -> WorkResult:
    """Return the allocation as fstab lines; change nothing."""
    done, plan = planned(rootfs, resolved, config, spec)
    done.fstab = fstab.lines(plan)
    return done


def planned(
    rootfs: str | None, resolved: Allocation, config: Config, spec: Spec
) -> tuple[WorkResult, Plan]:
    """Return the plan for a program that mounts files itself, and messages on it.

    Without a root folder the image is assumed to be similar to Debian.
    """
    root_folder.check(resolved, config, spec)
    if rootfs is None:
        plan = make_plan(resolved.grants, image.unknown(), resolved.groups)
    else:
        with inject.open_folder(rootfs, ContainerRootfs) as container:
            found = inject.examine(container, config, resolved.examiners())
            plan = make_plan(resolved.grants, found, resolved.groups)
            plan = Plan([op for op in plan.operations if not op.is_kept(container)])
    operations, left_out = usable(plan.operations)
    plan = Plan(operations)
    undone = [*root_folder.undone(plan), *fstab.FstabWriter().write(operations).unwritten]
    steps = [op for op in operations if op not in undone]
    return WorkResult(steps, undone, [*resolved.warnings(), *left_out]), plan


def undo(rootfs: str, state: str) -> str:
    """Restore a folder's state before ``give``; return the result as text.

    FolderError, with the record kept, if a change can't be rolled back.
    """
    with _locked(state):
        known, stranger = _known(rootfs, state)
        if known is not None:
            _take_back(rootfs, known)
            return "restored"
        return "nothing to undo" + (": another folder was given devices here" if stranger else "")


def _known(rootfs: str, state: str) -> tuple[FolderRecord | None, FolderRecord | None]:
    """Return the record of a folder, and that of another folder that was at its path.

    FolderError if the other folder, at any path, still has mounts of ours.
    """
    with inject.open_folder(rootfs, Folder) as folder:
        place = folder.real_place()
    here = records.load(records.file_of(state, place))
    if here is not None:
        # A killed run may leave the whole folder masked (ContainerRootfs._cover_by_data).
        mount_tracking.take_off(here, place, on=place)  # protects: uncovered
    with inject.open_folder(rootfs, Folder) as folder:
        identity = folder.identity()
    if here is not None and here.is_of(identity):
        return here, None
    if here is not None and (left := mount_tracking.left(here)):
        raise FolderError(
            f"{rootfs} isn't the folder to which devices were added; they are mounted at {left[0]}",
            "Run gpuhook apply --undo with the folder's current path as --rootfs",
        )
    return records.search(state, identity), here


def _take_back(rootfs: str, record: FolderRecord) -> None:
    """Restore a folder and remove its record; FolderError if a change can't be rolled back."""
    with _opened(rootfs, record) as folder:
        problems = mount_tracking.take_off(record, folder.real_place())
    # Opened again, because the mounts determine which files belong to the folder itself.
    with _opened(rootfs, record) as folder:
        problems += backup.put_back(folder, record.places)
    if problems:
        more = f" ({len(problems) - 1} more like that)" if len(problems) > 1 else ""
        raise FolderError(
            f"{rootfs} couldn't be restored: {problems[0]}{more}",
            "Stop the programs that use the folder, unmount later mounts of others there, "
            "and run gpuhook apply --undo again",
        )
    if process := mount_tracking.elsewhere(record):
        raise FolderError(
            f"{rootfs} still has devices mounted in the mount namespace of process {process}",
            f"Run gpuhook apply --undo there: nsenter --mount --target {process} gpuhook ...",
        )
    record.forget()


@contextlib.contextmanager
def _opened(rootfs: str, record: FolderRecord) -> Iterator[Folder]:
    """Open the folder of a record; FolderError if another folder is at its path."""
    with inject.open_folder(rootfs, Folder) as folder:
        if not record.is_of(folder.identity()):  # protects: undone-folder
            raise FolderError(
                f"{rootfs} was replaced by another folder meanwhile",
                "Check which users can change its parent folders, and run this again",
            )
        yield folder


def _put_back(folder: Folder, record: FolderRecord) -> list[str]:
    return [
        *mount_tracking.take_off(record, folder.real_place()),
        *backup.put_back(folder, record.places),
    ]


def _locked(state: str) -> contextlib.AbstractContextManager[None]:
    if not state:
        return contextlib.nullcontext()
    return FolderLock(_folder(state), "changing a root folder", _PATIENCE, FolderError).held()


def _folder(state: str) -> str:
    return os.path.join(state, "applied")
