"""States and their difference: what an engine's dialect may not change."""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oci_samples import CAPABILITY, DIR, Member, canonical, folder, tree_of

from dsv32_image.errors import ImageLayoutError
from dsv32_image.oci.layer import scan_layer
from dsv32_image.oci.tree import Entry, Tree, diff


def changes(old, new):
    change = diff(old, new)
    return sorted(change.entries), dict(change.links), sorted(change.whiteouts)


# --- one case each ---------------------------------------------------------------------------------------


def test_unlisted_parents_become_plain_folders(tmp_path):
    tree = tree_of(tmp_path, [Member(name=b"a/b/c")])
    assert tree[b"a"] == tree[b"a/b"] == Entry(kind="dir", mode=0o755)


def test_times_owner_names_and_leading_dots_change_nothing(tmp_path):
    one = tree_of(tmp_path, [folder(b"."), folder(b"./a/"), Member(name=b"./a/f", content=b"x", mtime=5)])
    two = tree_of(tmp_path, [Member(name=b"/a/f", content=b"x", uname="root", mtime=9), folder(b"a")])
    assert one == two


def test_host_files_and_content_of_mount_points_are_dropped_but_not_the_folders(tmp_path):
    dropped = [
        b"etc/hostname", b"etc/hosts", b"etc/resolv.conf", b".dockerenv", b"dev/null", b"proc/1/x", b"sys/x",
        b"run/.containerenv", b"tmp/x", b"var/tmp/x/y",
    ]  # fmt: skip
    kept = [b"etc/hosts.allow", b"var/run", b"developer/x", b"usr/etc/hosts"]
    folders = [folder(name) for name in (b"dev", b"proc", b"sys", b"run", b"tmp", b"var/tmp")]
    tree = tree_of(tmp_path, [*folders, *(Member(name=name) for name in dropped + kept)])
    assert not [name for name in dropped if name in tree]
    assert all(name in tree for name in kept)
    assert all(member.name in tree for member in folders)


def test_a_link_to_a_dropped_file_keeps_the_content(tmp_path):
    """An installer that hard-links out of a cache in /tmp."""
    layer = [
        Member(name=b"tmp/cache/x", content=b"x"),
        Member(name=b"opt/x", kind="link", target=b"tmp/cache/x"),
    ]
    tree = tree_of(tmp_path, layer)
    assert tree[b"opt/x"].size == 1
    assert tree[b"opt/x"].link == b""


def test_engine_and_host_xattrs_are_dropped_and_others_kept_byte_for_byte(tmp_path):
    xattrs = {
        b"trusted.overlay.opaque": b"y", b"user.overlay.origin": b"\0\xfb", b"security.selinux": b"u:r:t\0",
        b"security.capability": CAPABILITY, b"user.raw": b"\xff=\n\0",
    }  # fmt: skip
    tree = tree_of(tmp_path, [Member(name=b"f", xattrs=xattrs)])
    assert tree[b"f"].xattrs == ((b"security.capability", CAPABILITY), (b"user.raw", b"\xff=\n\0"))


def test_whiteout_and_new_content_of_one_layer_do_not_depend_on_their_order(tmp_path):
    lower = [folder(b"d"), Member(name=b"d/old"), Member(name=b"d/both", content=b"1")]
    upper = [folder(b"d"), Member(name=b"d/.wh..wh..opq"), Member(name=b"d/both", content=b"2")]
    for layer in (upper, upper[::-1]):
        assert sorted(tree_of(tmp_path, lower, layer)) == [b"d", b"d/both"]
    whiteout = [Member(name=b".wh.d"), folder(b"d"), Member(name=b"d/new")]
    for layer in (whiteout, whiteout[::-1]):
        assert sorted(tree_of(tmp_path, lower, layer)) == [b"d", b"d/new"]


def test_an_opaque_root_hides_everything_below(tmp_path):
    tree = tree_of(tmp_path, [Member(name=b"a/b")], [Member(name=b".wh..wh..opq"), Member(name=b"c")])
    assert list(tree) == [b"c"]


