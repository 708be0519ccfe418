"""Sources pinned by a git commit: how they are written, looked up, fetched, and made an archive of."""

import gzip
import hashlib
import io
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from git_samples import ENV, FILES, PYPROJECT, Upstream

from dsv32_image import git_archive, git_source
from dsv32_image.config import load_config
from dsv32_image.errors import (
    ConfigError,
    DownloadError,
    HashMismatchError,
    OfflineError,
    RefError,
    ResolveError,
    ToolMissingError,
    UsageError,
    WheelError,
)
from dsv32_image.fetch_step import bring
from dsv32_image.git_source import Repository
from dsv32_image.git_spec import GitSpec, parse_spec
from dsv32_image.lockfile import Dist
from dsv32_image.patching import FileState
from dsv32_image.source_metadata import read_metadata, require_fits
from dsv32_image.store import Store
from dsv32_image.ui import Ui

ROOT = Path(__file__).parents[2]


@pytest.fixture
def upstream(tmp_path):
    return Upstream(tmp_path)


@pytest.fixture
def repository(upstream, tmp_path):
    return Repository(upstream.url, tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "repo", "ref"),
    [
        ("git+https://h.example/a/b.git@v1.0", "https://h.example/a/b.git", "v1.0"),
        ("git+https://h.example:8443/a/b@feature/x", "https://h.example:8443/a/b", "feature/x"),
        ("git+ssh://git@h.example/a/b@main", "ssh://git@h.example/a/b", "main"),
        ("git+file:///srv/a@" + "0" * 40, "file:///srv/a", "0" * 40),
    ],
)
def test_repository_and_reference_are_told_apart(text, repo, ref):
    assert parse_spec(text) == GitSpec(repo=repo, ref=ref)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("git+https://h.example/a/b", "names no commit, tag or branch"),
        ("git+https://h.example/a/b@", "cannot be a tag"),
        ("git+ssh://git@h.example/a/b", "names no commit, tag or branch"),
        ("git+https://h.example/a/b@--upload-pack=x", "cannot be a tag"),
        ("git+https://h.example/a/b@v1..v2", "cannot be a tag"),
        ("git+https://h.example/a/b@v1#egg=x", "query or a fragment"),
        ("git+/srv/a@main", "no git URL with a scheme"),
        ("git@h.example:a/b.git@main", "no git URL with a scheme"),
        ("https://h.example/a/b@main", "no git URL with a scheme"),
        ('git+https://h.example/a"b@main', "no git URL with a scheme"),
        ("git+ext::sh://x@main", "not supported"),
        ("git+https://h.example@main", "names no commit|carries credentials"),
    ],
)
def test_what_is_written_otherwise_is_refused_with_an_example(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse_spec(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "git+https://user:s3cret@h.example/a/b@main",
        "git+https://s3cret@h.example/a/b@main",
        "git+ssh://git:s3cret@h.example/a/b@main",
        "git+https://h.example/a/b@main?token=s3cret",
        "git+https://h.example/a/b?token=s3cret@main",
        "git+https://user:s3cret@h.example/a b@main",
    ],
)
def test_credentials_are_refused_and_not_repeated(text):
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert "s3cret" not in caught.value.message + caught.value.hint


def test_tags_branches_and_commits_are_looked_up(upstream, repository):
    upstream.tag("v1")
    upstream.tag("light", annotated=False)
    second = upstream.commit({"new.txt": b"x"})
    found = {ref: repository.resolve(ref) for ref in ("v1", "light", "main", "HEAD", "refs/tags/v1")}
    assert {ref: one.commit for ref, one in found.items()} == {
        **dict.fromkeys(("v1", "light", "refs/tags/v1"), upstream.first),
        **dict.fromkeys(("main", "HEAD"), second),
    }
    assert [found[ref].kind for ref in ("v1", "refs/tags/v1", "main", "HEAD")] == [
        "tag",
        "tag",
        "branch",
        "ref",
    ]
    assert repository.resolve(upstream.first.upper()).commit == upstream.first


