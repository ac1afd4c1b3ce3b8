"""Give a root folder its devices, and take them back."""

import contextlib
import os
from dataclasses import dataclass, field

from gpuhook import inject
from gpuhook.ground.config.model import Config
from gpuhook.ground.container import kernel
from gpuhook.ground.container.changes import Container
from gpuhook.ground.errors import FolderError
from gpuhook.ground.fileio import write_all
from gpuhook.ground.oci.spec import Spec
from gpuhook.start.plan import image
from gpuhook.start.plan.operations import Operation, Plan, usable
from gpuhook.start.planner import make_plan
from gpuhook.start.resolve import Resolved
from gpuhook.tools import apply
from gpuhook.tools.apply import before, fstab
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
    with _locked(state), inject.open_folder(rootfs) as container:
        place = before.state_file(state, container.real_place()) if state else ""
        if place and (earlier := before.load(place)) is not None:
            _take_back(rootfs, container, earlier, place)
        found = inject.examine(container, config, resolved.examiners())
        plan = make_plan(resolved.grants, found, resolved.groups)
        places = _looked_at(rootfs, container, plan) if place else []
        if place:
            before.save(place, container.real_place(), places)
        try:
            inject.inject(plan, container, enter=False)
        except BaseException:
            # The journal has taken all back, as a rule; what it couldn't is remembered for --undo.
            if place and not before.put_back(container, places):
                before.forget(place)
            raise
        if place:
            before.seal(container, places)
            before.save(place, container.real_place(), places)
        undone = apply.undone(plan)
        steps = [op for op in plan.operations if op not in undone]
        return Done(steps, undone, [*resolved.warnings(), *container.skipped])


def _looked_at(rootfs: str, container: Container, plan: Plan) -> list[before.Place]:
    try:
        return before.look(container, plan.operations)
    except OSError as error:
        raise FolderError(
            f"{rootfs} can't be looked at: {error.strerror} ({error.filename})",
            "Mend or remove that path in the folder",
        ) from None


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
    found = image.unknown()
    if rootfs is not None:
        with inject.open_folder(rootfs) as container:
            found = inject.examine(container, config, resolved.examiners())
    operations, left_out = usable(make_plan(resolved.grants, found, resolved.groups).operations)
    plan = Plan(operations)
    undone = [*apply.undone(plan), *fstab.undone(plan)]
    steps = [op for op in operations if op not in undone]
    return Done(steps, undone, [*resolved.warnings(), *left_out]), plan


def undo(rootfs: str, state: str) -> bool:
    """Make a folder what it was before ``give``; False where nothing is known of it.

    FolderError, and what is known is kept, where something can't be undone.
    """
    with _locked(state), inject.open_folder(rootfs) as container:
        place = before.state_file(state, container.real_place())
        places = before.load(place)
        if places is None:
            return False
        _take_back(rootfs, container, places, place)
        return True


def _take_back(rootfs: str, opened: Container, places: list[before.Place], state_file: str) -> None:
    """Make an opened folder what it was; opened once more, because that changes what is cached."""
    with inject.open_folder(rootfs) as container:
        here, there = (kernel.identity(each.folder("/")) for each in (container, opened))
        if here != there:  # protects: undone-folder
            raise FolderError(
                f"{rootfs} has become another folder meanwhile",
                "See who may change what is above it, and run this again",
            )
        problems = before.put_back(container, places)
    if problems:
        raise FolderError(
            f"{rootfs} couldn't be made what it was: {'; '.join(problems)}",
            "End the programs that use the folder, and run gpuhook apply --undo again",
        )
    before.forget(state_file)


def _locked(state: str) -> contextlib.AbstractContextManager[None]:
    if not state:
        return contextlib.nullcontext()
    folder = os.path.join(state, "applied")
    return Lock(folder, "changing a root folder", _PATIENCE, FolderError).held()


def append(path: str, text: str) -> None:
    """Add text to a file of the caller's, which may be new; OSError, and never a link followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o644)
    try:
        write_all(fd, text.encode("utf-8", "surrogateescape"))
    finally:
        os.close(fd)
