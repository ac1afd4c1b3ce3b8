"""Lines of oci.conf, with which slurmd starts a job's container by gpu-py.

Source: oci.conf(5). slurmd replaces %b by the bundle, and %n, %u, %j, %s, %t by node, user, job,
step and task. It runs query, kill and delete as root, outside the job's device cgroup, where the
user's files control the runtime: so these lines call nothing.
"""

import shlex

from gpuhook.base.errors import RequestError, shown

_UNUSED = ("RunTimeQuery", "RunTimeKill", "RunTimeDelete")
_ID = "%n.%u.%j.%s.%t"
# oci.conf's values are in double quotes, and slurmd replaces patterns in them.
_FORBIDDEN = frozenset('"%\n\\$`')


def text(gpuhook: str, runtime: str, folder: str, cgroup_conf: str | None = None) -> str:
    """Return oci.conf for these programs, and the folder that prolog creates for each job.

    A socket of systemd's isn't passed on: runc would wait for the container to notify it.
    """
    for path in (gpuhook, runtime, folder, cgroup_conf or "/"):
        if not path.startswith("/") or _FORBIDDEN & {*path}:
            raise RequestError(
                f"{shown(path)} can't be in oci.conf",
                'Give an absolute path without ", %, \\, $ and `',
            )
    option = f" --cgroup-conf={shlex.quote(cgroup_conf)}" if cgroup_conf else ""
    request = f"{shlex.quote(gpuhook)} slurm request{option} %b"
    root = f"{shlex.quote(folder.rstrip('/') or '/')}/%u.%j"
    run = f"env -u NOTIFY_SOCKET {shlex.quote(runtime)} --root={root} run -b %b {_ID}"
    lines = [f'{name}="false"' for name in _UNUSED]
    return "\n".join([*lines, f'RunTimeRun="{request} && {run}"', ""])