def test_folder_replaced_by_file_and_back(tmp_path):
    with_folder = tree_of(tmp_path, [folder(b"d"), Member(name=b"d/x")])
    with_file = tree_of(tmp_path, [folder(b"d"), Member(name=b"d/x")], [Member(name=b"d")])
    assert list(with_file) == [b"d"]
    assert changes(with_folder, with_file) == ([b"d"], {}, [])
    assert changes(with_file, with_folder) == ([b"d", b"d/x"], {}, [])


def test_folder_deleted_and_made_again_shows_single_whiteouts(tmp_path):
    old = tree_of(
        tmp_path, [folder(b"d"), Member(name=b"d/gone"), Member(name=b"d/e/deep"), Member(name=b"d/same")]
    )
    new = tree_of(tmp_path, [folder(b"d"), Member(name=b"d/same")])
    assert changes(old, new) == ([b"d"], {}, [b"d/e", b"d/gone"])


def test_mode_and_xattr_changes_alone_are_listed_with_parents(tmp_path):
    lower = [folder(b"d", mode=0o700), Member(name=b"d/f", content=b"x")]
    old = tree_of(tmp_path, lower)
    for upper in (
        Member(name=b"d/f", content=b"x", mode=0o4755),
        Member(name=b"d/f", content=b"x", xattrs={b"security.capability": CAPABILITY}),
        Member(name=b"d/f", content=b"x", uid=3),
    ):
        change = diff(old, tree_of(tmp_path, lower, [upper]))
        assert sorted(change.entries) == [b"d", b"d/f"]
        assert change.entries[b"d"].mode == 0o700


def test_an_unchanged_state_gives_an_empty_layer(tmp_path):
    lower = [folder(b"d"), Member(name=b"d/f"), Member(name=b"d/g", kind="link", target=b"d/f")]
    tree = tree_of(tmp_path, lower)
    assert diff(tree, tree_of(tmp_path, lower, lower[::-1])).is_empty


def test_hard_link_leader_is_the_first_name_whatever_the_engine_chose(tmp_path):
    tree = tree_of(tmp_path, [Member(name=b"z", content=b"x"), Member(name=b"a", kind="link", target=b"z")])
    assert changes(Tree(), tree) == ([b"a"], {b"z": b"a"}, [])


def test_a_chain_of_links_given_backwards_is_one_group(tmp_path):
    chain = [
        Member(name=b"c", kind="link", target=b"b"),
        Member(name=b"b", kind="link", target=b"a"),
        Member(name=b"a"),
    ]
    tree = tree_of(tmp_path, chain)
    assert {e.link for e in tree.values()} == {b"a"}


def test_deleting_one_name_of_a_group_lists_no_content(tmp_path):
    lower = [
        Member(name=b"a", content=b"x"),
        *(Member(name=n, kind="link", target=b"a") for n in (b"b", b"c")),
    ]
    old = tree_of(tmp_path, lower)
    new = tree_of(tmp_path, lower, [Member(name=b".wh.a")])
    assert {path: e.link for path, e in new.items()} == {b"b": b"b", b"c": b"b"}
    assert changes(old, new) == ([], {}, [b"a"])


def test_a_group_that_gains_a_member_is_listed_whole():
    lone, pair = Entry(kind="file", mode=0o644), Entry(kind="file", mode=0o644, link=b"a")
    assert changes(Tree({b"a": lone}), Tree({b"a": pair, b"b": pair})) == ([b"a"], {b"b": b"a"}, [])


def test_a_group_that_is_split_is_listed_whole():
    lone, pair = Entry(kind="file", mode=0o644), Entry(kind="file", mode=0o644, link=b"a")
    assert changes(Tree({b"a": pair, b"b": pair}), Tree({b"a": lone, b"b": lone})) == ([b"a", b"b"], {}, [])


def test_a_new_name_for_a_lower_file_is_a_file_of_its_own(tmp_path):
    """Overlay lists both names, vfs the new one as a plain file: the same state must come out."""
    lower = [Member(name=b"a", content=b"x")]
    overlay = [Member(name=b"a", content=b"x"), Member(name=b"b", kind="link", target=b"a")]
    bare_link = [Member(name=b"b", kind="link", target=b"a")]
    states = [
        tree_of(tmp_path, lower, upper) for upper in (overlay, bare_link, [Member(name=b"b", content=b"x")])
    ]
    assert states[0] == states[1] == states[2]
    assert changes(tree_of(tmp_path, lower), states[0]) == ([b"b"], {}, [])


