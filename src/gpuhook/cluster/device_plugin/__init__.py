"""The device plugin: offers this host's accelerators to a Kubernetes cluster.

The service consists of two processes. The *supervisor* (``service``) monitors the host, queries
drivers in child processes, and writes the devices as a ``state.State`` into a pipe whenever they
change. It has no threads and doesn't import gRPC, so it may fork. The *server* (``server``), its
child, talks to the kubelet over gRPC and answers from the last state that it read.

The runtime and the hook import nothing from here. The package needs ``gpuhook[kubernetes]``.
"""
