"""``gpuhook dra``: devices for claims, by Kubernetes' Dynamic Resource Allocation (DRA).

The *supervisor* (``service``) looks at the machine, and does each claim's work in a child
(``work``); it has no threads and imports no gRPC, so it may fork. The *server* (``server``), its
child, speaks with the kubelet; in a thread of it ``publish`` tells the cluster what there is.
"""
