"""The service for a node's kubelet, shared by the device plugin and DRA.

It consists of two processes. The *supervisor* (``supervisor``) monitors the host by a
``device_monitor``, queries drivers in child processes, and writes a state as a line of JSON
whenever it changes. It has no threads and doesn't import gRPC, so it may fork. The *server*
(``server``), its child, talks to the kubelet over gRPC and answers from the last state that it
read.

The runtime and the hook import nothing from here. The package needs ``gpuhook[kubernetes]``.
"""
