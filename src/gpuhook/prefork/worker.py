"""A worker of the prefork server: serves one request.

For a launcher, it edits one config.json, responds with the new one, and is then that container's
hook worker, if its hook needs one. The launcher writes the new config.json into the bundle, so a
late worker changes nothing.

For the hook of a CDI spec, it does that hook's work. The hook sends a request if it has no hook
worker, whether the engine or gpu-py applied the CDI spec. It already runs in the container's
namespaces, so the worker itself checks that those were created from ours.
"""

import os

from gpuhook import cdi_hook
from gpuhook.base import names
from gpuhook.base.container import kernel
from gpuhook.base.errors import GpuhookError
from gpuhook.base.fileio import write_all
from gpuhook.base.oci.spec import read_spec
from gpuhook.core import contract
from gpuhook.core.edit import edit
from gpuhook.prefork import hook_worker, peer_check, slots
from gpuhook.prefork.slots import ANSWER, ASKED, FOLDER_FD, REPORT, REQUEST, SLOT_COUNT, SLOTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gpuhook.inject import Injection
    from gpuhook.prefork.snapshot import LoadedState
    from gpuhook.vendors.nvidia.nvml_session import NvmlSession

# Seconds for taking the request, and then for the response. The first shows that the worker runs;
# the second suffices even if a hundred containers start at once.
PATIENCE, LONG = 2.0, 10.0
TAKEN, ANSWERED, STALE, MEMORY_LIMITED = b"t", b"a", b"s", b"l"  # reports to the server
NAME = "gpuhook-standby"  # process name of supervisor, server, and a worker with a request
_SPARE_NAME = "gpuhook-next"
_NO = b"no\n"


def _read_line(pipe: int) -> bytes:
    """Wait for a request, and return it; exit at the end of the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(pipe, slots.REQUESTS_MOST)
        if not more:
            os._exit(0)
        line += more
    return line[:-1]


class Worker:
    """A worker: edits one config.json, responds, and then is that container's hook worker."""

    def __init__(self, launcher: str, state: "LoadedState", nvml: "NvmlSession") -> None:
        self._config = state.config
        self._nvml = nvml
        self._folder = os.path.dirname(os.path.abspath(launcher))
        self._state = state
        self._bundle = ""

    def run(self, parent: int, request: int, report: int) -> "NoReturn":
        """Serve one request and exit, whatever happens; never return into the server's code."""
        try:
            self._prepare(parent, request, report)
            slot, requester, about = os.fsdecode(_read_line(REQUEST)).split(" ", 2)
            kernel.set_name(NAME)
            os.dup2(SLOTS + int(slot), ANSWER, inheritable=False)
            kernel.keep_only((ASKED, ANSWER, FOLDER_FD, REPORT, *self._nvml.descriptors()))
            self._answer(int(requester), about)
        finally:
            os._exit(0)

    def _prepare(self, parent: int, request: int, report: int) -> None:
        """Keep only a worker's descriptors and the slots; end together with the server.

        A spare worker needs no timer: the server has one, and the worker ends with it.
        """
        kernel.die_with_parent()
        kernel.set_name(_SPARE_NAME)
        os.dup2(request, REQUEST, inheritable=False)
        os.dup2(report, REPORT, inheritable=False)
        asked = hook_worker.pipe_for_both()
        os.dup2(asked, ASKED, inheritable=False)
        all_slots = range(SLOTS, SLOTS + SLOT_COUNT)
        kernel.keep_only((ASKED, REQUEST, FOLDER_FD, REPORT, *self._nvml.descriptors(), *all_slots))
        if os.getppid() != parent:
            os._exit(0)

    def _answer(self, requester: int, about: str) -> None:
        """Respond to the launcher or hook of that process id.

        ``about`` is a bundle's path and the container's id if the requester is gpu-py, and the kind
        of a CDI spec if it is that spec's hook.
        """
        try:
            if about.startswith("/"):
                self._bundle, _, container = about.rpartition(" ")
                self._serve(requester, container)
            else:
                self._serve_hook(requester, about)
        except (GpuhookError, OSError, ValueError, KeyError):
            os.write(ANSWER, _NO)  # launcher or hook starts Python, which reports the error

    def _serve(self, launcher: int, container: str) -> None:
        os.write(ANSWER, b"taken\n")
        os.write(REPORT, TAKEN)
        runtime = peer_check.open_launcher(launcher)
        if not self._is_same():
            return
        spec = read_spec(f"{self._bundle}/config.json")
        state = self._state
        edited = edit(
            spec, self._config, state.vendors, self._folder, has_worker=True,
            inventories=state.inventories, documents=state.documents, container=container,
            starter=launcher,
        )  # fmt: skip
        task = edited.task if edited is not None else None
        words = self._become_hook_worker() if task is not None else ()
        data = edited.finish(words).encoded() if edited is not None else b""
        kernel.end_after(hook_worker.DEADLINE)
        kernel.die_with_parent(yes=False)
        os.write(REPORT, ANSWERED)
        write_all(ANSWER, b"%d %d\n" % (launcher, len(data)) + data)
        if task is not None:
            injection = hook_worker.injection_of(task, self._config, state.inventories)
            self._report_memory_limits(injection)
            hook_worker.serve(
                hook_worker.Pipes(ASKED, ANSWER, FOLDER_FD, runtime), self._config, injection
            )

    def _report_memory_limits(self, injection: "Injection | cdi_hook.DocumentInjection") -> None:
        """Report limits of the container that NVML sets; without any, drop our access to NVML."""
        if injection.memory_limits is not None and injection.memory_limits.are_slow:
            os.write(REPORT, MEMORY_LIMITED)
        else:
            self._nvml.forget()

    def _is_same(self) -> bool:
        """Return whether the loaded state is unchanged; if not, make the server end."""
        if self._state.is_same():
            return True
        os.write(REPORT, STALE)
        os.write(ANSWER, _NO)
        return False

    def _serve_hook(self, hook: int, kind: str) -> None:
        """Do the work of a CDI spec's hook, whether the engine or gpu-py applied the spec."""
        vendor_names = {each.KIND: each for each in self._state.vendors.values()}[kind]
        inventory = self._state.inventories[vendor_names.NAME]
        peer_check.check_hook(hook, ANSWER)
        if not self._is_same():
            return
        kernel.end_after(hook_worker.DEADLINE)
        kernel.die_with_parent(yes=False)
        os.write(REPORT, ANSWERED)

        def work() -> None:
            vendor = contract.load(vendor_names)
            text = hook_worker.state_text(hook)
            cdi_hook.serve(text, hook, self._config, vendor, inventory, self._report_memory_limits)

        hook_worker.answer(ANSWER, self._config, names.CDI_HOOK, work)

    def _become_hook_worker(self) -> list[str]:
        """Become the container's hook worker; return the arguments that lead the hook to it."""
        bundle = os.open(self._bundle, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.dup2(bundle, FOLDER_FD, inheritable=False)
        os.close(bundle)
        pipes = hook_worker.Pipes(ASKED, ANSWER, FOLDER_FD, -1)
        return pipes.words(os.getpid(), self._bundle)
