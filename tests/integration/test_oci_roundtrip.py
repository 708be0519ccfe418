"""Real engines: two storage drivers give one digest, and what they unpack again is what they built."""

import os
import shutil
import stat
import subprocess
from collections import defaultdict

import pytest

from dsv32_image.oci.engine_export import open_export
from dsv32_image.oci.layer import pack_layer, scan_layer, write_tar
from dsv32_image.oci.layout import ImageConfig, NamedLayer, verify_layout, write_docker_archive, write_layout
from dsv32_image.oci.tree import Tree

EPOCH = 1_700_000_000
TOOLS = ("buildah", "skopeo")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason="needs root, buildah"),
]

# version 2, cap_net_bind_service permitted and effective
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
LONG = "n" * 200


def run(*command):
    done = subprocess.run([os.fspath(c) for c in command], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


class Engine:
    """buildah with a storage of its own."""

    def __init__(self, folder, driver):
        self.driver, self.root, self.runroot = driver, folder / "root", folder / "runroot"

    def buildah(self, *command):
        storage = ("--storage-driver", self.driver, "--root", self.root, "--runroot", self.runroot)
        return run("buildah", *storage, *command)

    def reference(self, name):
        return f"containers-storage:[{self.driver}@{self.root}+{self.runroot}]{name}"

    def build(self, steps):
        """One image, each step a layer; a step edits the mounted root file system."""
        base = "scratch"
        for i, step in enumerate(steps):
            container = self.buildah("from", "--pull-never", base)
            step(self.buildah("mount", container))
            base = f"localhost/step:{i}"
            self.buildah("commit", "--quiet", "--rm", container, base)
        return base

    def files(self, image):
        """Everything in the image but times: metadata, content, xattrs and hard-link groups."""
        container = self.buildah("from", "--pull-never", image)
        found = snapshot(os.fsencode(self.buildah("mount", container)))
        self.buildah("rm", container)
        return found

    def close(self):
        """Removes containers first: their mounts would keep the folder busy."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")


def snapshot(top):
    found, names = {}, defaultdict(set)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = folder + b"/" + name
            info = os.lstat(path)
            kind = stat.S_IFMT(info.st_mode)
            content = b""
            if kind == stat.S_IFREG:
                with open(path, "rb") as file:  # noqa: PTH123  # bytes path
                    content = file.read()
                names[info.st_ino].add(path[len(top) :])
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)  # noqa: PTH115  # bytes path
            listed = os.listxattr(path, follow_symlinks=False)
            xattrs = {n: os.getxattr(path, n, follow_symlinks=False) for n in listed if "overlay" not in n}
            found[path[len(top) :]] = (info.st_mode, info.st_uid, info.st_gid, info.st_rdev, content, xattrs)
    return found, sorted(sorted(group) for group in names.values() if len(group) > 1)


def write(path, content, mode=0o644, uid=0):
    with open(path, "wb") as file:  # noqa: PTH123  # bytes path
        file.write(content)
    os.chown(path, uid, uid)
    os.chmod(path, mode)  # noqa: PTH101  # bytes path


def first_step(mount):
    root = os.fsencode(mount)
    for name in (b"bin", b"d", b"d/deep", b"again", b"tmp", b"etc"):
        os.makedirs(root + b"/" + name)  # noqa: PTH103  # bytes path
    os.chmod(root + b"/tmp", 0o1777)  # noqa: PTH101
    os.chmod(root + b"/d", 0o2750)  # noqa: PTH101
    write(root + b"/bin/tool", b"tool" * 1000, 0o4755)
    os.setxattr(root + b"/bin/tool", "security.capability", CAPABILITY)
    os.setxattr(root + b"/bin/tool", "user.raw", b"\xff\0=\n")
    os.link(root + b"/bin/tool", root + b"/bin/alias")
    for name in (b"1", b"2", b"3"):
        os.link(root + b"/bin/tool", root + b"/d/tool" + name)
    os.symlink("tool", root + b"/bin/sh")  # noqa: PTH211
    write(root + b"/d/\xff", b"not UTF-8")
    write(root + b"/d/" + LONG.encode(), b"long", uid=3_000_000)
    write(root + b"/d/" + b"\xff" * 200, b"long and not UTF-8")
    write(root + b"/d/deep/x", b"x")
    write(root + b"/again/gone", b"gone")
    write(root + b"/again/same", b"same")
    write(root + b"/lower", b"lower")
    write(root + b"/big", b"".join(b"%d\n" % i for i in range(500_000)))  # more than one gzip member
    os.mkfifo(root + b"/pipe")
    os.mknod(root + b"/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def second_step(mount):
    root = os.fsencode(mount)
    os.unlink(root + b"/d/tool1")  # noqa: PTH108  # a name of a group
    shutil.rmtree(root + b"/again")  # a folder deleted and made again
    os.mkdir(root + b"/again")  # noqa: PTH102
    write(root + b"/again/same", b"same")
    shutil.rmtree(root + b"/d/deep")  # a folder becomes a file
    write(root + b"/d/deep", b"file now")
    os.chmod(root + b"/d", 0o755)  # noqa: PTH101
    write(root + b"/one", b"one")
    os.link(root + b"/one", root + b"/another")
    write(root + b"/tmp/scratch", b"never in an image")


def third_step(mount):
    root = os.fsencode(mount)
    os.unlink(root + b"/d/deep")  # noqa: PTH108  # and a folder again
    os.makedirs(root + b"/d/deep/er")  # noqa: PTH103
    shutil.rmtree(root + b"/again")
    os.chown(root + b"/lower", 7, 8)  # copied up for its owner alone
    for name in (b"/bin/tool", b"/bin/alias", b"/d/tool2", b"/d/tool3"):  # as chown -R: takes setuid, too
        os.chown(root + name, 7, 7)
    os.setxattr(root + b"/one", "user.later", b"1")
    os.utime(root + b"/bin", (1, 1))  # a time alone is no change
    os.setxattr(root + b"/another", "user.later", b"1")


@pytest.fixture(params=["overlay", "vfs"])
def engine(request, tmp_path):
    engine = Engine(tmp_path / request.param, request.param)
    yield engine
    engine.close()


def canonical_image(export, folder):
    tree, layers = Tree(), []
    for i, source in enumerate(open_export(export).layers):
        with scan_layer(source.path, offset=source.offset, size=source.size) as layer:
            after = tree.apply(layer.change)
            path = folder / f"{i}.tar.gz"
            tar = write_tar(tree, after, [layer], path.with_suffix(".tar"), epoch=EPOCH)
            blob = pack_layer(tar, path)
        layers.append(NamedLayer(name=f"step {i}", path=path, blob=blob))
        tree = after
    config = ImageConfig(created=EPOCH, cmd=("/bin/tool",))
    return write_layout(folder / "layout", layers, config, "test"), folder / "layout"


# vfs keeps these through the third step; overlay takes them apart there, and the canonical image links them.
LINKED = [[b"/another", b"/one"], [b"/bin/alias", b"/bin/tool", b"/d/tool2", b"/d/tool3"]]


def expected(files):
    return {path: what for path, what in files[0].items() if not path.startswith(b"/tmp/")}, LINKED


def test_an_image_comes_back_from_the_engine_as_it_was_built(tmp_path, engine):
    image = engine.build([first_step, second_step, third_step])
    built = expected(engine.files(image))
    engine.buildah("push", "--quiet", image, f"oci:{tmp_path}/pushed")
    digest, layout = canonical_image(tmp_path / "pushed", tmp_path)
    assert verify_layout(layout) == digest
    assert digest.manifest in run("skopeo", "inspect", f"oci:{layout}")
    run("skopeo", "copy", "--quiet", f"oci:{layout}", engine.reference("localhost/back:1"))
    assert engine.files("localhost/back:1") == built
    write_docker_archive(layout, tmp_path / "docker.tar", "localhost/docker:1")
    run(
        "skopeo",
        "copy",
        "--quiet",
        f"docker-archive:{tmp_path}/docker.tar",
        engine.reference("localhost/docker:1"),
    )
    assert engine.files("localhost/docker:1") == built


def test_all_storage_drivers_and_export_forms_give_one_digest(tmp_path):
    digests = set()
    for driver in ("overlay", "vfs"):
        engine = Engine(tmp_path / driver, driver)
        try:
            image = engine.build([first_step, second_step, third_step])
            for form in ("oci", "oci-archive", "docker-archive"):
                export, folder = tmp_path / f"{driver}.{form}", tmp_path / f"{driver}-{form}"
                folder.mkdir()
                engine.buildah("push", "--quiet", image, f"{form}:{export}")
                digests.add(canonical_image(export, folder)[0])
        finally:
            engine.close()
    assert len(digests) == 1
