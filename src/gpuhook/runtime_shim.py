"""gpu-py, the OCI runtime: edits config.json on create, then executes the low-level runtime."""

import _signal  # type: ignore[import-not-found]
import os
import sys

from gpuhook.base import log, names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import (
    CommandLineError,
    ConfigError,
    GpuhookError,
    RuntimeMissingError,
    UnusableSpecError,
    shown,
)
from gpuhook.base.oci.runtime_argv import Arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


# The state file that each low-level runtime keeps for a container.
_KEPT = {"crun": "status", "runc": "state.json"}


def main(
    launcher: str,
    argv: list[str],
    environment: dict[bytes, bytes],
    umask: int,
    *,
    save: bool = False,
) -> "NoReturn":
    """Process a command line and become the low-level runtime, or exit with status 1.

    ``launcher`` is the absolute path of gpu-py, ``argv`` its arguments, and ``environment`` the
    environment of the low-level runtime. ``umask`` is restored unless devices are injected, because
    then that runtime creates mount points that all users must be able to enter. With ``save``, the
    launcher's cache is written.
    """
    arguments = Arguments(argv)
    config = Config()
    try:
        creating = arguments.verb in names.CREATING_VERBS
        restoring = arguments.verb == names.RESTORING_VERB
        config = _load_config(creating or restoring)
        if save:
            from gpuhook.prefork import launcher_cache  # noqa: PLC0415 - once after every change

            launcher_cache.save(config.path)
        made = find_maker(arguments, os.fsdecode(environment.get(b"XDG_RUNTIME_DIR", b"")))
        engines = os.fsdecode(environment.get(names.ENGINES_RUNTIME.encode(), b""))
        candidates = config.low_level_runtimes(engines)
        runtime = find_runtime(candidates, environment.get(b"PATH", b""), launcher, made)
        if arguments.unclear:  # protects: unclear-arguments
            raise _unclear(arguments.unclear)
        if restoring:
            check_restored(arguments.rest, config)
        if not (creating and prepare_bundle(arguments, config, launcher)):
            os.umask(umask)
        _become(runtime, argv, environment)
    except GpuhookError as error:
        log.error(names.RUNTIME, str(error), config, arguments.log)
        sys.exit(1)


def _unclear(word: str) -> CommandLineError:
    return CommandLineError(
        f"It isn't clear what {shown(word)} means to the low-level runtime in this command line",
        f"Write options in full, before the id: {names.RUNTIME} --root DIR create --bundle DIR ID",
    )


def _load_config(creating: bool) -> Config:
    """Load the configuration; an unreadable one must not prevent kill, delete or state."""
    try:
        return load()
    except ConfigError:
        if creating:
            raise
        return Config()


def _become(runtime: str, argv: list[str], environment: dict[bytes, bytes]) -> "NoReturn":
    # Python ignores these two signals, which the runtime and all hooks would inherit.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(runtime, [runtime, *argv], environment)  # noqa: S606 - intended
    except OSError as error:
        raise RuntimeMissingError(
            f"The low-level runtime {runtime} can't be started: {error.strerror}",
            "Reinstall it, or name another in [nvidia-container-runtime] runtimes",
        ) from None


def find_maker(arguments: Arguments, runtime_dir: str) -> str:
    """Return the runtime, crun or runc, that created a command line's container; "" for neither.

    Each keeps a state file that the other can't read. If the configured runtime has changed since
    the create, the new one could neither stop nor delete the container. ``runtime_dir`` is
    XDG_RUNTIME_DIR; without --root, containers are kept there or in /run. A user's folder, which su
    leaves in root's environment, is ignored.
    """
    if not _is_own(runtime_dir):  # protects: own-runtime-dir
        runtime_dir = "/run"
    for word in arguments.rest:
        if word[:1] in ("", "-", ".") or "/" in word:
            continue
        for name, kept in _KEPT.items():
            usual = (f"{runtime_dir}/{name}", f"/run/{name}")
            folders = (arguments.root,) if arguments.root else usual
            if any(os.path.isfile(f"{folder}/{word}/{kept}") for folder in folders):
                return name
    return ""


