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


def test_new_names_of_two_linked_lower_files_are_linked_to_each_other(tmp_path):
    """Overlay splits the lower two as it copies them up, vfs lists only the new names."""
    lower = [Member(name=b"a"), Member(name=b"b", kind="link", target=b"a")]
    overlay = [
        Member(name=b"a"),
        Member(name=b"b"),
        Member(name=b"new1", kind="link", target=b"a"),
        Member(name=b"new2", kind="link", target=b"b"),
    ]
    vfs = [Member(name=b"new1"), Member(name=b"new2", kind="link", target=b"new1")]
    assert tree_of(tmp_path, lower, overlay) == tree_of(tmp_path, lower, vfs)


def test_a_change_to_all_names_of_a_file_leaves_them_linked(tmp_path):
    """chown -R: overlay copies each name up on its own."""
    lower = [Member(name=b"a"), Member(name=b"b", kind="link", target=b"a")]
    overlay = [Member(name=b"a", uid=7), Member(name=b"b", uid=7)]
    vfs = [Member(name=b"a", uid=7), Member(name=b"b", kind="link", target=b"a")]
    states = [tree_of(tmp_path, lower, upper) for upper in (overlay, vfs)]
    assert states[0] == states[1]
    assert states[0][b"b"].link == b"a"


def test_files_that_were_not_linked_below_are_not_linked_by_a_later_change(tmp_path):
    """`ln a b` in one step and `chown` in the next: by then only vfs knows of the link."""
    lower = [[Member(name=b"a")], [Member(name=b"b")]]
    vfs = [Member(name=b"a", uid=7), Member(name=b"b", kind="link", target=b"a")]
    assert {e.link for e in tree_of(tmp_path, *lower, vfs).values()} == {b""}


def test_a_new_name_of_a_changed_file_is_linked_to_it(tmp_path):
    """An upgrade that brings a second name for a program."""
    upper = [Member(name=b"z", kind="link", target=b"a"), Member(name=b"a", content=b"2")]
    assert tree_of(tmp_path, [Member(name=b"a")], upper)[b"z"].link == b"a"


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
        # Has names of two steps, or several that overlay has taken apart: not linked to again, since what a
        # new name then is linked to is not the same on both file systems.
        self.spread = False


