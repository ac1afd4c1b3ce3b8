"""A plugin for the engine's NRI (Node Resource Interface): pods' devices without a runtime.

The engine asks it about each container of a pod, and adds the devices in its response. gpuhook's
runtime and RuntimeClass aren't needed, and no engine file is changed. Root's process has no
threads; a child without privileges parses the engine's messages (``parser``), and with a gate
another child queries the kubelet. ``transport`` is the wire format, ``service`` the protocol,
``answer`` the devices of a container.
"""

SOCKET = "/var/run/nri/nri.sock"  # the engines' default
PROCESS = "gpuhook-nri"  # the process name
UNIT = "/etc/systemd/system/gpuhook-nri.service"  # as in the page and the installer
