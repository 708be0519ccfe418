"""The download: checked while it streams, resumed, retried; against a real server on loopback."""

import contextlib
import errno
import hashlib
import http.server
import threading
from pathlib import Path

import pytest

from dsv32_image import fetch
from dsv32_image.errors import DiskFullError, DownloadError, HashMismatchError, OfflineError
from dsv32_image.fetch import Source, fetch_all, make_client
from dsv32_image.fetch_step import bring
from dsv32_image.lockfile import Dist
from dsv32_image.store import Store
from dsv32_image.ui import Ui

DATA = bytes(range(256)) * 4096


class Server:
    """Serves bytes by path; `script` can make it misbehave for a number of requests."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.script: list[str] = []
        self.ranges: list[str | None] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                outer.answer(self)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        action = self.script.pop(0) if self.script else "serve"
        data = self.files.get(request.path)
        if action == "error":
            request.send_error(503)
            return
        if data is None:
            request.send_error(404)
            return
        start = int(wanted.split("=")[1].rstrip("-")) if wanted and action != "ignore-range" else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        body = data[start:]
        if action == "cut":
            body = body[: len(body) // 2]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            request.wfile.write(body)
        if action == "cut":
            request.connection.close()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def locked(data=DATA, name="einops"):
    return Dist(
        name=name,
        version="1",
        file=f"{name}-1-py3-none-any.whl",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def get(store, server, *items, pauses=None):
    sources = [Source(item=item, url=f"{server.url}/{item.file}") for item in items]
    with make_client() as client:
        return fetch_all(
            store, sources, Ui(), client=client, pause=(pauses if pauses is not None else []).append
        )


def test_a_file_arrives_under_its_hash(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA
    assert get(store, server, item) == len(DATA)
    assert store.path(item.sha256).read_bytes() == DATA
    assert store.missing([item]) == []


def test_many_files_arrive(store, server):
    items = []
    for number in range(20):
        data = DATA[: 1000 + number]
        items.append(locked(data, f"p{number}"))
        server.files[f"/{items[-1].file}"] = data
    get(store, server, *items)
    assert store.missing(items) == []


def test_a_wrong_hash_names_file_wanted_and_got_and_leaves_nothing(store, server):
    item = locked()
    other = DATA[:-1] + b"!"
    server.files[f"/{item.file}"] = other
    with pytest.raises(HashMismatchError) as caught:
        get(store, server, item)
    for word in (item.file, item.sha256, hashlib.sha256(other).hexdigest()):
        assert word in caught.value.message
    assert [p for p in store.home.rglob("*") if p.is_file()] == []


def test_a_cut_download_goes_on_where_it_stopped(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA
    server.script = ["cut"]
    get(store, server, item)
    assert store.path(item.sha256).read_bytes() == DATA
    assert server.ranges[0] is None
    assert server.ranges[1] is not None and server.ranges[1].startswith("bytes=")


def test_a_part_of_an_earlier_run_is_used(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA
    store.partial(item.sha256).parent.mkdir(parents=True)
    store.partial(item.sha256).write_bytes(DATA[:5000])
    assert get(store, server, item) < len(DATA) + 1
    assert server.ranges == ["bytes=5000-"]
    assert store.path(item.sha256).read_bytes() == DATA


def test_a_server_without_ranges_starts_over(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA
    server.script = ["cut", "ignore-range"]
    get(store, server, item)
    assert store.path(item.sha256).read_bytes() == DATA


def test_a_damaged_part_is_found_and_not_kept(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA
    store.partial(item.sha256).parent.mkdir(parents=True)
    store.partial(item.sha256).write_bytes(b"x" * 5000)
    with pytest.raises(HashMismatchError):
        get(store, server, item)
    get(store, server, item)  # the next run starts clean
    assert store.path(item.sha256).read_bytes() == DATA


def test_errors_of_the_server_are_tried_again_with_growing_pauses(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA
    server.script = ["error", "error", "error"]
    pauses = []
    get(store, server, item, pauses=pauses)
    assert pauses == sorted(pauses) and len(set(pauses)) == 3


def test_a_connection_that_always_ends_early_says_how_far_it_came(store, server):
    item = locked()
    server.files[f"/{item.file}"] = DATA[:3000]  # fewer bytes than locked, every time
    with pytest.raises(DownloadError, match=f"3000 of {len(DATA)} bytes"):
        get(store, server, item)
    assert not store.path(item.sha256).exists()


def test_a_file_that_is_gone_is_not_tried_again_and_names_the_way_out(store, server):
    item = locked()
    with pytest.raises(DownloadError) as caught:
        get(store, server, item)
    assert "404" in caught.value.message
    assert "--upgrade" in caught.value.hint
    assert len(server.ranges) == 1


def test_an_unreachable_server_is_a_clear_error(store, server):
    item = locked()
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(DownloadError) as caught:
        get(store, server, item)
    assert item.file in caught.value.message
    assert "goes on where it stopped" in caught.value.hint


def test_a_longer_file_than_locked_stops_early(store, server):
    item = locked(DATA[:1000])
    server.files[f"/{item.file}"] = DATA * 40
    with pytest.raises(HashMismatchError):
        get(store, server, item)


def test_a_full_disk_is_a_clear_error(store, server, monkeypatch):
    item = locked()
    server.files[f"/{item.file}"] = DATA

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "_stream", full)
    with pytest.raises(DiskFullError) as caught:
        get(store, server, item)
    assert "free" in caught.value.message


def test_offline_names_the_first_missing_file(store):
    with pytest.raises(OfflineError) as caught:
        bring([locked()], None, store, Ui(), offline=True)
    assert locked().file in caught.value.message


def test_placing_a_damaged_file_removes_it(store, tmp_path):
    item = locked()
    path = store.path(item.sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"y" * len(DATA))
    with pytest.raises(HashMismatchError) as caught:
        store.place(item, tmp_path)
    assert "nox -s fetch" in caught.value.hint
    assert not path.exists()
    assert not (tmp_path / item.file).exists()


def test_placing_links_the_file_under_its_name(store, tmp_path):
    item = locked()
    path = store.path(item.sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    placed = store.place(item, tmp_path)
    assert placed == Path(tmp_path / item.file)
    assert placed.read_bytes() == DATA