def test_an_annotated_tag_given_by_its_own_hash_is_peeled(upstream, repository):
    upstream.tag("v1")
    own = upstream.git("rev-parse", "v1")
    assert own != upstream.first
    assert repository.resolve(own).commit == upstream.first


def test_a_commit_that_is_not_there_is_said(upstream, repository):
    with pytest.raises(RefError, match=f"has no commit {'ab' * 20}"):
        repository.resolve("ab" * 20)


def test_a_name_that_is_not_there_is_said(repository):
    with pytest.raises(RefError, match="no tag or branch 'v9'") as caught:
        repository.resolve("v9")
    assert "git ls-remote" in caught.value.hint


def test_a_short_hash_is_refused(upstream, repository):
    with pytest.raises(RefError, match="short hash") as caught:
        repository.resolve(upstream.first[:10])
    assert "40 digits" in caught.value.hint


def test_a_name_of_a_tag_and_of_another_branch_is_refused(upstream, repository):
    upstream.tag("both")
    upstream.git("checkout", "-q", "-b", "both")
    second = upstream.commit({"new.txt": b"x"})
    with pytest.raises(RefError, match="both a tag and a branch"):
        repository.resolve("both")
    assert repository.resolve("refs/heads/both").commit == second


def test_what_is_no_commit_is_refused(upstream, repository):
    blob = upstream.git("rev-parse", "HEAD:setup.py")
    upstream.git("push", "-q", "origin", f"{blob}:refs/tags/blob")
    with pytest.raises(RefError, match="is no commit"):
        repository.resolve("blob")


def test_only_the_one_commit_is_fetched_and_asked_for_once(upstream, repository):
    second = upstream.commit({"new.txt": b"x"})
    repository.bring(second)
    with pytest.raises(git_source._GitError):
        repository._git("cat-file", "-e", upstream.first)
    shutil.rmtree(upstream.bare)
    assert repository.bring(second) == second


class OldServer(Repository):
    """One that gives only what it lists, as git does it before protocol 2."""

    def _git(self, *words, **more):
        if "--depth=1" in words:
            raise git_source._GitError("error: Server does not allow request for unadvertised object x")
        return super()._git(*words, **more)


def test_of_an_old_server_all_is_fetched_to_have_one_commit(upstream, tmp_path):
    upstream.commit({"new.txt": b"x"})
    repository = OldServer(upstream.url, tmp_path / "cache")
    assert repository.bring(upstream.first) == upstream.first
    assert "setup.py" in repository.files(upstream.first, ())
    with pytest.raises(RefError, match="has no commit"):
        repository.bring("ab" * 20)


def test_a_host_that_does_not_answer_is_said(tmp_path):
    repository = Repository("http://127.0.0.1:9/a.git", tmp_path / "cache")
    for call in (lambda: repository.resolve("main"), lambda: repository.bring("ab" * 20)):
        with pytest.raises(DownloadError, match="cannot be read by git") as caught:
            call()
        assert "proxy" in caught.value.hint


def test_a_folder_that_is_no_repository_is_said(tmp_path):
    with pytest.raises(DownloadError, match="does not appear to be a git repository"):
        Repository(f"file://{tmp_path}/none", tmp_path / "cache").resolve("main")


def test_without_git_it_says_what_to_install(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissingError, match="'git' is not installed"):
        repository.resolve("main")


def test_what_a_killed_git_left_is_in_nobodys_way(upstream, repository):
    repository.bring(upstream.first)
    second = upstream.commit({"new.txt": b"x"})
    for name in ("shallow.lock", f"refs/pins/{second}.lock"):
        (repository.folder / name).write_text("")
    assert repository.bring(second) == second


def test_a_damaged_clone_is_removed_and_made_again(upstream, repository):
    repository.bring(upstream.first)
    for path in (repository.folder / "objects").rglob("*"):
        if path.is_file() and path.suffix != ".idx":
            path.chmod(0o644)
            path.write_bytes(b"cut")
    with pytest.raises(DownloadError, match="damaged and is removed"):
        repository.files(upstream.first, ())
    repository.bring(upstream.first)
    assert set(repository.files(upstream.first, ())) == set(FILES)


