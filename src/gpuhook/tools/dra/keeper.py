"""Keeps a node's ResourceSlices in the cluster as they should be: one thread, nothing periodic.

It lists the node's slices, watches them, and writes when they aren't what is wanted: when that
has changed, or when somebody deleted or changed some (a kubelet that starts deletes those of all
drivers). At rest it writes nothing, and asks to go on watching about every 45 minutes.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.dra import pools, versions
from gpuhook.tools.dra.api_client import ApiError, Client, Watch, segment
from gpuhook.tools.dra.pools import CREATE, DELETE, GATES, Write
from gpuhook.tools.host.child import BackOff
from gpuhook.tools.kubernetes.dra import COUNTERS_APART

Object = dict[str, Any]

# Seconds ------------------------------------------------------------------------------------------
_APART = 60.0  # between writes of what can wait: a device that is well again, another attribute
_WHILE_BAD = (1.0, 60.0)  # until a failed request is made again: at first, at most
_RESTORE = (0.5, 60.0)  # until what others undid is done again: at first, and if they keep at it
_QUIET = 600.0  # without others' changes, after which the next one is the first
_WATCH = (2400, 3000)  # that a watch is asked to last, at random: not all nodes' at once
_SILENCE = 300.0  # without a word, after which a watch is begun again: a server says one a minute
_SHORT = 30.0  # that a watch must have lasted to be begun again at once

_OWN = 512  # versions of our own writes, of which the watch tells us later
_ROUNDS = 4  # of writes at once, where a cluster turns out to drop fields
APART, TOGETHER = "apart", "together"  # counters in slices of their own, or with the devices
_GONE = 410  # HTTP: the version to go on from isn't known any more
_STALE = (0, 404, 409, 410)  # and from 500 on: what is there may be otherwise than we think


class Keeper:
    """What one node publishes; ``tend`` does what is due, and ``deadline`` says when that is.

    ``tell`` gets a sentence for what goes wrong and for what a person should know. ``clock``
    returns seconds.
    """

    def __init__(
        self,
        client: Client,
        node: str,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._node = node
        self._tell = tell
        self._clock = clock
        self._random = rng or random.Random()  # noqa: S311 - spreads requests, and no secret
        self._wanted: dict[str, list[Object]] = {}  # the slices, by the form of counters
        self._drivers: set[str] = set()  # whose slices on this node are ours
        self._version = ""
        self._form = APART
        self._owner: Object = {}
        self._there: dict[str, Object] = {}  # our slices as the cluster has them, by uid
        self._known: dict[tuple[str, str], int] = {}  # the last generation of each pool
        self._written: dict[str, tuple[str, Object]] = {}  # by uid: version, and what was wanted
        self._own: deque[str] = deque(maxlen=_OWN)  # versions that we have written
        self._release = (0, 0)
        self._lacking: set[str] = set()  # fields that the cluster drops
        self._watch: Watch | None = None
        self._resumes = ""  # the version that a watch goes on from, "" where all is listed again
        self._began = self._heard = 0.0
        self._due: float | None = None
        self._last = -_APART
        self._again = 0.0
        self._bad = BackOff(*_WHILE_BAD)
        self._undone = BackOff(*_RESTORE)
        self._undone_at = 0.0
        self._said = ""

    # What is asked of it --------------------------------------------------------------------------

    def want(self, wanted: dict[str, list[Object]], drivers: Sequence[str]) -> None:
        """Have the cluster say this from now on.

        ``wanted`` has the slices as --dry-run prints them, by the form of counters (APART,
        TOGETHER). ``drivers`` are the names of all drivers whose slices here are ours. What makes
        a device worse, and one that is gone, is written at once; all else at most once a minute.
        """
        if wanted == self._wanted and self._drivers.issuperset(drivers):
            return
        now, old, new = self._clock(), self._wanted.get(APART, []), wanted[APART]
        is_worse = pools.taints(new) - pools.taints(old) or pools.names(old) - pools.names(new)
        self._wanted = wanted
        self._drivers |= {*drivers, *(each["spec"]["driver"] for each in new)}
        self._be_due(now if is_worse else max(now, self._last + _APART))

    def tend(self) -> None:
        """Do what is due; whatever goes wrong is told, and tried again later."""
        if not self._wanted or self._clock() < self._again:
            return
        try:
            if self._watch is None:
                self._begin()
            self._hear()
            if self._watch is not None and self._due is not None and self._clock() >= self._due:
                self._put_right()
        except ApiError as error:
            if error.status == _GONE:  # too much has happened since: all is listed again
                self._end_watch(resumes="")
                return
            self._fail(error, error.pause)
            if error.status in _STALE or error.status >= 500:
                self._let_go(resumes="")
        except GpuhookError as error:
            self._fail(error, 0.0)
            self._let_go(resumes="")

    def deadline(self) -> float | None:
        """Return when to tend even if nobody says anything, None for never."""
        if not self._wanted:
            return None
        if self._watch is None:
            return self._again
        quiet = self._heard + _SILENCE
        return max(self._again, quiet if self._due is None else min(quiet, self._due))

    def watch(self) -> Watch | None:
        """Return what to tend at when it is readable, None for nothing or not yet."""
        return self._watch if self._clock() >= self._again else None

    def close(self) -> None:
        """Let go of the cluster; what was written stays."""
        self._let_go(resumes="")

    # The cluster as it is -------------------------------------------------------------------------

    def _begin(self) -> None:
        """See what is there, and have changes said from then on."""
        if not self._resumes:
            self._list()
        query = {
            "fieldSelector": f"spec.nodeName={self._node}",
            "resourceVersion": self._resumes,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._random.randint(*_WATCH)),
        }
        self._watch = self._client.watch(self._path(), query)
        self._began = self._heard = self._clock()

    def _list(self) -> None:
        self._version = versions.served(self._client)
        release = versions.release(self._client)
        if release != self._release:
            self._release, self._lacking = release, set()
        self._form = APART if release >= COUNTERS_APART else TOGETHER
        self._owner = {}
        found = self._client.ask(
            "GET", self._path(), query={"fieldSelector": f"spec.nodeName={self._node}"}
        )
        items, metadata = found.get("items") or [], found.get("metadata")
        resumes = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if not isinstance(items, list) or not isinstance(resumes, str) or not resumes:
            raise ApiError("The API server's list of slices is none")
        self._there = {}
        for each in items:
            self._note(each)
        self._resumes = resumes
        self._be_due(self._clock())

    def _hear(self) -> None:
        """Take in what is said; a watch that has ended, or says nothing, is begun again later."""
        watch, now = self._watch, self._clock()
        if watch is None:
            return
        for event in watch.read():
            self._heard = now
            self._take(str(event.get("type")), event["object"])
            if self._watch is None:
                return
        if watch.is_over or now - self._heard >= _SILENCE:
            self._end_watch(resumes=self._resumes)

    def _take(self, kind: str, given: Object) -> None:
        metadata = given.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if kind == "ERROR":
            self._end_watch(resumes="")
            if given.get("code") != _GONE:
                raise ApiError(f"The API server ends the watch: {given.get('message')}")
            return
        if isinstance(version, str) and version:
            self._resumes = version
        if kind not in ("ADDED", "MODIFIED", "DELETED") or not _is_slice(given):
            return
        uid = given["metadata"]["uid"]
        is_ours = version in self._own
        if kind == "DELETED":
            was_there = self._there.pop(uid, None) is not None
            self._written.pop(uid, None)
            self._owner = {}  # with a node that was made again it is another
            if was_there:  # protects: slices-come-back
                self._note_undone()
        elif not is_ours and self._note(given):
            self._note_undone()

    def _note(self, given: Any) -> bool:
        """Remember a slice if it is one of our drivers' on this node; tell whether it is.

        Whatever a server is asked for, others' slices are theirs.
        """
        spec = given["spec"] if _is_slice(given) else {}
        # protects: slices-of-this-node
        is_its = spec.get("driver") in self._drivers and spec.get("nodeName") == self._node
        if is_its:
            self._there[given["metadata"]["uid"]] = versions.slice_of(given)
        return is_its

    def _note_undone(self) -> None:
        """See to it that what others did is undone: soon, but not in a race with them."""
        now = self._clock()
        if now - self._undone_at >= _QUIET:
            self._undone.reset()
        if now >= self._undone_at + self._undone.pause:
            self._undone_at = now
            self._undone.grow()  # protects: no-race-for-slices
        self._be_due(self._undone_at + self._undone.pause)

    # The cluster as it should be ------------------------------------------------------------------

    def _put_right(self) -> None:
        """Write what isn't as it should be."""
        for _ in range(_ROUNDS):
            if self._write_all():
                break
        self._due = None
        self._bad.reset()
        if self._said:
            self._said = ""
            self._tell("What is published is as it should be again")

    def _write_all(self) -> bool:
        """Write all that differs; tell whether it was kept, so that no more is to be done."""
        wanted = pools.without(pools.pools(self._wanted[self._form]), self._lacking)
        theirs: dict[tuple[str, str], list[Object]] = {(one.driver, one.name): [] for one in wanted}
        writes = []
        for each in self._there.values():
            spec = each["spec"]
            pool = spec.get("pool") or {}
            place = theirs.get((spec["driver"], str(pool.get("name"))))
            if place is None:
                writes.append(Write(DELETE, each, {}))
            else:
                place.append(each)
        for one in wanted:
            key = one.driver, one.name
            known = self._known.get(key, 0)
            made, self._known[key] = pools.plan(
                one, theirs[key], self._node, self._node_owner(), known, self._is_right
            )
            writes += made
        for write in writes:
            self._last = self._clock()
            if not self._write(write):
                return False
        return True

    def _is_right(self, want: Object, there: Object) -> bool:
        """Tell whether a slice is as it should be.

        One that nobody touched since we wrote it is what the server makes of what we want.
        """
        metadata = there["metadata"]
        version, written = self._written.get(metadata["uid"], ("", {}))
        if version == metadata.get("resourceVersion"):  # protects: no-endless-writes
            return written == want
        return pools.is_same(want, there)

    def _node_owner(self) -> Object:
        """Return the owner reference that has the slices deleted together with the node."""
        if not self._owner:
            node = self._client.ask("GET", f"/api/v1/nodes/{segment(self._node)}")
            metadata = node.get("metadata")
            uid = metadata.get("uid") if isinstance(metadata, dict) else None
            if not isinstance(uid, str) or not uid:
                raise ApiError(f"The API server's node {self._node} has no uid")
            self._owner = {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._node,
                "uid": uid,
                "controller": True,
            }
        return self._owner

    def _write(self, write: Write) -> bool:
        """Make one request; tell whether the cluster kept all of it."""
        path, there = self._path(), write.there
        if write.what != CREATE:
            path = f"{path}/{segment(there['metadata']['name'])}"
        if write.what == DELETE:
            self._delete(path, there)
            return True
        sent = write.want if write.what == CREATE else pools.updated(write)
        method = "POST" if write.what == CREATE else "PUT"
        came = self._client.ask(method, path, versions.slice_in(self._version, sent))
        if not _is_slice(came):
            raise ApiError("What the API server answers is no slice")
        self._note(came)
        uid, version = came["metadata"]["uid"], came["metadata"].get("resourceVersion", "")
        self._own.append(version)
        self._written[uid] = version, write.want
        lost = pools.dropped(write.want, versions.slice_of(came)) - self._lacking
        for gate, consequence in dict.fromkeys(GATES[name] for name in sorted(lost)):
            self._tell(f"The cluster's feature gate {gate} is off: {consequence}")
        self._lacking |= lost  # protects: dropped-fields
        return not lost

    def _delete(self, path: str, there: Object) -> None:
        uid = there["metadata"]["uid"]
        condition = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            self._client.ask("DELETE", path, condition)
        except ApiError as error:
            if error.status != 404:  # somebody else was faster
                raise
        self._there.pop(uid, None)
        self._written.pop(uid, None)

    # Small things ---------------------------------------------------------------------------------

    def _path(self) -> str:
        return f"/apis/{versions.GROUP}/{self._version}/resourceslices"

    def _be_due(self, at: float) -> None:
        self._due = at if self._due is None else min(self._due, at)

    def _end_watch(self, resumes: str) -> None:
        """Watch again, at once unless this watch was short: a server may end each of them."""
        now = self._clock()
        self._let_go(resumes)
        if now - self._began < _SHORT:
            self._again = now + self._bad.grow()
        else:
            self._bad.reset()

    def _let_go(self, resumes: str) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch, self._resumes = None, resumes

    def _fail(self, error: GpuhookError, pause: float) -> None:
        """Wait before the next request, longer each time, and not all nodes equally long."""
        grown = self._bad.grow() * self._random.uniform(0.5, 1.0)
        self._again = self._clock() + max(pause, grown)
        sentence = f"{error}"
        if sentence != self._said:
            self._said = sentence
            self._tell(f"What is published may not be true: {sentence} It is tried again")


def _is_slice(given: Any) -> bool:
    """Tell whether an object has what is needed of a slice."""
    metadata, spec = (
        (given.get("metadata"), given.get("spec")) if isinstance(given, dict) else (None, None)
    )
    return (
        isinstance(metadata, dict)
        and isinstance(spec, dict)
        and isinstance(metadata.get("uid"), str)
        and isinstance(metadata.get("name"), str)
        and isinstance(spec.get("driver"), str)
    )
