"""A controller that reconciles a node's ResourceSlices in the cluster, in one thread.

It lists the node's slices, watches them, and writes if they differ from the desired ones: when
those change, or when another client deletes or changes slices (a kubelet that starts deletes those
of all drivers). When idle it writes nothing, and renews its watch about every 45 minutes.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpuhook.base.errors import GpuhookError
from gpuhook.cluster.dra import slice_diff, versions
from gpuhook.cluster.dra.api_client import ApiClient, ApiError, WatchStream, segment
from gpuhook.cluster.dra.slice_diff import CREATE, DELETE, GATES, SliceWrite
from gpuhook.cluster.dra.slices import COUNTERS_APART
from gpuhook.monitor.host.child import BackOff

Object = dict[str, Any]

# Seconds ------------------------------------------------------------------------------------------
_APART = 60.0  # between writes that can wait: a device that recovered, another attribute
_WHILE_BAD = (1.0, 60.0)  # until a failed request is repeated: the first pause, the longest
_RESTORE = (0.5, 60.0)  # until others' changes are reverted: the first pause, the longest
_QUIET = 600.0  # without others' changes, after which the pause is the first again
_WATCH = (2400, 3000)  # duration of a watch, random so that not all nodes renew at once
_SILENCE = 300.0  # without an event, after which a watch is restarted: servers send one a minute
_SHORT = 30.0  # minimum duration of a watch that is restarted without a pause

_OWN = 512  # versions of our own writes, which the watch reports later
_ROUNDS = 4  # of consecutive writes, if a cluster turns out to drop fields
APART, TOGETHER = "apart", "together"  # counters in separate slices, or with the devices
_GONE = 410  # HTTP: the version to resume from isn't available any more
_STALE = (0, 404, 409, 410)  # and from 500 on: our copy of the slices may be wrong


class SliceReconciler:
    """The controller of one node's slices; ``tend`` does due work, ``deadline`` says when.

    ``tell`` gets a sentence for each problem and notice. ``clock`` returns seconds.
    """

    def __init__(
        self,
        client: ApiClient,
        node: str,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._node = node
        self._tell = tell
        self._clock = clock
        self._random = rng or random.Random()  # noqa: S311 - spreads requests; no secret
        self._wanted: dict[str, list[Object]] = {}  # the slices, by the form of counters
        self._drivers: set[str] = set()  # whose slices on this node are ours
        self._version = ""
        self._form = APART
        self._owner: Object = {}
        self._there: dict[str, Object] = {}  # our slices as the cluster has them, by uid
        self._known: dict[tuple[str, str], int] = {}  # the last generation of each pool
        self._written: dict[str, tuple[str, Object]] = {}  # by uid: version, and desired slice
        self._own: deque[str] = deque(maxlen=_OWN)  # versions that we have written
        self._release = (0, 0)
        self._lacking: set[str] = set()  # fields that the cluster drops
        self._watch: WatchStream | None = None
        self._resumes = ""  # the version that a watch resumes from, "" to list again
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
        """Set the desired slices.

        ``wanted`` has the slices as --dry-run prints them, by the form of counters (APART,
        TOGETHER). ``drivers`` are the names of all drivers whose slices on this node are ours. New
        taints and removed devices are written at once, other changes at most once a minute.
        """
        if wanted == self._wanted and self._drivers.issuperset(drivers):
            return
        now, old, new = self._clock(), self._wanted.get(APART, []), wanted[APART]
        is_worse = slice_diff.taints(new) - slice_diff.taints(old) or slice_diff.names(
            old
        ) - slice_diff.names(new)
        self._wanted = wanted
        self._drivers |= {*drivers, *(each["spec"]["driver"] for each in new)}
        self._be_due(now if is_worse else max(now, self._last + _APART))

    def tend(self) -> None:
        """Do all due work; failures are logged and retried later."""
        if not self._wanted or self._clock() < self._again:
            return
        try:
            if self._watch is None:
                self._begin()
            self._hear()
            if self._watch is not None and self._due is not None and self._clock() >= self._due:
                self._put_right()
        except ApiError as error:
            if error.status == _GONE:  # too many changes since: list again
                self._end_watch(resumes="")
                return
            self._fail(error, error.pause)
            if error.status in _STALE or error.status >= 500:
                self._let_go(resumes="")
        except GpuhookError as error:
            self._fail(error, 0.0)
            self._let_go(resumes="")

    def deadline(self) -> float | None:
        """Return when ``tend`` is due without any event, None for never."""
        if not self._wanted:
            return None
        if self._watch is None:
            return self._again
        quiet = self._heard + _SILENCE
        return max(self._again, quiet if self._due is None else min(quiet, self._due))

    def watch(self) -> WatchStream | None:
        """Return the watch; when it is readable, ``tend`` is due. None if there is none yet."""
        return self._watch if self._clock() >= self._again else None

    def close(self) -> None:
        """Close the connection; the written slices stay."""
        self._let_go(resumes="")

    # The cluster as it is -------------------------------------------------------------------------

    def _begin(self) -> None:
        """List the slices, and start to watch their changes."""
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
            raise ApiError("The API server's list of slices is invalid")
        self._there = {}
        for each in items:
            self._note(each)
        self._resumes = resumes
        self._be_due(self._clock())

    def _hear(self) -> None:
        """Process events; a watch that has ended, or is silent, is restarted later."""
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
            self._owner = {}  # a node that was created again has another uid
            if was_there:  # protects: slices-come-back
                self._note_undone()
        elif not is_ours and self._note(given):
            self._note_undone()

    def _note(self, given: Any) -> bool:
        """Save a slice if it belongs to one of our drivers on this node; tell whether it does.

        Slices of others are never touched, even if the server returns them.
        """
        spec = given["spec"] if _is_slice(given) else {}
        # protects: slices-of-this-node
        is_its = spec.get("driver") in self._drivers and spec.get("nodeName") == self._node
        if is_its:
            self._there[given["metadata"]["uid"]] = versions.slice_of(given)
        return is_its

    def _note_undone(self) -> None:
        """Schedule the reversal of others' changes: soon, but not in a race with them."""
        now = self._clock()
        if now - self._undone_at >= _QUIET:
            self._undone.reset()
        if now >= self._undone_at + self._undone.pause:
            self._undone_at = now
            self._undone.grow()  # protects: no-race-for-slices
        self._be_due(self._undone_at + self._undone.pause)

    # The cluster as it should be ------------------------------------------------------------------

    def _put_right(self) -> None:
        """Write all slices that differ from the desired ones."""
        for _ in range(_ROUNDS):
            if self._write_all():
                break
        self._due = None
        self._bad.reset()
        if self._said:
            self._said = ""
            self._tell("The published slices are correct again")

    def _write_all(self) -> bool:
        """Write all differences; tell whether the cluster kept them, so that nothing is left."""
        wanted = slice_diff.without(slice_diff.pools(self._wanted[self._form]), self._lacking)
        theirs: dict[tuple[str, str], list[Object]] = {(one.driver, one.name): [] for one in wanted}
        writes = []
        for each in self._there.values():
            spec = each["spec"]
            pool = spec.get("pool") or {}
            place = theirs.get((spec["driver"], str(pool.get("name"))))
            if place is None:
                writes.append(SliceWrite(DELETE, each, {}))
            else:
                place.append(each)
        for one in wanted:
            key = one.driver, one.name
            known = self._known.get(key, 0)
            made, self._known[key] = slice_diff.plan(
                one, theirs[key], self._node, self._node_owner(), known, self._is_right
            )
            writes += made
        for write in writes:
            self._last = self._clock()
            if not self._write(write):
                return False
        return True

    def _is_right(self, want: Object, there: Object) -> bool:
        """Tell whether a slice is as desired.

        A slice unchanged since our write counts as desired, however the server normalized it.
        """
        metadata = there["metadata"]
        version, written = self._written.get(metadata["uid"], ("", {}))
        if version == metadata.get("resourceVersion"):  # protects: no-endless-writes
            return written == want
        return slice_diff.is_same(want, there)

    def _node_owner(self) -> Object:
        """Return the owner reference that makes the cluster delete the slices with the node."""
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

    def _write(self, write: SliceWrite) -> bool:
        """Make one request; tell whether the cluster kept all of it."""
        path, there = self._path(), write.there
        if write.what != CREATE:
            path = f"{path}/{segment(there['metadata']['name'])}"
        if write.what == DELETE:
            self._delete(path, there)
            return True
        sent = write.want if write.what == CREATE else slice_diff.updated(write)
        method = "POST" if write.what == CREATE else "PUT"
        came = self._client.ask(method, path, versions.slice_in(self._version, sent))
        if not _is_slice(came):
            raise ApiError("The API server's response isn't a slice")
        self._note(came)
        uid, version = came["metadata"]["uid"], came["metadata"].get("resourceVersion", "")
        self._own.append(version)
        self._written[uid] = version, write.want
        lost = slice_diff.dropped(write.want, versions.slice_of(came)) - self._lacking
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
            if error.status != 404:  # another client was faster
                raise
        self._there.pop(uid, None)
        self._written.pop(uid, None)

    # Small things ---------------------------------------------------------------------------------

    def _path(self) -> str:
        return f"/apis/{versions.GROUP}/{self._version}/resourceslices"

    def _be_due(self, at: float) -> None:
        self._due = at if self._due is None else min(self._due, at)

    def _end_watch(self, resumes: str) -> None:
        """Watch again, without a pause unless this watch was short: a server may end every one."""
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
        """Wait before the next request, longer each time, with jitter between nodes."""
        grown = self._bad.grow() * self._random.uniform(0.5, 1.0)
        self._again = self._clock() + max(pause, grown)
        sentence = f"{error}"
        if sentence != self._said:
            self._said = sentence
            self._tell(f"The published slices may be outdated: {sentence} It is tried again")


def _is_slice(given: Any) -> bool:
    """Tell whether an object has the required fields of a slice."""
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