def test_the_users_own_git_settings_do_not_show(upstream, tmp_path, monkeypatch):
    plain = pin(upstream, tmp_path / "plain").dist
    (tmp_path / ".gitconfig").write_text("[core]\nautocrlf=true\nquotePath=true\n[tar]\numask=0077\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "another"))
    assert pin(upstream, tmp_path / "other").dist == plain


def pin(upstream, cache, commit=""):
    return git_archive.pin_source(
        "megatron-core", upstream.url, commit or upstream.first, "v1", ENV, Store(cache)
    )


def test_a_commit_becomes_a_locked_source_archive(upstream, tmp_path):
    source = pin(upstream, tmp_path / "cache")
    dist = source.dist
    assert dist.version == f"0.20rc1+git.{upstream.first[:12]}"
    assert dist.file == f"megatron_core-{dist.version}.tar.gz"
    assert dist.tree == upstream.git("rev-parse", "HEAD^{tree}")
    assert (dist.commit, dist.repo, dist.ref) == (upstream.first, upstream.url, "v1")
    data = Store(tmp_path / "cache").path(dist.sha256).read_bytes()
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (dist.sha256, dist.size)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        names = [member.name.partition("/")[2] for member in members]
        assert tar.extractfile(members[names.index("README.md")]).read() == FILES["README.md"]
    assert names == sorted(name for name in FILES if not name.startswith("tests/"))
    assert {member.name.split("/")[0] for member in members} == {dist.file.removesuffix(".tar.gz")}
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 315532800)}
    assert {m.mode for m in members if m.name.endswith(".sh")} == {0o755}
    assert {m.mode for m in members if not m.name.endswith(".sh")} == {0o644}


def test_a_stored_gzip_is_read_back_whatever_its_length():
    for count in (0, 1, 65534, 65535, 65536, 200_000):
        data = bytes(i % 251 for i in range(count))
        assert gzip.decompress(git_archive._stored_gzip(data)) == data


def test_the_archive_is_known_byte_for_byte():
    data = git_archive.archive({"a/b.py": FileState(b"x = 1\n"), "ü": FileState(b"", executable=True)}, "t-1")
    # A change here makes every lock with a commit in it unfetchable: it is a new format.
    assert (
        hashlib.sha256(data).hexdigest() == "70957bbdbc7f73f6f9f9b09ced32d1f5d56a851e05b2582887192f701d10a2fa"
    )


def test_a_commit_that_changes_only_tests_has_the_same_files_and_another_archive(upstream, tmp_path):
    second = upstream.commit({"tests/test_mod.py": b"assert 1\n"})
    first, other = (pin(upstream, tmp_path / "cache", commit).dist for commit in (upstream.first, second))
    assert (first.version, first.sha256) != (other.version, other.sha256)
    with_names = [Store(tmp_path / "cache").path(one.sha256) for one in (first, other)]
    contents = [sorted(member_data(path)) for path in with_names]
    assert contents[0] == contents[1]


def member_data(path):
    with tarfile.open(path) as tar:
        return [(m.name.partition("/")[2], tar.extractfile(m).read()) for m in tar]


def test_links_in_the_package_are_refused_and_elsewhere_left_out(upstream, tmp_path):
    (upstream.work / "AGENTS.md").symlink_to("README.md")
    linked = upstream.commit({})
    assert "AGENTS.md" not in dict(
        member_data(Store(tmp_path).path(pin(upstream, tmp_path, linked).dist.sha256))
    )
    (upstream.work / "megatron" / "link.py").symlink_to("core/mod.py")
    with pytest.raises(WheelError, match=r"megatron/link\.py is a link"):
        pin(upstream, tmp_path, upstream.commit({}))


