"""Resources that idle processes of ``gpuhook dra`` use."""

from collections.abc import Iterable
from pathlib import Path

_GRPCS_OWN = ("event_engine", "lifeguard", "grpc_global_tim")  # threads that only monitor


def memory(pids: Iterable[int]) -> int:
    """Return the bytes of memory that processes use; of shared memory, their share counts."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    lines = [line.split() for text in rollups for line in text.splitlines()]
    return sum(int(words[1]) << 10 for words in lines if words[0] == "Pss:")


def woken(pids: Iterable[int]) -> int:
    """Return how often threads have waited until now, except for gRPC's own threads.

    Together those wake up eight times a second, and more often on hosts with more processors.
    """
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    statuses = [(task / "status").read_text() for task in tasks]
    fields = [dict(line.split(":", 1) for line in text.splitlines()) for text in statuses]
    return sum(
        int(each["voluntary_ctxt_switches"])
        for each in fields
        if each["Name"].strip() not in _GRPCS_OWN
    )
