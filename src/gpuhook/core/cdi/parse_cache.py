"""Cache of parsed CDI specs, saved for the next container start.

Reading YAML takes longer than a whole start should. The cache is in the state folder and is
trusted like a saved inventory. An entry is valid while its file has the same identity, size and
times. A damaged cache file costs time and nothing else.
"""

import os
import time

from gpuhook import __version__
from gpuhook.base.oci import jsontext
from gpuhook.base.state_directory import StateDirectory, digest
from gpuhook.core.cdi import folders
from gpuhook.core.cdi.parse_result import ParseResult, Problem
from gpuhook.core.inventory import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.base.config.model import Config

# protects: saved-mode
_MODE = 0o600  # a CDI spec may be readable by root only
_MOST_BYTES = 16 << 20  # of the cache: a larger one isn't read faster than the CDI specs
# A file that changes twice within one tick of the kernel's clock looks the same afterwards. So
# a file this young when it is read isn't cached; some filesystems have a tick of two seconds.
_SETTLED_NS = 3 * 10**9


# By path: a file's identity and its content.
Files = dict[str, tuple[tuple[int, ...], ParseResult]]


class Documents:
    """The saved CDI specs, for a long-running process: read again when the cache file changes."""

    def __init__(self, config: "Config") -> None:
        self._config = config
        self._identity: tuple[int, ...] | None = None
        self._files: Files = {}

    def files(self) -> Files:
        """Return the current content of the cache."""
        folder = StateDirectory.open(self._config.state_dir)
        if folder is None:
            return {}
        with folder:
            name = _file_name(self._config)
            try:
                status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            except OSError:
                return {}
            if cache.identity(status) != self._identity:
                whole = folder.read_checked(name)
                self._files = _parse(whole[0]) if whole else {}
                self._identity = cache.identity(whole[1]) if whole else None
            return self._files


def read_folders(config: "Config", documents: Documents | None = None) -> folders.FolderContent:
    """Return the content of the configured folders; read only changed files again."""
    began = time.time_ns()
    before = (documents or Documents(config)).files()
    parses = folders.ParseCache()
    parses.known.update(before)
    found = folders.read_folders(config.cdi_spec_dirs, parses)
    # protects: settled-document
    settled = {
        path: known
        for path, known in parses.known.items()
        # The ctime, which no user can set; it is in the future if the clock was set back since.
        if abs(began - known[0][-1]) > _SETTLED_NS
    }
    if settled != before:
        _save(config, settled)
    return found


def _file_name(config: "Config") -> str:
    """Return a file name that is unique for each list of folders, to avoid conflicts."""
    return f"cdi-documents-{digest(jsontext.dumps(config.cdi_spec_dirs).encode())}"


def _parse(text: str) -> Files:
    """Return the content of a cache file, nothing if another version wrote it."""
    try:
        version, files = jsontext.loads(text)
        if version != __version__:
            return {}
        return {
            path: (tuple(stamp), ParseResult(document, tuple(Problem(*each) for each in problems)))
            for path, (stamp, document, problems) in files.items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}


def _save(config: "Config", known: Files) -> None:
    files = {
        path: (stamp, reading.document, [(each.line, each.sentence) for each in reading.problems])
        for path, (stamp, reading) in known.items()
    }
    try:
        body = jsontext.dumps([__version__, files]).encode()
    except ValueError:  # an unpaired surrogate, from an escape
        return
    folder = StateDirectory.make(config.state_dir) if len(body) <= _MOST_BYTES else None
    if folder is None:
        return
    with folder:
        try:
            folder.write_checked(_file_name(config), body, _MODE)
        except OSError:
            pass  # it is only slower then
