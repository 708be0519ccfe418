"""Reading engines' tars and the bytes of canonical layers."""

import gzip
import hashlib
import io
import os
import random
import subprocess
import tarfile
import tempfile
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from oci_samples import (
    CAPABILITY,
    EPOCH,
    Member,
    canonical,
    folder,
    listing,
    make_tar,
    scan,
    text,
    tree_of,
    write_layer,
)

from dsv32_image.errors import DiskFullError, ImageLayoutError
from dsv32_image.oci import gzipstream
from dsv32_image.oci.gzipstream import CHUNK, gzip_members, inflate
from dsv32_image.oci.layer import pack_layer, scan_layer, write_tar
from dsv32_image.oci.tarheader import tar_header
from dsv32_image.oci.tree import Tree

LONG = b"d/" + b"n" * 250
TINY = [
    folder(b"bin"),
    Member(
        name=b"bin/tool", content=b"#!/bin/sh\n", mode=0o4755, xattrs={b"security.capability": CAPABILITY}
    ),
    Member(name=b"bin/alias", kind="link", target=b"bin/tool"),
    Member(name=b"bin/sh", kind="symlink", target=b"tool"),
    Member(name=b"\xff", content=b"x"),
    Member(name=LONG, content=b"y" * 700, uid=3_000_000),
    Member(name=b"pipe", kind="fifo"),
    Member(name=b"console", kind="char", mode=0o600, rdev=(5, 1)),
    Member(name=b"disk", kind="block", mode=0o660, rdev=(8, 0)),
]


def content_of(layer, path):
    entry = layer.change.entries[path]
    return b"".join(layer.read(entry.sha256, entry.size))


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_of_any_length_and_bytes_are_read_from_both_dialects_of_tar(tmp_path, fmt):
    names = [b"\xff\xfe", b"\xc3\xa9", LONG, b"d/" + b"\xff" * 200, b"line\nbreak"]
    (tmp_path / "t").write_bytes(make_tar([Member(name=n, content=n) for n in names], fmt))
    with scan_layer(tmp_path / "t") as layer:
        assert set(layer.change.entries) == set(names)
        assert all(content_of(layer, name) == name for name in names)


@pytest.mark.parametrize(
    "dialect",
    [["--format=gnu"], *(["--format=posix", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))],
)
def test_sparse_files_are_read_with_their_holes(tmp_path, dialect):
    with (tmp_path / "holes").open("wb") as file:
        for at in range(0, 40 << 16, 1 << 16):  # more pieces than fit into the first GNU header
            file.seek(at)
            file.write(b"%08d" % at)
        file.truncate(41 << 16)
    (tmp_path / "after").write_bytes(b"next")
    command = ["tar", "-C", str(tmp_path), "-S", *dialect, "-cf", str(tmp_path / "t"), "holes", "after"]
    subprocess.run(command, check=True)
    assert (tmp_path / "t").stat().st_size < 41 << 15
    with scan_layer(tmp_path / "t") as layer:
        assert content_of(layer, b"holes") == (tmp_path / "holes").read_bytes()
        assert content_of(layer, b"after") == b"next"


def test_gzip_and_a_member_of_an_archive_are_read_like_a_plain_tar(tmp_path):
    plain = make_tar(TINY)
    packed = gzip.compress(plain[:3000]) + gzip.compress(plain[3000:])
    (tmp_path / "all").write_bytes(b"?" * 100 + plain + packed + b"?" * 1000)
    (tmp_path / "plain").write_bytes(plain)
    places = [
        scan_layer(tmp_path / "plain"),
        scan_layer(tmp_path / "all", offset=100, size=len(plain)),
        scan_layer(tmp_path / "all", offset=100 + len(plain), size=len(packed), spool=tmp_path),
    ]
    assert places[0].change == places[1].change == places[2].change
    for layer in places:
        assert content_of(layer, LONG) == b"y" * 700
        layer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all", "plain"]


def test_devices_are_kept(tmp_path):
    tree = tree_of(tmp_path, TINY)
    assert (tree[b"console"].kind, tree[b"console"].rdev) == ("char", (5, 1))
    assert (tree[b"disk"].kind, tree[b"disk"].rdev) == ("block", (8, 0))
    assert tree[b"pipe"].kind == "fifo"


def damaged(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tar: b"",
        lambda tar: b"no tar at all" * 100,
        lambda tar: tar[:3000],
        lambda tar: tar.rstrip(b"\0"),
        lambda tar: damaged(tar, 512 + 3),  # the second header: tarfile alone takes it for the end
        lambda tar: gzip.compress(tar)[:-20],
        lambda tar: damaged(gzip.compress(tar), 200),
        lambda tar: b"\x28\xb5\x2f\xfd" + tar,
    ],
)
def test_damaged_layers_are_refused_and_named(tmp_path, spoil):
    path = tmp_path / "layer"
    path.write_bytes(spoil(make_tar(TINY)))
    with pytest.raises(ImageLayoutError, match=str(path)):
        scan_layer(path)


