"""Choosing an engine: what is there but does not work is named, with the next step. Fake programs on PATH."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv32_image.engine import BuildahEngine, RunRequest
from dsv32_image.engine_discovery import choose
from dsv32_image.errors import EngineError, UsageError


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH of our own; `programs(name, script)` puts a shell script on it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, script, where=folder):
        where.mkdir(exist_ok=True)
        path = where / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return add


DOCKER = """
case "$1" in
  version) echo "{client} 20.10.24" ;;
  buildx) exit {buildx} ;;
esac
"""


def test_an_unknown_engine_lists_the_known_ones(programs):
    with pytest.raises(UsageError) as caught:
        choose("rkt")
    assert "docker, podman, buildah" in caught.value.hint


def test_no_engine_at_all_says_so_for_each(programs):
    with pytest.raises(EngineError) as caught:
        choose(None)
    for name in ("docker", "podman", "buildah"):
        assert f"{name}: not installed" in caught.value.message
    assert "scripts/nox" in caught.value.hint


def test_docker_client_without_daemon_is_named(programs):
    programs(
        "docker", 'echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock" >&2; exit 1'
    )
    with pytest.raises(EngineError) as caught:
        choose("docker")
    assert "no daemon answers" in caught.value.message
    assert "Cannot connect" in caught.value.message
    assert "start" in caught.value.hint


def test_docker_client_that_needs_buildx_is_named(programs):
    programs("docker", DOCKER.format(client="28.2.2", buildx=1))
    with pytest.raises(EngineError) as caught:
        choose("docker")
    assert "buildx" in caught.value.message
    assert "buildx" in caught.value.hint


def test_new_docker_client_with_buildx_is_taken(programs):
    programs("docker", DOCKER.format(client="28.2.2", buildx=0))
    assert choose("docker").name == "docker"


def test_old_docker_client_needs_no_buildx(programs):
    programs("docker", DOCKER.format(client="20.10.24", buildx=1))
    assert choose(None).name == "docker"


def test_too_old_daemon_is_named(programs):
    programs("docker", 'echo "19.3.1 19.3.1"')
    with pytest.raises(EngineError, match="too old"):
        choose("docker")


def test_of_two_docker_clients_the_one_that_works_is_taken(programs, tmp_path, monkeypatch):
    programs("docker", DOCKER.format(client="28.2.2", buildx=1))
    other = programs("docker", DOCKER.format(client="20.10.24", buildx=1), where=tmp_path / "second")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{other.parent}")
    assert str(other) in choose("docker").description


def test_a_dead_docker_is_passed_over_for_buildah_and_one_line_says_why(programs):
    programs("docker", 'echo "Cannot connect to the Docker daemon" >&2; exit 1')
    programs("buildah", "echo buildah version 1.28.2")
    programs("skopeo", "exit 0")
    said = []
    assert choose(None, said.append).name == "buildah"
    (line,) = said  # and none about podman, which is simply not there
    assert "\n" not in line
    assert "no daemon answers" in line and "Cannot connect" in line and line.endswith("using buildah")


def test_a_podman_that_starts_no_container_is_passed_over_unless_asked_for(programs):
    refused = "Error: crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted: OCI permission denied"
    programs("podman", f"case $1 in run) echo '{refused}' >&2; exit 126 ;; *) echo 4.3.1 ;; esac")
    programs("buildah", "echo buildah version 1.28.2")
    programs("skopeo", "exit 0")
    said = []
    assert choose(None, said.append).name == "buildah"
    (line,) = said
    assert "podman: the container runtime cannot start containers" in line and line.endswith("using buildah")
    assert choose("podman").name == "podman"


def test_a_podman_whose_runtime_gets_to_the_missing_program_is_taken(programs):
    missing = "Error: crun: executable file `/none` not found: No such file or directory"
    programs("podman", f"case $1 in run) echo '{missing}' >&2; exit 127 ;; *) echo 4.3.1 ;; esac")
    assert choose(None).name == "podman"


def test_nothing_is_said_about_an_engine_that_was_not_asked_for(programs):
    programs("docker", "exit 1")
    programs("buildah", "echo buildah version 1.28.2")
    programs("skopeo", "exit 0")
    said = []
    choose("buildah", said.append)
    assert said == []


def test_buildah_without_skopeo_says_what_is_missing(programs):
    programs("buildah", "echo ok")
    with pytest.raises(EngineError) as caught:
        choose("buildah")
    assert "skopeo" in caught.value.hint


def test_broken_podman_shows_its_own_words(programs):
    programs("podman", 'echo "Error: cannot set up namespace" >&2; exit 125')
    with pytest.raises(EngineError, match="cannot set up namespace"):
        choose("podman")


def test_docker_runs_without_network_and_with_the_mounts(programs, tmp_path):
    log = tmp_path / "words"
    script = f'case "$1" in run) echo "$@" > {log}; exit 7 ;; version) echo "20.10.24 20.10.24" ;; esac'
    programs("docker", script)
    request = RunRequest(
        image="localhost/dsv32:cpu", command=["true"], mounts={tmp_path: ("/run/smoke", True)}, env={"A": "1"}
    )
    assert choose("docker").run(request) == 7
    words = log.read_text()
    assert "--network none" in words
    assert f"{tmp_path}:/run/smoke:rw" in words
    assert "--env A=1" in words
    assert "--gpus" not in words


@pytest.mark.parametrize(
    "call",
    [
        "run_tools('x:1', folder, ['mmdebstrap'], {}, folder / 'log')",
        "run(RunRequest(image='x:1', command=['pytest'], mounts={}, env={}))",
    ],
)
def test_the_container_of_a_killed_step_is_removed_from_the_daemon(programs, tmp_path, call):
    """The client's end alone does not end a container."""
    log, path = tmp_path / "words", os.defpath
    docker = programs("docker", f'PATH={path}; echo "$@" >> {log}; case "$1" in run) exec sleep 60 ;; esac')
    program = (
        "import sys; from pathlib import Path; from dsv32_image.engine import DockerEngine, RunRequest; "
        f"folder = Path(sys.argv[2]); DockerEngine(sys.argv[1], '').{call}"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", program, str(docker), str(tmp_path)]

    def said(count):
        limit = time.monotonic() + 15
        while not log.exists() or len(log.read_text().splitlines()) < count:
            assert time.monotonic() < limit, "it did not come to pass"
            time.sleep(0.02)
        return log.read_text().splitlines()

    with subprocess.Popen(command, env=env) as build:
        (started,) = said(1)
        build.kill()
    name = started.split("--name ")[1].split()[0]
    assert said(2)[1] == f"rm --force {name}"


@pytest.mark.parametrize("name", ["podman", "buildah"])
def test_images_without_a_name_are_told_by_the_label_that_they_inherit(programs, tmp_path, name):
    script = (
        f'echo "$@" >> {tmp_path}/words; case "$1" in images) echo sha256:0a1b ;; '
        "image | inspect) echo 5bce98f7-77 ;; version | --version) echo 4.3.1 ;; esac"
    )
    programs(name, script)
    programs("skopeo", "true")
    assert choose(name).unnamed() == {"0a1b": "5bce98f7-77"}
    words = (tmp_path / "words").read_text()
    assert "--filter dangling=true --filter label=dsv32.build" in words
    assert words.splitlines()[-1].endswith('"dsv32.build"}} 0a1b')


@pytest.mark.parametrize("isolation", ["", "chroot"])
def test_podman_builds_without_network_whatever_the_isolation(programs, tmp_path, monkeypatch, isolation):
    """`podman build` refuses to turn the network off with chroot isolation, which shares the caller's."""
    log = tmp_path / "words"
    programs("podman", f'case "$1" in build) echo "$@" > {log} ;; esac')
    programs("unshare", f'echo "unshare $@" > {log}.outer; while [ "$1" != podman ]; do shift; done; "$@"')
    monkeypatch.setenv("BUILDAH_ISOLATION", isolation)
    podman = choose("podman")
    podman.program = "podman"
    podman.build(tmp_path, tmp_path / "Dockerfile", {}, "localhost/x:1", tmp_path / "log")
    outer = log.with_suffix(".outer")
    if isolation:
        assert outer.read_text().startswith("unshare --net") and "dsv32_image.loopback" in outer.read_text()
        assert "--network host" in log.read_text()
    else:
        assert "--network none" in log.read_text() and not outer.exists()


def test_a_dead_docker_host_is_named_as_what_to_correct(programs, monkeypatch):
    programs("docker", 'echo "Cannot connect" >&2; exit 1')
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(EngineError) as caught:
        choose("docker")
    assert "DOCKER_HOST is set to tcp://127.0.0.1:9" in caught.value.hint


def test_a_folder_on_the_path_that_may_not_be_entered_is_passed_over(programs, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(EngineError, match="docker: not installed"):
        choose("docker")


@pytest.mark.parametrize(
    ("name", "code", "said", "hint"),
    [
        (
            "docker",
            125,
            'Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            "nvidia-ctk runtime configure",
        ),
        (
            "podman",
            126,
            "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all",
            "nvidia-ctk cdi generate",
        ),
    ],
)
def test_gpus_that_the_engine_cannot_give_are_an_error_with_the_next_step(programs, name, code, said, hint):
    script = f"case \"$1\" in run) echo '{said}' >&2; exit {code} ;; *) echo '20.10.24 20.10.24' ;; esac"
    programs(name, script)
    request = RunRequest(image="localhost/dsv32:cu130", command=["true"], mounts={}, env={}, gpus=True)
    with pytest.raises(EngineError) as caught:
        choose(name).run(request)
    assert f"{name} cannot start localhost/dsv32:cu130" in caught.value.message
    assert hint in caught.value.hint


def test_what_a_command_itself_prints_and_returns_is_not_the_engines_error(programs):
    says = 'echo "No CUDA GPUs are available" >&2; exit 1'
    programs("docker", f'case "$1" in run) {says} ;; *) echo "20.10.24 20.10.24" ;; esac')
    request = RunRequest(image="localhost/dsv32:cu130", command=["true"], mounts={}, env={}, gpus=True)
    assert choose("docker").run(request) == 1


def test_buildah_says_that_it_gives_no_gpu():
    request = RunRequest(image="localhost/dsv32:cu130", command=["true"], mounts={}, env={}, gpus=True)
    with pytest.raises(EngineError) as caught:
        BuildahEngine("buildah", "").run(request)
    assert "docker or podman" in caught.value.hint