@pytest.mark.parametrize(
    "layer",
    [
        [Member(name=b"a", kind="link", target=b"b")],
        [Member(name=b"a", kind="link", target=b"b"), Member(name=b"b", kind="link", target=b"a")],
        [folder(b"d"), Member(name=b"a", kind="link", target=b"d")],
        [Member(name=b"a"), Member(name=b"a/b")],
        [Member(name=b"a", kind="symlink", target=b"/"), Member(name=b"a/b")],
        [Member(name=b"../a")],
        [Member(name=b".wh.")],
        [Member(name=b".wh...")],
        [Member(name=b".wh..wh.plnk")],
        [Member(name=b".wh.d", kind="dir")],
        [Member(name=b".wh.d/x")],
        [Member(name=b"a", content=b"1"), Member(name=b"./a", content=b"2")],
    ],
)
def test_what_a_layer_may_not_hold_is_refused(tmp_path, layer):
    with pytest.raises(ImageLayoutError):
        tree_of(tmp_path, layer)


def test_names_that_a_layer_cannot_express_are_refused():
    with pytest.raises(ImageLayoutError, match=r"/\.wh\.x"):
        diff(Tree(), Tree({b".wh.x": Entry(kind="file", mode=0o644)}))


def test_saved_trees_come_back_equal_and_damage_is_found(tmp_path):
    tree = tree_of(
        tmp_path,
        [
            Member(name=b"d/\xff\n", content=b"x", uid=70000, xattrs={b"user.k": b"\xff\0"}),
            Member(name=b"l", kind="link", target=b"d/\xff\n"),
            Member(name=b"s", kind="symlink", target=b"\xfe"),
            Member(name=b"c", kind="char", rdev=(10, 200)),
        ],
    )
    saved = tmp_path / "tree"
    tree.save(saved)
    first = saved.read_bytes()
    assert Tree.load(saved) == tree
    Tree(dict(sorted(tree.items(), reverse=True))).save(saved)
    assert saved.read_bytes() == first
    for damaged in (first[:-5], first.replace(b" 1 ", b" 2 ", 1), b"", first[:100] + b"\0" + first[101:]):
        saved.write_bytes(damaged)
        with pytest.raises(ImageLayoutError):
            Tree.load(saved)


# --- any sequence of edits, in two dialects --------------------------------------------------------------

NAMES = [b"a", b"b", b"a-", b"\xe9\xff", b"n" * 120]
ROOTS = [b"x", b"y"]


class Inode:
    """One file; two paths with the same Inode are hard-linked."""

    def __init__(self, like=Member(name=b""), **member):  # noqa: B008  # frozen
        self.member = replace(like, **member)


def below(path, top):
    return path == top or path.startswith(top + b"/")


def edit(fs, made, rng):
    """One random command of a build step; `made` collects folders deleted and made again in this step."""
    where = rng.choice(ROOTS + [p for p, i in fs.items() if i.member.kind == "dir"])
    if where not in fs:
        fs[where] = Inode(**DIR)
    if fs[where].member.kind != "dir":
        return
    path = where + b"/" + rng.choice(NAMES)
    action = rng.choice(["write", "write", "mkdir", "symlink", "remove", "link", "chmod", "xattr", "again"])
    old = fs.get(path)
    if action in ("write", "mkdir", "symlink", "remove", "link"):
        target = rng.choice([p for p, i in fs.items() if i.member.kind == "file"] or [None])
        inode = fs.get(target)
        if action == "link" and (target is None or below(target, path)):
            return
        for p in [p for p in fs if below(p, path)]:
            del fs[p]
        content = rng.choice([b"", b"1", b"2" * 600])
        fs |= {
            "write": lambda: {path: Inode(content=content, mode=rng.choice([0o644, 0o4755]))},
            "mkdir": lambda: {path: Inode(**DIR)},
            "symlink": lambda: {path: Inode(kind="symlink", mode=0o777, target=rng.choice(NAMES))},
            "remove": dict,
            "link": lambda: {path: inode},
        }[action]()
        if action == "mkdir" and old is not None:
            made.add(path)
    elif old is None:
        return
    elif action == "again" and old.member.kind == "dir":  # rm -r and mkdir, some content put back
        for p in [p for p in fs if p.startswith(path + b"/") and rng.random() < 0.5]:
            for q in [q for q in fs if below(q, p)]:
                del fs[q]
        made.add(path)
    elif old.member.kind != "symlink" and sum(i is old for i in fs.values()) == 1:
        # Not for one name of several: overlay changes that one, vfs all, and nothing can bring them together.
        change = (
            {"mode": rng.choice([0o600, 0o711])} if action == "chmod" else {"xattrs": {b"user.k": b"\xff\0"}}
        )
        fs[path] = Inode(old.member, **change)