# --- writing ---------------------------------------------------------------------------------------------


def test_entries_are_sorted_have_the_epoch_and_no_owner_names(tmp_path):
    _, _, path = canonical(tmp_path, Tree(), TINY)
    names = [name for name, _ in listing(path)]
    assert names == sorted(names) == sorted([m.name for m in TINY] + [b"d"])
    with tarfile.open(path) as tar:
        assert {(m.mtime, m.uname, m.gname) for m in tar} == {(EPOCH, "", "")}


def test_pax_records_stand_only_where_ustar_cannot_hold_a_value(tmp_path):
    _, _, path = canonical(tmp_path, Tree(), TINY)
    with tarfile.open(path, errors="surrogateescape") as tar:
        records = {m.name: sorted(m.pax_headers) for m in tar if m.pax_headers}
    capability = ["SCHILY.xattr.security.capability"]
    assert records == {"bin/alias": capability, "bin/tool": capability, text(LONG): ["path", "uid"]}


def test_numbers_too_large_for_ustar_are_read_back():
    """A file of more than 8 GiB, and the user ids of large ranges for rootless engines."""
    big = {"uid": 8**7, "gid": 2**31, "size": 9 << 30, "mtime": 8**11}
    header = tar_header(b"big", typeflag=b"0", mode=0o644, **big)
    with tarfile.open(fileobj=io.BytesIO(header)) as tar:
        assert {name: getattr(tar.firstmember, name) for name in big} == big


def test_capabilities_and_setuid_stand_on_every_name_of_a_file(tmp_path):
    """moby's extractor sets the owner of each link, which takes both from the shared inode."""
    tree, _, path = canonical(tmp_path, Tree(), TINY)
    assert tree[b"bin/alias"] == tree[b"bin/tool"]
    with tarfile.open(path) as tar:
        for name in ("bin/alias", "bin/tool"):
            raw = tar.getmember(name).pax_headers["SCHILY.xattr.security.capability"]
            assert raw.encode("utf-8", "surrogateescape") == CAPABILITY
            assert tar.getmember(name).mode == 0o4755
        assert tar.getmember("bin/alias").isreg()
        assert tar.getmember("bin/tool").linkname == "bin/alias"


def test_a_canonical_layer_reads_back_as_the_same_state(tmp_path):
    tree, _, path = canonical(tmp_path, Tree(), TINY)
    with scan_layer(path) as layer:
        assert Tree().apply(layer.change) == tree


def test_writing_the_canonical_layer_again_gives_the_same_bytes(tmp_path):
    tree, blob, path = canonical(tmp_path, Tree(), TINY)
    with scan_layer(path) as layer:
        again = write_layer(Tree(), tree, [layer], tmp_path / "again")
    assert again == blob
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_the_bytes_of_a_tiny_layer_are_known(tmp_path):
    """If this fails the format has changed: every image gets a new digest, so say so in the change."""
    _, blob, path = canonical(tmp_path, Tree(), TINY)
    data = path.read_bytes()
    assert data[:10] == bytes.fromhex(
        "1f8b08000000000000ff"
    )  # no name, mtime 0, level not told, system unknown
    assert blob.diff_id == "sha256:20cb187731bcff630d5534b0a48dcc8baa7c8ae6fd47add7d7b384185a717012"
    assert blob.digest == "sha256:52b6637a6a945c806d2b78d6f2c6a466e1ad1980e246d50ce981b37c56a94948"
    assert blob.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert blob.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(data)).hexdigest()}"
    assert (blob.size, blob.uncompressed_size) == (len(data), len(gzip.decompress(data)))


def test_whiteouts_are_written_beside_what_is_left(tmp_path):
    old = tree_of(
        tmp_path, [folder(b"d"), Member(name=b"d/gone/x"), Member(name=b"d/stays"), Member(name=b"e/x")]
    )
    _, _, path = canonical(tmp_path, old, [Member(name=b"d/.wh.gone"), Member(name=b".wh.e")])
    assert listing(path) == [(b".wh.e", b"0"), (b"d", b"5"), (b"d/.wh.gone", b"0")]