def test_another_repository_is_refused(tmp_path):
    other = Upstream(tmp_path, {"pyproject.toml": b"[project]\nname='other'\n", "x.py": b""})
    with pytest.raises(WheelError, match="no folder megatron/"):
        pin(other, tmp_path / "cache")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "megatron-core"', 'name = "other"', "source of other"),
        ("[project]", "[projects]", "no pyproject.toml with a .project. table"),
        ('build-backend = "setuptools.build_meta"', 'build-backend = "hatchling.build"', "only setuptools"),
        ('dynamic = ["version"]', 'dynamic = ["version", "dependencies"]', "dependencies are only known"),
        ("package_info", "elsewhere", "version is only known"),
        ("__version__", "nothing", "cannot be read from .*KeyError"),
        ('"lib>=1.0"', '"lib >>> 1"', "malformed"),
    ],
)
def test_a_source_that_cannot_be_read_without_building_is_refused(old, new, says):
    files = {name: FileState(data) for name, data in FILES.items()}
    files["pyproject.toml"] = FileState(PYPROJECT.replace(old, new).encode())
    with pytest.raises(WheelError, match=says):
        read_metadata("megatron-core", files, "here", ENV)


def metadata():
    return read_metadata("megatron-core", {n: FileState(d) for n, d in FILES.items()}, "here", ENV)


def test_dependencies_are_those_of_the_source_with_those_of_asked_extras():
    found = metadata()
    assert found.version == "0.20rc1"
    assert found.requirements() == ["lib>=1.0", 'absent; sys_platform == "win32"']
    assert found.requirements(["dev"])[-1] == "extra-lib"


def test_the_version_is_written_as_the_wheel_will_have_it():
    files = {name: FileState(data) for name, data in FILES.items()}
    text = PYPROJECT.replace('dynamic = ["version"]', 'version = "1.0.0-RC.2"')
    files["pyproject.toml"] = FileState(text.encode())
    assert read_metadata("megatron-core", files, "here", ENV).version == "1.0.0rc2"


def test_a_version_with_a_part_of_its_own_leaves_no_room_for_the_commit():
    with pytest.raises(WheelError, match=r"0\.20rc1\+unset, which leaves no room"):
        read_metadata("megatron-core", {n: FileState(d) for n, d in FILES.items()}, "here", {})


def test_a_source_that_python_or_the_build_tools_do_not_fit_is_refused():
    def tool(name, version):
        return Dist(name=name, version=version, file="", size=0, sha256="")

    tools = {t.name: t for t in (tool("setuptools", "84"), tool("pybind11", "3"), tool("packaging", "26"))}
    require_fits(metadata(), "it", "3.13", tools)
    with pytest.raises(ResolveError, match=r"needs Python >=3\.12"):
        require_fits(metadata(), "it", "3.11", tools)
    with pytest.raises(ResolveError, match="setuptools>=80, locked is 70"):
        require_fits(metadata(), "it", "3.13", {**tools, "setuptools": tool("setuptools", "70")})
    with pytest.raises(ConfigError, match="pybind11, which is not in `compile`"):
        require_fits(metadata(), "it", "3.13", {n: t for n, t in tools.items() if n != "pybind11"})


def test_fetch_makes_the_archive_again_and_checks_it(upstream, tmp_path):
    dist = pin(upstream, tmp_path / "one").dist
    store, config = Store(tmp_path / "two"), load_config(ROOT)
    with pytest.raises(OfflineError):
        bring([dist], config, store, Ui(), offline=True)
    bring([dist], config, store, Ui(), offline=False)
    assert store.has(dist)
    assert hashlib.sha256(store.path(dist.sha256).read_bytes()).hexdigest() == dist.sha256
    shutil.rmtree(upstream.bare)
    bring([dist], config, store, Ui(), offline=False)


def test_fetch_refuses_another_tree_or_other_bytes_than_the_locks(upstream, tmp_path):
    dist = pin(upstream, tmp_path / "one").dist
    store = Store(tmp_path / "two")
    for wrong, says in (({"tree": "ab" * 20}, "has tree"), ({"sha256": "cd" * 32}, "the lock says cdcd")):
        bad = replace(dist, **wrong)
        with pytest.raises(HashMismatchError, match=says):
            git_archive.remake(bad, store)
        assert not store.has(bad)


def test_fetch_says_that_a_commit_is_gone(upstream, tmp_path):
    dist = replace(pin(upstream, tmp_path / "one").dist, commit="ab" * 20)
    with pytest.raises(RefError, match="has no commit"):
        git_archive.remake(dist, Store(tmp_path / "two"))