def written(paths, fs, rng, **more):
    """Members for these paths; of the names of one Inode one holds the content, whichever comes first."""
    first, members = {}, []
    for path in paths:
        inode = fs[path]
        member = replace(inode.member, name=path, mtime=rng.randrange(2**31), **more)
        if inode.member.kind == "file" and inode in first:
            member = replace(member, kind="link", content=b"", target=first[inode])
        first.setdefault(inode, path)
        members.append(member)
    return members


def topmost(paths):
    return [p for p in paths if not any(q != p and below(p, q) for q in paths)]


def changed_paths(before, after):
    return [p for p, inode in after.items() if before.get(p) is not inode]


def as_vfs(before, after, _made, rng):
    """Changed paths alone, in order, and a whiteout for each topmost deleted path."""
    gone = topmost([p for p in before if p not in after])
    hidden = [p for p in gone if not any(below(p, q) and after[q].member.kind != "dir" for q in after)]
    whiteouts = [Member(name=p.rpartition(b"/")[0] + b"/.wh." + p.rpartition(b"/")[2]) for p in hidden]
    return [*whiteouts, *written(sorted(changed_paths(before, after)), after, rng)]


def as_overlay(before, after, made, rng):
    """Parents, copied-up files, opaque folders, link partners of new names; no order."""
    opaque = {p for p in made if p in before and p in after and after[p].member.kind == "dir"}
    listed = set(changed_paths(before, after))
    listed |= {p for p in after if any(below(p, q) for q in opaque)}
    inodes = {after[p] for p in listed}
    listed |= {p for p, inode in after.items() if inode in inodes or rng.random() < 0.2}
    listed |= {p.rpartition(b"/")[0] for p in listed} - {b""}
    for p in list(listed):
        while p := p.rpartition(b"/")[0]:
            listed.add(p)
    gone = topmost([p for p in before if p not in after and not any(below(p, q) for q in opaque)])
    hidden = [p for p in gone if not any(below(p, q) and after[q].member.kind != "dir" for q in after)]
    members = [
        *(Member(name=p + b"/.wh..wh..opq") for p in opaque),
        *(Member(name=p.rpartition(b"/")[0] + b"/.wh." + p.rpartition(b"/")[2]) for p in hidden),
    ]
    order = rng.sample(sorted(listed), len(listed))
    for member in written(order, after, rng, uname="root"):
        extra = {b"trusted.overlay.origin": b"\0\xfb"}
        members.append(replace(member, name=b"./" + member.name, xattrs={**member.xattrs, **extra}))
    rng.shuffle(members)
    return members


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_two_dialects_of_the_same_edits_give_the_same_bytes(seed, steps):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        trees, again, fs = [Tree(), Tree()], Tree(), {}
        for count in steps:
            before, made = dict(fs), set()
            for _ in range(count):
                edit(fs, made, rng)
            layers = [dialect(before, fs, made, rng) for dialect in (as_vfs, as_overlay)]
            (one, blob, path), (two, other, _) = (
                canonical(tmp, tree, layer, name=f"{i}.tar.gz")
                for i, (tree, layer) in enumerate(zip(trees, layers, strict=True))
            )
            trees = [one, two]
            assert one == two
            assert blob == other
            with scan_layer(path) as layer:
                again = again.apply(layer.change)
            assert again == one
            assert {p: (e.kind, e.mode, e.size, e.target) for p, e in one.items()} == {
                p: (m.kind, m.mode, len(m.content), m.target)
                for p, m in ((p, i.member) for p, i in fs.items())
            }
