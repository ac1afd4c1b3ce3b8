"""Documents as they were read, saved for the next container's start.

Reading YAML takes longer than a whole start may. What is saved lies in the state folder and is
trusted as a saved inventory is. A file counts as read while it is the same one with the same
size and times; whatever is wrong with the saved file costs time and nothing else.
"""

import os
import time

from gpuhook import __version__
from gpuhook.ground.oci import jsontext
from gpuhook.start.cdi import folders
from gpuhook.start.cdi.reading import Problem, Reading
from gpuhook.start.inventory import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.ground.config.model import Config

# protects: saved-mode
_MODE = 0o600  # a document may be for root alone to read
_MOST_BYTES = 16 << 20  # of what is saved: more isn't read faster than the documents
# A file that changes twice within one tick of the kernel's clock looks the same afterwards. So
# what is as young as this when it is read isn't saved; some filesystems count in two seconds.
_SETTLED_NS = 3 * 10**9


# A file's identity and what was in it, by path.
Files = dict[str, tuple[tuple[int, ...], Reading]]


class Documents:
    """What is saved of the documents, for a process that stands: read again when that changes."""

    def __init__(self, config: "Config") -> None:
        self._config = config
        self._identity: tuple[int, ...] | None = None
        self._files: Files = {}

    def files(self) -> Files:
        """Return what is saved now."""
        folder = cache.open_folder(self._config.state_dir)
        if folder is None:
            return {}
        try:
            name = _file_name(self._config)
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                return {}
            if cache.identity(status) != self._identity:
                whole = cache.read_whole(folder, name)
                self._files = _parse(whole[0]) if whole else {}
                self._identity = cache.identity(whole[1]) if whole else None
            return self._files
        finally:
            os.close(folder)


def read_folders(config: "Config", documents: Documents | None = None) -> folders.Found:
    """Return what the folders of the configuration hold; only what has changed is read again."""
    began = time.time_ns()
    before = (documents or Documents(config)).files()
    parses = folders.Parses()
    parses.known.update(before)
    found = folders.read_folders(config.cdi_spec_dirs, parses)
    # protects: settled-document
    settled = {
        path: known
        for path, known in parses.known.items()
        # The time of the last change, which nobody sets; to come if the clock was set back since.
        if abs(began - known[0][-1]) > _SETTLED_NS
    }
    if settled != before:
        _save(config, settled)
    return found


def _file_name(config: "Config") -> str:
    """Return a name of its own for every list of folders, so that two don't fight."""
    return f"cdi-documents-{cache.digest(jsontext.dumps(config.cdi_spec_dirs).encode())}"


def _parse(text: str) -> Files:
    """Return what a saved file holds, nothing where it isn't this version's."""
    try:
        version, files = jsontext.loads(text)
        if version != __version__:
            return {}
        return {
            path: (tuple(stamp), Reading(document, tuple(Problem(*each) for each in problems)))
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
    except ValueError:  # half of a character that takes two, from an escape
        return
    folder = cache.make_folder(config.state_dir) if len(body) <= _MOST_BYTES else None
    if folder is not None:
        try:
            cache.write_whole(folder, _file_name(config), body, _MODE)
        finally:
            os.close(folder)