def test_content_of_a_lower_layer_is_taken_from_the_lower_layer_or_refused(tmp_path):
    with scan(tmp_path, [Member(name=b"a", content=b"x")], "low") as low:
        old = Tree().apply(low.change)
        with scan(tmp_path, [Member(name=b"b", kind="link", target=b"a")], "high") as high:
            new = old.apply(high.change)
            write_layer(old, new, [high, low], tmp_path / "out")
            assert listing(tmp_path / "out") == [(b"b", b"0")]
            with pytest.raises(ImageLayoutError, match="/b: its content"):
                write_layer(old, new, [high], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_source_that_shrank_after_the_scan_leaves_nothing_behind(tmp_path):
    with scan(tmp_path, [Member(name=b"a", content=b"x" * 5000)]) as layer:
        os.truncate(tmp_path / "engine.tar", 2000)
        with pytest.raises(ImageLayoutError):
            write_layer(Tree(), Tree().apply(layer.change), [layer], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["engine.tar"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*, prefix, dir):  # the name is mkstemp's
        path = Path(dir, f"{prefix}x")
        path.symlink_to("/dev/full")
        return os.open("/dev/null", os.O_RDONLY), str(path)

    with scan(tmp_path, TINY) as layer:
        tree = Tree().apply(layer.change)
        tar = write_tar(Tree(), tree, [layer], tmp_path / "tar", epoch=EPOCH)
        monkeypatch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(DiskFullError, match=r"out\.tar"):
            write_tar(Tree(), tree, [layer], tmp_path / "out.tar", epoch=EPOCH)
        with pytest.raises(DiskFullError, match=r"out\.gz"):
            pack_layer(tar, tmp_path / "out.gz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.tar", "tar"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_while_unpacking_a_gzip_layer_is_said(tmp_path, monkeypatch):
    (tmp_path / "layer").write_bytes(gzip.compress(make_tar(TINY)))
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: open("/dev/full", "r+b"))  # noqa: PTH123, SIM115
    with pytest.raises(DiskFullError):
        scan_layer(tmp_path / "layer")


def test_work_that_is_told_to_stop_leaves_nothing_behind(tmp_path):
    calls = []

    def proceed():
        calls.append(None)
        if len(calls) == 3:
            raise CancelledError

    with scan(tmp_path, big_layer()) as layer:
        tar = write_tar(Tree(), Tree().apply(layer.change), [layer], tmp_path / "tar", epoch=EPOCH)
    assert tar.size > 5 * CHUNK
    with pytest.raises(CancelledError):
        pack_layer(tar, tmp_path / "out", proceed=proceed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.tar", "tar"]


# --- gzip ------------------------------------------------------------------------------------------------


def big_layer():
    rng = random.Random(1)
    return [Member(name=b"%03d" % i, content=rng.randbytes(1000) * rng.randrange(400)) for i in range(40)]


def test_the_number_of_workers_does_not_change_the_bytes(tmp_path):
    blobs = [canonical(tmp_path, Tree(), big_layer(), workers=n)[1] for n in (1, 2, 5)]
    assert blobs[0].uncompressed_size > 5 * CHUNK
    assert blobs[0] == blobs[1] == blobs[2]


def test_each_member_holds_one_chunk(tmp_path):
    data = random.Random(2).randbytes(CHUNK) * 3 + b"end"
    (tmp_path / "t").write_bytes(data)
    members = list(gzip_members(tmp_path / "t", workers=2))
    assert [len(gzip.decompress(m)) for m in members] == [CHUNK] * 3 + [3]
    assert gzip.decompress(b"".join(members)) == data


def test_gzip_and_python_read_many_members(tmp_path):
    _, blob, path = canonical(tmp_path, Tree(), big_layer())
    with gzip.open(path) as file:
        plain = file.read()
    assert subprocess.run(["gzip", "-dc", str(path)], check=True, capture_output=True).stdout == plain
    assert b"".join(inflate([path.read_bytes()])) == plain
    data = path.read_bytes()
    assert b"".join(inflate(data[i : i + 1000] for i in range(0, len(data), 1000))) == plain
    assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == blob.diff_id


def test_a_small_block_that_unfolds_far_is_handed_out_in_pieces():
    packed = gzip.compress(bytes(20 * CHUNK))
    parts = list(inflate([packed[:-9], packed[-9:]]))
    assert sum(map(len, parts)) == 20 * CHUNK
    assert max(map(len, parts)) <= CHUNK


@pytest.mark.parametrize("data", [b"plain text", gzip.compress(b"x")[:-1], gzip.compress(b"x") + b"junk"])
def test_damaged_gzip_is_refused(data):
    with pytest.raises(ValueError, match="gzip"):
        list(inflate([data]))


def test_an_error_of_a_worker_is_raised_and_ends_the_others(tmp_path, monkeypatch):
    (tmp_path / "t").write_bytes(bytes(50 * CHUNK))
    done = []

    def broken(chunk):
        done.append(len(chunk))
        raise MemoryError

    monkeypatch.setattr(gzipstream, "compress_chunk", broken)
    with pytest.raises(MemoryError):
        list(gzip_members(tmp_path / "t", workers=2))
    assert len(done) < 10


def test_compressing_threads_step_back_and_the_others_do_not(tmp_path, monkeypatch):
    (tmp_path / "t").write_bytes(bytes(5 * CHUNK))
    seen = set()
    mine = os.getpriority(os.PRIO_PROCESS, 0)

    def note(chunk):
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return bytearray()

    monkeypatch.setattr(gzipstream, "compress_chunk", note)
    list(gzip_members(tmp_path / "t", workers=2))
    assert seen == {max(mine, 5)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_reading_a_layer_as_a_stream_of_bytes_matches_tarfile(tmp_path):
    _, _, path = canonical(tmp_path, Tree(), TINY)
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes()), mode="r|gz") as tar:
        assert len(list(tar)) == len(TINY) + 1
