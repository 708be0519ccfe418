"""Tar headers as bytes.

Written here rather than by `tarfile` so that the bytes cannot change with the Python version. Format: POSIX.1
ustar; a PAX record (pax, POSIX.1-2001) only for what ustar cannot hold.
"""

from __future__ import annotations

BLOCK = 512

FILE, HARDLINK, SYMLINK, CHAR, BLOCKDEV, DIR, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_PAX = b"x"


def padding(size: int) -> bytes:
    """Zeros that fill `size` bytes up to whole blocks."""
    return bytes(-size % BLOCK)


def tar_header(
    name: bytes,
    *,
    typeflag: bytes,
    mode: int,
    mtime: int,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    linkname: bytes = b"",
    rdev: tuple[int, int] = (0, 0),
    xattrs: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """The header of one member, with the PAX header before it if one is needed.

    Args:
        name: Path; folders end in a slash.
        typeflag: One of the constants of this module.
        mode: Permission bits.
        mtime: Seconds since 1970.
        uid: Owner; names of owners are left empty.
        gid: Group.
        size: Bytes that follow the header.
        linkname: Target of a hard or symbolic link.
        rdev: Major and minor of a device.
        xattrs: Written as SCHILY.xattr.NAME, the form docker, containers/storage and GNU tar read.
    """
    records: dict[bytes, bytes] = {b"SCHILY.xattr." + key: value for key, value in xattrs}
    for key, text in ((b"path", name), (b"linkpath", linkname)):
        if len(text) > 100:
            records[key] = text
            if not _is_utf8(text):
                records[b"hdrcharset"] = b"BINARY"
    numbers = ((b"uid", uid, 7), (b"gid", gid, 7), (b"size", size, 11), (b"mtime", mtime, 11))
    for key, number, digits in numbers:
        if number >= 8**digits:
            records[key] = b"%d" % number
    header = _ustar(
        name,
        typeflag=typeflag,
        mode=mode,
        mtime=mtime,
        uid=uid,
        gid=gid,
        size=size,
        linkname=linkname,
        rdev=rdev,
    )
    if not records:
        return header
    # hdrcharset first: it says how to read the records after it.
    keys = sorted(records, key=lambda k: (k != b"hdrcharset", k))
    body = b"".join(_record(key, records[key]) for key in keys)
    pax = _ustar(b"././@PaxHeader", typeflag=_PAX, mode=0o644, mtime=0, size=len(body))
    return pax + body + padding(len(body)) + header


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body)
    while len(b"%d" % length) + len(body) != length:  # the length counts its own digits
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body


def _octal(number: int, digits: int) -> bytes:
    # A number that does not fit stands in a PAX record, and readers take that one.
    return b"%0*o\0" % (digits, number if number < 8**digits else 0)


def _ustar(
    name: bytes,
    *,
    typeflag: bytes,
    mode: int,
    mtime: int,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    linkname: bytes = b"",
    rdev: tuple[int, int] = (0, 0),
) -> bytes:
    fields = (
        name[:100].ljust(100, b"\0"),
        _octal(mode, 7), _octal(uid, 7), _octal(gid, 7), _octal(size, 11), _octal(mtime, 11),
        b" " * 8,  # the checksum counts itself as spaces
        typeflag,
        linkname[:100].ljust(100, b"\0"),
        b"ustar\x0000",
        bytes(64),  # names of owner and group
        _octal(rdev[0], 7), _octal(rdev[1], 7),
        bytes(155 + 12),  # prefix, end of block
    )  # fmt: skip
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
