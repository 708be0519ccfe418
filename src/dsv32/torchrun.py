"""torchrun, also for a torch without libuv, as Debian's is: `torchrun` in the image, `-m dsv32.torchrun`.

torch 2.6 asks for libuv in each store that its launcher opens, and the launcher reads no setting to the
contrary: without libuv it ends before it starts a rank.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Any

import torch.distributed as dist

# Options of the launcher that say where ranks of several hosts meet.
_MEETING = {"--standalone", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--master-addr", "--master-port"}


def has_libuv() -> bool:
    """Whether this torch can open a store with libuv."""
    try:
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        return False
    return True


def host_has_address() -> bool:
    """Whether this host's name can be looked up; the launcher tells ranks to meet under it."""
    try:
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    except OSError:
        return False


class _PlainStore(dist.TCPStore):
    """A store without libuv unless it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # torch's own signature
        super().__init__(*args, **{"use_libuv": False, **kwargs})


def without_libuv() -> bool:
    """Let every store of this process do without libuv if torch has none; returns whether that was needed.

    A rank calls it before it joins the others, the launcher before its modules take the name.
    """
    if has_libuv():
        return False
    # For ranks: a store of their own, which reads the first, and not the launcher's, which does not.
    os.environ |= {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # By its module: `torch.distributed.rendezvous` is a function of that name.
    for module in (dist, importlib.import_module("torch.distributed.rendezvous")):
        vars(module)["TCPStore"] = _PlainStore
    return True


def main() -> None:
    """Run torch's launcher with the arguments of this process."""
    words = sys.argv[1:]
    options = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    # The launcher's usual rendezvous has ranks of any script meet at its own store, whatever the settings.
    if without_libuv() and not _MEETING & {*options}:
        words = ["--standalone", *words]
    if not host_has_address() and "--local-addr" not in options:
        words = ["--local-addr", "127.0.0.1", *words]  # a container without a network: one host
    from torch.distributed.run import main as run

    run(words)


if __name__ == "__main__":
    main()
