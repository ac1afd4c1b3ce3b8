"""gpu-py, the OCI runtime: add the hook and the device rules on create, then be the real one."""

import _signal  # type: ignore[import-not-found]
import os
import sys

from gpuhook.ground import log, names
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import (
    CommandLineError,
    ConfigError,
    GpuhookError,
    RuntimeMissingError,
    UnusableSpecError,
    shown,
)
from gpuhook.ground.oci.runtime_argv import Arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


# What a low-level runtime keeps of a container in its folder.
_KEPT = {"crun": "status", "runc": "state.json"}


def main(
    launcher: str,
    argv: list[str],
    environment: dict[bytes, bytes],
    umask: int,
    *,
    save: bool = False,
) -> "NoReturn":
    """Act on a command line and become the low-level runtime, or exit with status 1.

    ``launcher`` is the absolute path of gpu-py, ``argv`` the words after it,
    ``environment`` what the low-level runtime is to get, and ``umask`` too where the container gets
    no GPU: where it does, that runtime makes the places to mount the driver's files on. With
    ``save``, what the launcher must know of the configuration is saved for it.
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
        runtime = find_runtime(config.runtimes, environment.get(b"PATH", b""), launcher, made)
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
    """Load the configuration; one that can't be read must not stop kill, delete or state."""
    try:
        return load()
    except ConfigError:
        if creating:
            raise
        return Config()


def _become(runtime: str, argv: list[str], environment: dict[bytes, bytes]) -> "NoReturn":
    # Python ignores these two, and what is ignored stays so across exec, into every hook.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(runtime, [runtime, *argv], environment)  # noqa: S606 - becoming it is the point
    except OSError as error:
        raise RuntimeMissingError(
            f"The low-level runtime {runtime} can't be started: {error.strerror}",
            "Reinstall it, or name another in [nvidia-container-runtime] runtimes",
        ) from None


def find_maker(arguments: Arguments, runtime_dir: str) -> str:
    """Return which of crun and runc has the container of a command line, "" for neither.

    Each keeps a file of its own there that the other can't read: where another one was installed
    or configured meanwhile, the first of the list could neither stop nor delete the container.
    ``runtime_dir`` is XDG_RUNTIME_DIR; without --root, containers are kept there or in /run. A
    user's, which su leaves in root's environment, says nothing.
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

    A candidate with a slash is a path, another one is looked for in PATH and then in the
    usual folders. ``launcher`` is never its own low-level runtime. ``made`` is crun or runc, which
    made the container: the other one, of whatever version, comes after it.
    """
    ourselves = os.path.realpath(launcher)
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
            if usable and os.path.realpath(place) != ourselves:
                return place
    raise RuntimeMissingError(
        f"None of the low-level runtimes {', '.join(candidates) or '(empty list)'} was found",
        "Install runc or crun, or name one in [nvidia-container-runtime] runtimes of config.toml",
    )


def check_restored(words: tuple[str, ...], config: Config) -> None:
    """Refuse to restore a container as ``edit.check_restored`` does, whatever its bundle is.

    Of the command line's ``words`` each may name it, whatever option stands before it.
    """
    from gpuhook.ground.oci.spec import read_spec  # noqa: PLC0415 - other verbs don't need it
    from gpuhook.start import edit  # noqa: PLC0415 - as above
    from gpuhook.vendors import registry  # noqa: PLC0415 - as above

    named = [part for word in words for part in (word, word.partition("=")[2], word[2:])]
    for folder in dict.fromkeys(["", *named]):
        path = os.path.join(folder, "config.json")
        try:
            spec = read_spec(path) if os.path.isfile(path) else None
        except UnusableSpecError:  # which the low-level runtime refuses
            continue
        if spec is not None:
            edit.check_restored(spec, config, registry.known(config))


def prepare_bundle(arguments: Arguments, config: Config, launcher: str) -> bool:
    """Rewrite a bundle's config.json for the GPUs it asks for; tell whether it asks for any.

    One that isn't there, or is no JSON for anybody, is for the low-level runtime to refuse, in
    its own words. A helper is started that does the hook's work while we are that runtime.
    """
    from gpuhook.ground.oci.spec import read_spec  # noqa: PLC0415 - other verbs don't need it
    from gpuhook.start.edit import check_other_config, edit  # noqa: PLC0415 - as above
    from gpuhook.vendors import registry  # noqa: PLC0415 - as above

    path = os.path.join(arguments.bundle or "", "config.json")
    other = bool(arguments.config) and not _is_same_file(arguments.config, path)
    try:
        spec = read_spec(arguments.config if other else path)
    except UnusableSpecError:
        return False
    folder, known = os.path.dirname(launcher), registry.known(config)
    if other:
        check_other_config(spec, config, known)
        return False
    has_worker = config.helper and os.geteuid() == 0
    edited = edit(spec, config, known, folder, has_worker=has_worker, container=arguments.container)
    if edited is None:
        return False
    words: list[str] = []
    if has_worker and edited.task is not None:
        from gpuhook.prefork import hook_worker  # noqa: PLC0415 - only where a GPU is asked for

        # Whoever runs a container to its end waits, as crun does, for all that was started.
        stays = launcher if config.standby and arguments.verb == "create" else ""
        words = hook_worker.start(edited.task, config, stays)
    edited.finish(words).write()
    return True
