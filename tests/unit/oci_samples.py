"""Small layers as an engine would write them, shared by the tests of `dsv32_image.oci`."""

import io
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from dsv32_image.oci.layer import LayerBlob, pack_layer, scan_layer, write_tar
from dsv32_image.oci.tree import Tree

EPOCH = 1_700_000_000
TYPES = {
    "file": tarfile.REGTYPE,
    "dir": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "link": tarfile.LNKTYPE,
    "char": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
    "fifo": tarfile.FIFOTYPE,
}
# vfs_cap_data, version 2, cap_net_bind_service in the permitted set and the effective flag: holds NULs.
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")


@dataclass(frozen=True, kw_only=True)
class Member:
    name: bytes
    kind: str = "file"
    content: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    target: bytes = b""
    mtime: int = 0
    uname: str = ""
    rdev: tuple[int, int] = (0, 0)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


DIR = {"kind": "dir", "mode": 0o755}


def folder(name, **more):
    return Member(name=name, **{**DIR, **more})


def text(raw):
    return raw.decode("utf-8", "surrogateescape")


def make_tar(members, fmt=tarfile.PAX_FORMAT):
    out = io.BytesIO()
    with tarfile.TarFile(
        fileobj=out, mode="w", format=fmt, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for member in members:
            info = tarfile.TarInfo(text(member.name))
            info.type = TYPES[member.kind]
            info.mode, info.uid, info.gid, info.mtime = member.mode, member.uid, member.gid, member.mtime
            info.uname = info.gname = member.uname
            info.linkname = text(member.target)
            info.devmajor, info.devminor = member.rdev
            info.size = len(member.content)
            info.pax_headers = {f"SCHILY.xattr.{text(k)}": text(v) for k, v in member.xattrs.items()}
            tar.addfile(info, io.BytesIO(member.content))
    return out.getvalue()


def scan(folder: Path, members, name="engine.tar"):
    path = folder / name
    path.write_bytes(make_tar(members))
    return scan_layer(path)


def tree_of(folder: Path, *layers):
    """The state after these layers, each a list of members."""
    tree = Tree()
    for members in layers:
        with scan(folder, members) as layer:
            tree = tree.apply(layer.change)
    return tree


def write_layer(old, new, sources, out: Path, *, workers=1) -> LayerBlob:
    """Both steps of a canonical layer; only the gzip file stays."""
    tar = write_tar(old, new, sources, out.with_name(f"{out.name}.plain"), epoch=EPOCH)
    try:
        return pack_layer(tar, out, workers=workers)
    finally:
        tar.path.unlink()


def canonical(folder: Path, old, members, *, name="layer.tar.gz", workers=1) -> tuple[Tree, LayerBlob, Path]:
    """The state after one engine layer, and the canonical layer that leads there."""
    with scan(folder, members) as layer:
        new = old.apply(layer.change)
        return new, write_layer(old, new, [layer], folder / name, workers=workers), folder / name


def listing(path: Path):
    """Names in a canonical layer with their type, in order."""
    with tarfile.open(path, "r:gz", encoding="utf-8", errors="surrogateescape") as tar:
        return [(m.name.encode("utf-8", "surrogateescape"), m.type) for m in tar]