class Disk:
    """A file system under random build steps, with what each storage driver would know about them."""

    def __init__(self, rng):
        self.rng, self.files = rng, {}
        self.begin()

    def begin(self):
        """A new step: what is there now is below."""
        self.before = dict(self.files)
        self.upper = {}  # path to the inode that overlay gave it in this step; copying up breaks links
        self.made = set()  # folders deleted and made again

    def end(self):
        for path, inode in self.files.items():
            names = [p for p, i in self.files.items() if i is inode]
            if self.before.get(path) is not inode and any(self.before.get(p) is inode for p in names):
                inode.spread = True

    def put(self, path, inode, upper=None):
        self.remove(path)
        self.files[path], self.upper[path] = inode, upper or object()

    def remove(self, path):
        for p in [p for p in self.files if below(p, path)]:
            del self.files[p]
            self.upper.pop(p, None)

    def edit(self):
        """One random command."""
        rng, files = self.rng, self.files
        where = rng.choice(ROOTS + [p for p, i in files.items() if i.member.kind == "dir"])
        if where not in files:
            self.put(where, Inode(**DIR))
        path = where + b"/" + rng.choice(NAMES)
        actions = [self.write, self.write, self.mkdir, self.symlink, self.remove, self.link, self.again]
        if files[where].member.kind == "dir":
            rng.choice([*actions, self.change, self.change])(path)

    def write(self, path):
        content = self.rng.choice([b"", b"1", b"2" * 600, b"3", b"4" * 513])
        self.put(path, Inode(content=content, mode=self.rng.choice([0o644, 0o4755])))

    def mkdir(self, path):
        again = path in self.before
        self.put(path, Inode(**DIR))
        if again:
            self.made.add(path)

    def symlink(self, path):
        self.put(path, Inode(kind="symlink", mode=0o777, target=self.rng.choice(NAMES)))

    def link(self, path):
        usable = [p for p, i in self.files.items() if i.member.kind == "file" and self.one_for_both(i)]
        target = self.rng.choice(usable or [path])
        if not below(target, path):
            upper = self.upper.setdefault(target, object())
            self.put(path, self.files[target], upper)

    def one_for_both(self, inode):
        """True if a new name of it is linked to the same names on both file systems and in the state.

        A twin may have been its mate further below, which the state takes for a link still.
        """
        twins = (i for i in self.before.values() if i is not inode and i.member == inode.member)
        single = sum(i is inode for i in self.before.values()) < 2
        return single and not inode.spread and next(twins, None) is None

    def again(self, path):
        """rm -r and mkdir, and some of the content put back as it was."""
        if path in self.files and self.files[path].member.kind == "dir":
            for p in [p for p in self.files if p.startswith(path + b"/") and self.rng.random() < 0.5]:
                self.remove(p)
            self.made.add(path)

    def change(self, path):
        """chmod or setfattr for all names of a file, as chown -R does.

        Not for one of several: overlay changes that one and vfs all, and nothing can bring those together.
        """
        old = self.files.get(path)
        if old is None or old.member.kind == "symlink":
            return
        change = self.rng.choice([{"mode": 0o600}, {"mode": 0o711}, {"xattrs": {b"user.k": b"\xff\0"}}])
        new = Inode(old.member, **change)
        names = [p for p, i in self.files.items() if i is old]
        for p in names:
            self.files[p] = new
            self.upper.setdefault(p, object())
        new.spread = old.spread or len({self.upper[p] for p in names}) > 1

    def changed(self):
        return {p for p, inode in self.files.items() if self.before.get(p) is not inode}

    def whiteouts(self, hidden_by=()):
        gone = [p for p in self.before if p not in self.files and not any(below(p, q) for q in hidden_by)]
        tops = [p for p in gone if not any(q != p and below(p, q) for q in gone)]
        replaced = [p for p, inode in self.files.items() if inode.member.kind != "dir"]
        for p in tops:
            if not any(below(p, q) for q in replaced):
                head, _, tail = p.rpartition(b"/")
                yield Member(name=head + b"/.wh." + tail)

    def members(self, paths, inode_of, **more):
        """Of the names of one inode one holds the content, whichever comes first."""
        first = {}
        for path in paths:
            member = replace(self.files[path].member, name=path, mtime=self.rng.randrange(2**31), **more)
            inode = inode_of(path)
            if member.kind == "file" and inode in first:
                member = replace(member, kind="link", content=b"", target=first[inode])
            first.setdefault(inode, path)
            yield member

    def as_vfs(self):
        """Changed paths alone, in order, and a whiteout for each topmost deleted path."""
        return [*self.whiteouts(), *self.members(sorted(self.changed()), self.files.get)]

    def as_overlay(self):
        """Parents, copied-up files, opaque folders, link partners of new names; no order."""
        opaque = {p for p in self.made if p in self.before and self.is_dir(p)}
        listed = self.changed() | set(self.upper)
        listed |= {p for p in self.files if self.rng.random() < 0.2 or any(below(p, q) for q in opaque)}
        for p in list(listed):
            while p := p.rpartition(b"/")[0]:
                listed.add(p)
        order = self.rng.sample(sorted(listed), len(listed))
        origin = {b"trusted.overlay.origin": b"\0\xfb"}
        members = [
            replace(m, name=b"./" + m.name, uname="root", xattrs={**m.xattrs, **origin})
            for m in self.members(order, lambda p: self.upper.get(p, p))
        ]
        members += [Member(name=p + b"/.wh..wh..opq") for p in opaque]
        members += self.whiteouts(hidden_by=opaque)
        self.rng.shuffle(members)
        return members

    def is_dir(self, path):
        return path in self.files and self.files[path].member.kind == "dir"


def below(path, top):
    return path == top or path.startswith(top + b"/")


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_two_dialects_of_the_same_edits_give_the_same_bytes(seed, steps):
    disk = Disk(random.Random(seed))
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        vfs, overlay, again = Tree(), Tree(), Tree()
        for count in steps:
            disk.begin()
            for _ in range(count):
                disk.edit()
            disk.end()
            vfs, blob, path = canonical(tmp, vfs, disk.as_vfs(), name="vfs.tar.gz")
            overlay, other, _ = canonical(tmp, overlay, disk.as_overlay(), name="overlay.tar.gz")
            assert vfs == overlay
            assert blob == other
            with scan_layer(path) as layer:
                again = again.apply(layer.change)
            assert again == vfs
            assert {p: (e.kind, e.mode, e.size, e.target, dict(e.xattrs)) for p, e in vfs.items()} == {
                p: (m.kind, m.mode, len(m.content), m.target, m.xattrs)
                for p, m in ((p, inode.member) for p, inode in disk.files.items())
            }