def _is_same_file(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _is_own(folder: str) -> bool:
    try:
        return os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def find_runtime(candidates: tuple[str, ...], path: bytes, launcher: str, made: str = "") -> str:
    """Return the first low-level runtime that exists; RuntimeMissingError if none does.

    A candidate with a slash is a path; others are searched for in PATH and then in the usual
    folders. ``launcher`` is never its own low-level runtime. ``made`` is the runtime that created
    the container, crun or runc; all candidates of the other one, of any version, come after it.
    """
    own_path = os.path.realpath(launcher)
    folders = [folder for folder in os.fsdecode(path).split(":") if folder.startswith("/")]
    other = {"crun": "runc", "runc": "crun"}.get(made, "/")
    able = [each for each in candidates if other not in each.rpartition("/")[2]]
    for candidate in (*able, *filter(None, [made]), *candidates):
        if "/" in candidate:
            places = [candidate]
        else:
            places = [
                f"{folder}/{candidate}" for folder in (*folders, *names.SEARCH_PATH.split(":"))
            ]
        for place in places:
            usable = os.path.isfile(place) and os.access(place, os.X_OK)
            if usable and os.path.realpath(place) != own_path:
                return place
    raise RuntimeMissingError(
        f"None of the low-level runtimes {', '.join(candidates) or '(empty list)'} was found",
        "Install runc or crun, or name one in [nvidia-container-runtime] runtimes of config.toml",
    )


def check_restored(words: tuple[str, ...], config: Config) -> None:
    """Apply ``edit.check_restored`` to each bundle that a restore may mean.

    Any of the command line's ``words`` may name the bundle, after any option.
    """
    from gpuhook.base.oci.spec import read_spec  # noqa: PLC0415 - other verbs don't need it
    from gpuhook.core import edit  # noqa: PLC0415 - as above
    from gpuhook.vendors import registry  # noqa: PLC0415 - as above

    named = [part for word in words for part in (word, word.partition("=")[2], word[2:])]
    for folder in dict.fromkeys(["", *named]):
        path = os.path.join(folder, "config.json")
        try:
            spec = read_spec(path) if os.path.isfile(path) else None
        except UnusableSpecError:  # the low-level runtime refuses it
            continue
        if spec is not None:
            edit.check_restored(spec, config, registry.all_vendors(config))


def prepare_bundle(arguments: Arguments, config: Config, launcher: str) -> bool:
    """Rewrite a bundle's config.json for its devices; return whether that was needed.

    A config.json that is missing or surely invalid JSON is left to the low-level runtime, which
    refuses it with its own message. If there is a task for a hook worker, one is forked, which does
    the hook's work while this process is that runtime.
    """
    from gpuhook.base.oci.spec import read_spec  # noqa: PLC0415 - other verbs don't need it
    from gpuhook.core.edit import check_other_config, edit  # noqa: PLC0415 - as above
    from gpuhook.vendors import registry  # noqa: PLC0415 - as above

    path = os.path.join(arguments.bundle or "", "config.json")
    other = bool(arguments.config) and not _is_same_file(arguments.config, path)
    try:
        spec = read_spec(arguments.config if other else path)
    except UnusableSpecError:
        return False
    folder, vendors = os.path.dirname(launcher), registry.all_vendors(config)
    if other:
        check_other_config(spec, config, vendors)
        return False
    has_worker = config.helper and os.geteuid() == 0
    edited = edit(
        spec, config, vendors, folder,
        has_worker=has_worker, container=arguments.container, starter=os.getpid(),
    )  # fmt: skip
    if edited is None:
        return False
    words: list[str] = []
    if has_worker and edited.task is not None:
        from gpuhook.prefork import hook_worker  # noqa: PLC0415 - only for requests of a GPU

        # With run, crun waits for the end of all its children, so no prefork server is started.
        prefork = launcher if config.standby and arguments.verb == "create" else ""
        words = hook_worker.start(edited.task, config, prefork)
    edited.finish(words).write()
    return True
