"""`python -m dsv32_image.loopback COMMAND…`: bring up `lo` in a fresh network namespace, then become COMMAND.

A network namespace starts with its loopback down, and gloo's ranks talk over it. Not by `ip link`:
iproute2 is not on every host.
"""

import fcntl
import os
import socket
import struct
import sys

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def bring_up(name: str = "lo") -> None:
    """Set an interface's UP flag; needs CAP_NET_ADMIN in the namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = fcntl.ioctl(handle, _SIOCGIFFLAGS, struct.pack("16sh22x", name.encode(), 0))
        flags = struct.unpack("16sh22x", request)[1]
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh22x", name.encode(), flags | _IFF_UP))


if __name__ == "__main__":
    bring_up()
    os.execvp(sys.argv[1], sys.argv[1:])
