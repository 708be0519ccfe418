"""What killed builds left in an engine goes, and nothing else does."""

import os
import subprocess

import pytest

from dsv32_image import scratch_tags
from dsv32_image.scratch_tags import is_stale, remove_all, remove_stale, scratch_labels, scratch_tag


class ListingEngine:
    def __init__(self, *tags, unnamed=()):
        self.tags, self.images = list(tags), dict(unnamed)

    def unnamed(self):
        return dict(self.images)

    def own_tags(self):
        return list(self.tags)

    def remove(self, image):
        if image in self.images:
            del self.images[image]
        else:
            self.tags.remove(image)


@pytest.fixture
def gone(monkeypatch):
    """Make a tag as a process made it that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()

    def make(kind, key, number=None):
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: ended.pid)
            return scratch_tag(kind, key, number)

    return make


def test_a_killed_builds_tags_are_removed_and_no_others(gone, monkeypatch):
    kept = ["localhost/dsv32:cpu", "localhost/dsv32-tools:0011223344556677", "localhost/dsv32-part:mine"]
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", os.getppid)
        kept.append(scratch_tag("part", "a" * 64))  # of a build that runs
    with monkeypatch.context() as patched:
        patched.setattr(scratch_tags.socket, "gethostname", lambda: "another machine")
        kept.append(gone("part", "a" * 64))
    left = [gone("part", "a" * 64), gone("build", "b" * 64), gone("build", "b" * 64, 1), gone("compile", "c")]
    engine = ListingEngine(*left, *kept)
    remove_stale(engine)
    assert engine.tags == kept


def test_stages_without_a_name_go_with_the_build_that_began_them(gone, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", os.getppid)
        (mine,) = scratch_labels().values()
    old = gone("part", "a" * 64).split("-", 2)[2]
    engine = ListingEngine(unnamed={"a1": old, "b2": mine, "c3": "", "d4": f"ffffffff-{os.getpid()}"})
    remove_stale(engine)
    assert list(engine.images) == ["b2", "c3", "d4"]


def test_a_tag_of_this_processs_number_is_an_earlier_ones(gone):
    assert is_stale(scratch_tag("part", "a" * 64))


def test_a_build_forgets_its_tags_once():
    tags = [scratch_tag("part", "a" * 64), scratch_tag("build", "b" * 64)]
    engine = ListingEngine(*tags)
    remove_all(engine, tags)
    assert engine.tags == tags == []
