"""A child of the process that stands ready: serves one question.

It edits one config.json, answers with the new one, and is the container's helper from then on. The
launcher puts that into the bundle, so a child that is late changes nothing. Or the child does the
work of the hook of a CDI document. That asks wherever the engine or gpu-py applied the document,
and is in the container's namespaces already, so the child finds out itself whether those were made
in ours.
"""

import os

from gpuhook import cdi_hook
from gpuhook.ground import names
from gpuhook.ground.container import kernel
from gpuhook.ground.errors import GpuhookError
from gpuhook.ground.fileio import write_all
from gpuhook.ground.oci.spec import read_spec
from gpuhook.prefork import hook_worker, peer_check, slots
from gpuhook.prefork.slots import ANSWER, ASKED, FOLDER_FD, QUESTION, REPORT, SLOT_COUNT, SLOTS
from gpuhook.start import contract
from gpuhook.start.edit import edit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.inject import Injection
    from gpuhook.prefork.snapshot import LoadedState
    from gpuhook.vendors.nvidia.ready_nvml import ReadyNvml

# Seconds that it may take to take the question, and then to answer it. The first shows that it goes
# on; the second is more than that takes where a hundred containers start at once.
PATIENCE, LONG = 2.0, 10.0
TAKEN, ANSWERED, STALE, LIMITED = b"t", b"a", b"s", b"l"  # what its parent hears
NAME = "gpuhook-standby"  # what the process is called, and a child that has a question
_SPARE_NAME = "gpuhook-next"
_NO = b"no\n"


def _read_line(pipe: int) -> bytes:
    """Wait for a question, and return it; end where none comes any more."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(pipe, slots.QUESTIONS)
        if not more:
            os._exit(0)
        line += more
    return line[:-1]


class Worker:
    """A child: edits one config.json, answers, and then is that container's helper."""

    def __init__(self, launcher: str, around: "LoadedState", nvml: "ReadyNvml") -> None:
        self._config = around.config
        self._nvml = nvml
        self._folder = os.path.dirname(os.path.abspath(launcher))
        self._around = around
        self._bundle = ""

    def run(self, parent: int, question: int, report: int) -> "NoReturn":
        """Do all of it and end, whatever happens; never return into the parent's code."""
        try:
            self._prepare(parent, question, report)
            slot, asker, about = os.fsdecode(_read_line(QUESTION)).split(" ", 2)
            kernel.set_name(NAME)
            os.dup2(SLOTS + int(slot), ANSWER, inheritable=False)
            kernel.keep_only((ASKED, ANSWER, FOLDER_FD, REPORT, *self._nvml.descriptors()))
            self._answer(int(asker), about)
        finally:
            os._exit(0)

    def _prepare(self, parent: int, question: int, report: int) -> None:
        """Hold nothing but what a child needs, and the slots; end with the parent.

        There is no end for want of a question: the parent has one, and is ours.
        """
        kernel.die_with_parent()
        kernel.set_name(_SPARE_NAME)
        os.dup2(question, QUESTION, inheritable=False)
        os.dup2(report, REPORT, inheritable=False)
        asked = hook_worker.pipe_for_both()
        os.dup2(asked, ASKED, inheritable=False)
        every = range(SLOTS, SLOTS + SLOT_COUNT)
        kernel.keep_only((ASKED, QUESTION, FOLDER_FD, REPORT, *self._nvml.descriptors(), *every))
        if os.getppid() != parent:
            os._exit(0)

    def _answer(self, asker: int, about: str) -> None:
        """Answer the launcher or hook of that process id.

        ``about`` is a bundle's path and the container's id where the launcher asks that becomes the
        low-level runtime, and the kind of a CDI document where its hook asks.
        """
        try:
            if about.startswith("/"):
                self._bundle, _, container = about.rpartition(" ")
                self._serve(asker, container)
            else:
                self._serve_hook(asker, about)
        except (GpuhookError, OSError, ValueError, KeyError):
            os.write(ANSWER, _NO)  # the launcher starts Python, which says what is wrong

    def _serve(self, launcher: int, container: str) -> None:
        os.write(ANSWER, b"taken\n")
        os.write(REPORT, TAKEN)
        runtime = peer_check.open_launcher(launcher)
        if not self._is_same():
            return
        spec = read_spec(f"{self._bundle}/config.json")
        around = self._around
        edited = edit(
            spec, self._config, around.known, self._folder, has_worker=True,
            inventories=around.inventories, documents=around.documents, container=container,
        )  # fmt: skip
        task = edited.task if edited is not None else None
        words = self._as_helper() if task is not None else ()
        data = edited.finish(words).encoded() if edited is not None else b""
        kernel.end_after(hook_worker.DEADLINE)
        kernel.die_with_parent(yes=False)
        os.write(REPORT, ANSWERED)
        write_all(ANSWER, b"%d %d\n" % (launcher, len(data)) + data)
        if task is not None:
            injection = hook_worker.injection_of(task, self._config, around.inventories)
            self._report_limits(injection)
            hook_worker.serve(
                hook_worker.Pipes(ASKED, ANSWER, FOLDER_FD, runtime), self._config, injection
            )

    def _report_limits(self, injection: "Injection | cdi_hook.DocumentInjection") -> None:
        """Say that the container has limits that NVML sets; keep no way to ask it for others."""
        if injection.limits is not None and injection.limits.are_slow:
            os.write(REPORT, LIMITED)
        else:
            self._nvml.forget()

    def _is_same(self) -> bool:
        """Tell whether all is as it was; where it isn't, everything ends."""
        if self._around.is_same():
            return True
        os.write(REPORT, STALE)
        os.write(ANSWER, _NO)
        return False

    def _serve_hook(self, hook: int, kind: str) -> None:
        """Do the work of a CDI document's hook, whoever has applied the document."""
        vendor_names = {each.KIND: each for each in self._around.known.values()}[kind]
        inventory = self._around.inventories[vendor_names.NAME]
        peer_check.check_hook(hook, ANSWER)
        if not self._is_same():
            return
        kernel.end_after(hook_worker.DEADLINE)
        kernel.die_with_parent(yes=False)
        os.write(REPORT, ANSWERED)

        def work() -> None:
            vendor = contract.load(vendor_names)
            text = hook_worker.state_text(hook)
            cdi_hook.serve(text, hook, self._config, vendor, inventory, self._report_limits)

        hook_worker.answer(ANSWER, self._config, names.CDI_HOOK, work)

    def _as_helper(self) -> list[str]:
        """Be the container's helper; return the words by which the hook finds it."""
        bundle = os.open(self._bundle, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.dup2(bundle, FOLDER_FD, inheritable=False)
        os.close(bundle)
        pipes = hook_worker.Pipes(ASKED, ANSWER, FOLDER_FD, -1)
        return pipes.words(os.getpid(), self._bundle)
