"""Controller of an MPS control daemon, as configured in [gpuhook.mps].

State is written before each change, so a later process finds it, even after kill -9. The GPUs'
compute modes are in the ledger: ``devices`` for ``gpuhook mps``, the claim's record for a claim.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from gpuhook.base import names
from gpuhook.base.config.model import Config
from gpuhook.base.config.mps import bytes_of
from gpuhook.base.errors import GpuhookError, MpsError, listed
from gpuhook.base.host import files as host_files
from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.host import users_tree
from gpuhook.monitor.host.child import BackOff
from gpuhook.monitor.ledger.records import Ids
from gpuhook.monitor.mps.control import SERVER, Control, program_of
from gpuhook.monitor.mps.devices import MpsDevices
from gpuhook.vendors.nvidia import mps
from gpuhook.vendors.nvidia import names as nvidia
from gpuhook.vendors.nvidia.model import WSL, Gpu, NvidiaInventory

_THIRD = 615  # the first driver with version 3
_WAIT = 60.0  # seconds that another gpuhook mps may hold the lock
_LOCK = "mps.lock"  # in the state folder itself, which every user may open and so lock
_MEGA = 1 << 20
_SHM_SIZE = "size=1g,mode=1777,nosuid,nodev,noexec"
_DETACHING = 10.0  # seconds to detach mounts of users in the shared memory
_BACK_OFF = (1.0, 60.0)  # seconds before the daemon is started again: the first, the longest


class MpsController:
    """Controller of this host's MPS daemon; ``tell`` receives a sentence for each event.

    A claim's daemon is ``for_claim``: the claim's record in the ledger holds the devices, and
    ``memory`` has memory limits in bytes by UUID, which replace the configured ones. ``inventory``
    is NVIDIA's, if known. ``in_use`` asks the kubelet for pods' devices. ``followed`` provides
    the settings when the daemon is restarted.
    """

    def __init__(
        self,
        config: Config,
        tell: Callable[[str], None],
        memory: Mapping[str, int] = MappingProxyType({}),
        inventory: NvidiaInventory | None = None,
        *,
        for_claim: bool = False,
        in_use: Ids = lambda: None,
        followed: FollowedConfig | None = None,
    ) -> None:
        self._config = config
        self._tell = tell
        self._memory = memory
        self._known = inventory
        self._devices = None if for_claim else MpsDevices(config, self._inventory, in_use)
        self._followed = followed
        self.base = f"{config.state_dir}/{mps.FOLDER}"

    # Starting ----------------------------------------------------------------------------------

    def start(self) -> mps.MpsState:
        """Start the daemon if it isn't running; return its state.

        MpsError or DriverError on failure, and then nothing has changed.
        """
        with self._locked():
            before = mps.read(self._config.state_dir)
            wanted = self.wanted(before)
            if self._devices is not None:
                self._devices.check(wanted.devices)  # before a daemon is stopped
            if before is not None:
                if before.but(daemon="", ready=False) == wanted and self._answers(before):
                    self._hold(wanted)
                    return before
                self._end_daemon(before)
            return self._start(wanted)

    def _hold(self, state: mps.MpsState) -> None:
        if self._devices is not None:
            self._devices.hold(state.devices)

    def _start(self, state: mps.MpsState) -> mps.MpsState:
        self._make_folders(state.version)
        self._save(state)
        try:
            self._hold(state)
            control = self.control(state)
            daemon = control.start([each.uuid for each in state.devices])
            state = state.but(daemon=daemon)
            self._save(state.but(places=()))  # a later process needs it to stop the daemon
            state = self._set_up(control, state).but(ready=True)
            control.check(state.threads)
        except BaseException:  # those of signals, too
            self._undo()
            raise
        self._save(state)
        shared = [str(each.index) for each in state.devices]
        self._tell(f"MPS {state.version} serves GPU {listed(shared)}, process {state.daemon}")
        return state

    def _set_up(self, control: Control, state: mps.MpsState) -> mps.MpsState:
        """Set the daemon's limits, and create the namespaces of version 3."""
        if state.version < 3:
            if state.threads:
                control.tell(f"set_default_active_thread_percentage {state.threads}")
            for place, each in enumerate(state.devices):
                if each.memory:
                    limit = f"{each.memory // _MEGA}M"
                    control.tell(f"set_default_device_pinned_mem_limit {place} {limit}")
            control.start_first_server()  # last: a server keeps the defaults of its start
            return state
        uuids = ",".join(each.uuid for each in state.devices)
        control.tell(f"server create {SERVER} --uid=0 --allowed-devices={uuids}")
        smallest = min((each.memory for each in state.devices if each.memory), default=0)
        limits = f" --pinned-memory-limit={smallest // _MEGA}M" if smallest else ""
        limits += f" --active-thread-percentage={state.threads}" if state.threads else ""
        places = [f"c{number:02d}" for number in range(state.clients * len(state.devices))]
        for name in places:
            control.tell(f"namespace create {name} --server={SERVER}")
            if limits:
                control.tell(f"namespace set {name} --server={SERVER}{limits}")
        return state.but(places=tuple(self._folder_of(name) for name in places))

    def _folder_of(self, name: str) -> str:
        """Return a namespace's folder, relative to the pipe folder."""
        pipe = f"{self.base}/{mps.PIPE}"
        for found, folders, _ in os.walk(pipe):
            if name in folders:
                return os.path.relpath(f"{found}/{name}", pipe)
        raise MpsError(
            f"MPS' control daemon created the namespace {name} without a folder below {pipe}",
            "Set version = 2 in [gpuhook.mps], and report it",
        )

    def wanted(self, before: mps.MpsState | None = None) -> mps.MpsState:
        """Return the state that config.toml and the host's devices call for, without a daemon.

        MpsError or DriverError for a configuration that isn't possible.
        """
        config = self._config
        if not config.mps_devices:
            raise MpsError(
                "config.toml shares no device by MPS", "Set devices in its section [gpuhook.mps]"
            )
        devices = []
        for gpu in self._gpus():
            total, asked = gpu.memory, config.mps_memory
            memory = bytes_of(asked, total) if asked else 0
            if gpu.uuid in self._memory:
                memory = self._memory[gpu.uuid]
                asked = f"{memory // _MEGA}MiB"
            if memory is None or memory > total or 0 < memory < _MEGA:
                raise MpsError(
                    f"The memory limit of GPU {gpu.index} is {asked}, and it has "
                    f"{total // _MEGA} MiB",
                    "Set a size from 1MiB to the GPU's memory, or a share such as 50%",
                )
            devices.append(mps.SharedDevice(gpu.uuid, gpu.index, memory, total))
        version = self._version()
        places = () if before is None else before.places
        return mps.MpsState(
            version, tuple(devices), "", config.mps_percentage, config.mps_clients, places
        )

    def _version(self) -> int:
        wanted = self._config.mps_version
        major = self._inventory().driver_version.partition(".")[0]
        has_third = major.isdecimal() and int(major) >= _THIRD
        if wanted == "3" and not has_third:
            raise MpsError(
                f"MPS' version 3 came with driver {_THIRD}, and this is driver "
                f"{self._inventory().driver_version}",
                "Set version = 2 or auto in [gpuhook.mps]",
            )
        return 3 if has_third and wanted != "2" else 2

    def _gpus(self) -> list[Gpu]:
        """Return the GPUs to share; MpsError if one of them can't be shared."""
        inventory = self._inventory()
        if inventory.platform:
            title = "WSL2" if inventory.platform == WSL else inventory.platform
            raise MpsError(f"There is no MPS on {title}", "Remove devices from [gpuhook.mps]")
        words = self._config.mps_devices
        meant = {each.id for each in inventory.devices if mps.is_meant(words, each)}
        gpus = [gpu for gpu in inventory.gpus if gpu.uuid in meant]
        known = {word for each in inventory.devices for way in each.names.values() for word in way}
        unknown = [word for word in map(str.strip, words.split(",")) if word not in known]
        if (words != "all" and unknown) or not gpus:
            raise MpsError(
                f"gpuhook.mps.devices names {listed(unknown) or words}, and there is no such GPU",
                "Correct it; `gpuhook info` shows the GPUs",
            )
        mig = [str(gpu.index) for gpu in gpus if gpu.mig_enabled]
        mig += [word for word in words.split(",") if word.strip().startswith("MIG-")]
        if mig:
            raise MpsError(
                f"GPU {listed(mig)} is in MIG mode, and gpuhook shares no such GPU by MPS",
                "Remove it from gpuhook.mps.devices, or disable its MIG mode",
            )
        return gpus

    def _inventory(self) -> NvidiaInventory:
        if self._known is not None:
            return self._known
        found: NvidiaInventory = cache.get_inventory(self._config, contract.load(nvidia))  # type: ignore[assignment]
        return found

    def control(self, state: mps.MpsState) -> Control:
        """Return the client of the daemon."""
        inventory = self._inventory()
        cuda = next((each.path for each in inventory.files if "/libcuda.so." in each.path), "")
        own = inventory.root != "/"
        libraries = inventory.root.rstrip("/") + os.path.dirname(cuda) if own and cuda else ""
        return Control(program_of(inventory), self.base, state.version, libraries)

    # Monitoring ---------------------------------------------------------------------------------

    def _answers(self, state: mps.MpsState) -> bool:
        try:
            self.check(state)
        except MpsError:
            return False
        return True

    def check(self, state: mps.MpsState) -> None:
        """Raise MpsError if the daemon isn't running or doesn't respond."""
        if not mps.lives(state):
            raise MpsError("MPS' control daemon isn't running", mps.START)
        if not state.ready:  # protects: mps-set-up
            raise MpsError("MPS' control daemon hasn't got its limits", mps.START)
        self.control(state).check(state.threads)

    def serve(self, interval: float, ready: Callable[[], None]) -> None:
        """Start the daemon, and restart it whenever it doesn't respond; never return."""
        self.start()
        ready()
        back_off = BackOff(*_BACK_OFF)
        pause = interval
        while True:
            time.sleep(pause)
            try:
                self.look_after()
            except GpuhookError as error:
                pause = back_off.grow()
                self._tell(f"{error} (again in {pause:g} seconds)")
            else:
                back_off.reset()
                pause = interval

    def look_after(self) -> bool:
        """Restart the daemon if it doesn't respond; return whether it was restarted.

        GpuhookError on failure.
        """
        state = mps.read(self._config.state_dir)
        if state is not None:
            try:
                self.check(state)
            except MpsError as error:
                self._tell(str(error))
            else:
                return False
        if self._followed is not None and self._followed.has_changed(self._tell):
            self._config = self._followed.config  # protects: mps-settings
        self.start()
        return True

    # Stopping -------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Stop the daemon and restore compute modes; False if there was nothing to stop."""
        with self._locked():
            return self._undo()

    def _undo(self) -> bool:
        state = mps.read(self._config.state_dir)
        is_held = self._devices is not None and self._devices.are_held()
        if state is not None:
            self._end_daemon(state)
        if self._devices is not None and (is_held or state is not None):
            if self._devices.are_unknown():
                self._tell(
                    "The record of compute modes can't be read: GPUs keep their current mode; "
                    "nvidia-smi -c sets another"
                )
            self._devices.release()
        if state is None:
            return is_held
        self._unmount_shm()
        with StateDirectory.opened(self._config.state_dir) as folder:
            folder.remove(mps.STATE)
        return True

    def _unmount_shm(self) -> None:
        """Detach the shared memory and all mounts of users in it; MpsError on failure."""
        try:
            folder = os.open(self.base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            with contextlib.suppress(FileNotFoundError):  # version 3 has none
                # protects: mps-shared-memory
                users_tree.uncover(folder, mps.SHM, time.monotonic() + _DETACHING)
        except OSError as error:
            raise MpsError(
                f"{self.base}/{mps.SHM} can't be unmounted: {error.strerror}",
                "Run this as root with CAP_SYS_ADMIN",
            ) from None
        finally:
            os.close(folder)

    def _end_daemon(self, state: mps.MpsState) -> None:
        control = self.control(state)
        if not state.daemon:
            control.settle()  # protects: mps-begun
        # protects: mps-unwritten
        for process in dict.fromkeys((state.daemon, control.process())):
            if process:
                control.end(process)

    # Files --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of gpuhook mps for a block."""
        if os.geteuid() != 0:
            raise MpsError("Only root can start or stop MPS", "Run this as root")
        folder = StateDirectory.make(self._config.state_dir)
        if folder is None:
            raise MpsError(
                f"{self._config.state_dir} can't be used, or others may write to it",
                "Correct state-dir in [gpuhook]",
            )
        path = f"{folder.path}/{_LOCK}"
        try:
            with folder:
                held = folder.lock(_LOCK, _WAIT)
        except TimeoutError:
            raise MpsError(
                f"Another process has locked {path} for {_WAIT:g} seconds",
                "Wait until it has ended, and run this again; `lslocks` names it",
            ) from None
        except OSError as error:
            raise MpsError(
                f"{path} can't be made: {error.strerror}", "Make space for it, or remove it"
            ) from None
        with held:
            yield

    def _make_folders(self, version: int) -> None:
        for name, mode in (("", 0o755), (mps.PIPE, 0o755), (mps.LOG, 0o700), (mps.CLAIMS, 0o700)):
            _folder(f"{self.base}/{name}".rstrip("/"), mode)
        shm = f"{self.base}/{mps.SHM}"
        if version < 3:
            _folder(shm, 0o755)
            if not os.path.ismount(shm):
                _mount("mount", "-t", "tmpfs", "-o", _SHM_SIZE, "gpuhook-mps", shm)

    def _save(self, state: mps.MpsState) -> None:
        text = jsontext.dumps(state.to_json()).encode()
        try:
            with StateDirectory.opened(self._config.state_dir) as folder:
                folder.write_checked(mps.STATE, text)
        except OSError as error:
            raise MpsError(
                f"{self._config.state_dir}/{mps.STATE} can't be written: {error.strerror}",
                host_files.remedy(error, "Correct state-dir in [gpuhook]"),
            ) from None


def _folder(path: str, mode: int) -> None:
    """Create a folder of root with that mode; an existing one must belong to root."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise MpsError(f"{path} doesn't belong to root", "Remove it")
        if not os.path.ismount(path):
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _mount(*words: str) -> None:
    environment = {"PATH": names.SYSTEM_PATH, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=30,
        check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise MpsError(f"{' '.join(words)} failed: {said}", "Run this as root with CAP_SYS_ADMIN")
