"""The container engines. Each only loads, builds, exports and runs: what they differ in stays here."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from dsv32_image import proc
from dsv32_image.diagnose import diagnose
from dsv32_image.errors import BuildError, EngineError
from dsv32_image.oci import write_docker_archive, write_loading_layout
from dsv32_image.scratch_tags import LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dsv32_image.oci import LoadableImage

_REFUSED = (125, 126, 127)  # docker-run(1) and podman-run(1), section exit status


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A command to run in an image. `mounts` maps host folders to (path inside, writable)."""

    image: str
    command: Sequence[str]
    mounts: Mapping[Path, tuple[str, bool]]
    env: Mapping[str, str]
    gpus: bool = False


class Engine(Protocol):
    """What the build needs from an engine."""

    name: str
    program: str
    description: str
    runs_tools: bool

    def load(self, image: LoadableImage, tag: str, work: Path) -> None:
        """Make an image known by that tag; `work` is a folder for what it takes."""

    def build(self, context: Path, dockerfile: Path, args: Mapping[str, str], tag: str, log: Path) -> None:
        """Run the Dockerfile with the network off and without the engine's own cache."""

    def export(self, tag: str, work: Path, known: Sequence[str]) -> Path:
        """Write the image below `work`: a docker-archive file or an OCI layout folder.

        Layers whose diff_id is in `known` will not be read and may be empty.
        """

    def image_id(self, tag: str) -> str:
        """The config digest of the image of that tag, empty if there is none."""

    def own_tags(self) -> list[str]:
        """The tags of this project's images."""

    def unnamed(self) -> dict[str, str]:
        """Images without a tag that began with one of our builds, each with the label that says whose."""

    def remove(self, image: str) -> None:
        """Forget a tag, or an image without one and its containers; unknown ones are no error."""

    def run(self, request: RunRequest) -> int:
        """Run a command with this process's own output streams; its exit code."""

    def import_root(self, tar: Path, tag: str) -> None:
        """Make a tar of a root file system known as an image of that tag."""

    def run_tools(
        self, tag: str, work: Path, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """Run a command that mounts and chroots, in an image, with one host folder under its own path."""


class _CliEngine:
    """What docker and podman share: one command line, docker-archives in and out."""

    name = ""
    runs_tools = True
    build_options: tuple[str, ...] = ()
    build_env: Mapping[str, str] = MappingProxyType({})

    def __init__(self, program: str, description: str) -> None:
        self.program = program
        self.description = description

    def build(self, context: Path, dockerfile: Path, args: Mapping[str, str], tag: str, log: Path) -> None:
        command = [*self._offline_build(), "--no-cache", *self.build_options]
        command += ["--file", str(dockerfile), "--tag", tag, *_build_args(args), str(context)]
        proc.run(command, what=f"{self.name} build", error=BuildError, env=self.build_env, log=log)

    def _offline_build(self) -> list[str]:
        return [self.program, "build", "--network", "none"]

    def load(self, image: LoadableImage, tag: str, work: Path) -> None:
        archive = work / "load.tar"

        def load_from(folder: Path) -> None:
            write_docker_archive(folder, archive, tag)
            command = [self.program, "load", "--input", str(archive)]
            proc.run(command, what=f"loading {tag} into {self.name}", error=EngineError)

        try:
            _load_lean(load_from, image, work, _layers_of(self.program, self.own_tags()))
        finally:
            archive.unlink(missing_ok=True)

    def export(self, tag: str, work: Path, known: Sequence[str]) -> Path:
        archive = work / "export.tar"
        proc.run(
            [self.program, "save", "--output", archive, tag],
            what=f"saving {tag} from {self.name}",
            error=EngineError,
        )
        return archive

    def image_id(self, tag: str) -> str:
        command = [self.program, "image", "inspect", "--format", "{{.Id}}", tag]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        identity = done.stdout.strip()
        return "" if done.returncode else "sha256:" + identity.removeprefix("sha256:")

    def own_tags(self) -> list[str]:
        return _own_tags(self.program)

    def unnamed(self) -> dict[str, str]:
        return {}  # BuildKit keeps them in its own cache

    def remove(self, image: str) -> None:
        subprocess.run([self.program, "rmi", "--force", image], capture_output=True, check=False)

    def run(self, request: RunRequest) -> int:
        name = _container_name("run")
        command = [self.program, "run", "--rm", "--name", name, "--network", "none", "--shm-size", "8g"]
        command += self._gpu_options() if request.gpus else []
        for host, (inside, writable) in request.mounts.items():
            command += ["--volume", f"{host}:{inside}:{'rw' if writable else 'ro'}"]
        for key, value in request.env.items():
            command += ["--env", f"{key}={value}"]
        undo = [self.program, "rm", "--force", name]
        code, said = proc.watch([*command, request.image, *request.command], undo=undo)
        # The engine's own refusals; the command's codes are below, and it has its own report.
        if code in _REFUSED and (known := diagnose(said)):
            raise EngineError(f"{self.name} cannot start {request.image}: {known.problem}", hint=known.hint)
        return code

    def import_root(self, tar: Path, tag: str) -> None:
        command = [self.program, "import", str(tar), tag]
        proc.run(command, what=f"importing the tools into {self.name}", error=EngineError)

    def run_tools(
        self, tag: str, work: Path, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        # What mounting and chroot need, and no more: --privileged is refused where root itself has less.
        name = _container_name("tools")
        words = [self.program, "run", "--rm", "--name", name, "--network", "none", "--cap-add", "SYS_ADMIN"]
        words += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
        words += ["--volume", f"{work}:{work}", "--workdir", "/"]
        for key, value in {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env}.items():
            words += ["--env", f"{key}={value}"]
        hint = f"see {log}; the container must be allowed to mount (CAP_SYS_ADMIN), as mmdebstrap does"
        undo = [self.program, "rm", "--force", name]
        proc.run([*words, tag, *command], what=command[0], error=BuildError, log=log, hint=hint, undo=undo)

    def _gpu_options(self) -> list[str]:
        # NCCL and InfiniBand pin memory; docker's default limit is the daemon's.
        return ["--gpus", "all", "--ulimit", "memlock=-1"]


class DockerEngine(_CliEngine):
    """Docker 20.10 and newer, BuildKit on."""

    name = "docker"
    build_options = ("--pull=false", "--progress", "plain")
    build_env = MappingProxyType({"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"})


class PodmanEngine(_CliEngine):
    """Podman 4 and newer."""

    name = "podman"
    # Without layers of single instructions: a failed build would leave them in the engine, without a name.
    build_options = ("--pull=never", "--layers=false", "--format", "oci")

    def unnamed(self) -> dict[str, str]:
        return _unnamed(self.program, ["image", "inspect", "--format"], "{{index .Labels %s}}")

    def _offline_build(self) -> list[str]:
        if os.environ.get("BUILDAH_ISOLATION") != "chroot":
            return super()._offline_build()
        # Refused with `--network none`: that isolation has no network of its own to turn off.
        return [*_no_network(), self.program, "build", "--network", "host"]

    def _gpu_options(self) -> list[str]:
        return ["--device", "nvidia.com/gpu=all", "--ulimit", "memlock=-1"]


class BuildahEngine:
    """Buildah without a daemon; skopeo brings images in."""

    name = "buildah"
    runs_tools = False  # chroot isolation has no right to mount

    def __init__(self, program: str, description: str) -> None:
        self.program = program
        self.description = description
        # Inside a container there is often no cgroup or mount right for a runtime; chroot needs none.
        self._isolation = os.environ.get("BUILDAH_ISOLATION", "chroot")

    def load(self, image: LoadableImage, tag: str, work: Path) -> None:
        skopeo = proc.require("skopeo", "skopeo")

        def load_from(folder: Path) -> None:
            copy = [
                skopeo,
                "--insecure-policy",
                "copy",
                "--quiet",
                f"oci:{folder}",
                f"containers-storage:{tag}",
            ]
            proc.run(copy, what=f"loading {tag} into buildah's storage", error=EngineError)

        known: set[str] = set()
        for own in self.own_tags():
            done = subprocess.run(
                [self.program, "inspect", "--type", "image", own], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                known.update(json.loads(done.stdout)["OCIv1"]["rootfs"]["diff_ids"])
        _load_lean(load_from, image, work, known)

    def build(self, context: Path, dockerfile: Path, args: Mapping[str, str], tag: str, log: Path) -> None:
        command = [self.program, "build", "--isolation", self._isolation, "--pull-never", "--layers=false"]
        command += [
            "--format",
            "oci",
            "--file",
            str(dockerfile),
            "--tag",
            tag,
            *_build_args(args),
            str(context),
        ]
        proc.run([*self._network_off(), *command], what="buildah build", error=BuildError, log=log)

    def export(self, tag: str, work: Path, known: Sequence[str]) -> Path:
        folder = work / "export"
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for diff_id in known:
            # A blob that is there is not copied again, and nobody reads these.
            (blobs / diff_id.removeprefix("sha256:")).touch()
        # `buildah push --disable-compression` compresses all the same when it writes an OCI layout.
        copy = [proc.require("skopeo", "skopeo"), "--insecure-policy", "copy", "--quiet"]
        copy += ["--dest-oci-accept-uncompressed-layers", f"containers-storage:{tag}", f"oci:{folder}"]
        proc.run(copy, what=f"exporting {tag} from buildah's storage", error=EngineError)
        return folder

    def image_id(self, tag: str) -> str:
        command = [self.program, "images", "--quiet", "--no-trunc", tag]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def own_tags(self) -> list[str]:
        return _own_tags(self.program, "{{.Name}}")

    def unnamed(self) -> dict[str, str]:
        return _unnamed(
            self.program, ["inspect", "--type", "image", "--format"], "{{index .OCIv1.Config.Labels %s}}"
        )

    def remove(self, image: str) -> None:
        subprocess.run([self.program, "rmi", "--force", image], capture_output=True, check=False)

    def run(self, request: RunRequest) -> int:
        if request.gpus:
            raise EngineError("buildah gives containers no GPU", hint="use docker or podman, or --no-gpus")
        container = proc.run(
            [self.program, "from", "--pull-never", request.image],
            what=f"starting {request.image}",
            error=EngineError,
        ).strip()
        try:
            command = [self.program, "run", "--isolation", self._isolation]
            for host, (inside, writable) in request.mounts.items():
                command += ["--volume", f"{host}:{inside}:{'rw' if writable else 'ro'}"]
            # buildah runs the bare command, without the image's entrypoint, as a build step would.
            words = ["env", *(f"{k}={v}" for k, v in request.env.items()), "/opt/dsv32/share/entrypoint"]
            command += [container, "--", *words, *request.command]
            undo = [self.program, "rm", container]
            return proc.watch([*self._network_off(), *command], undo=undo)[0]
        finally:
            subprocess.run([self.program, "rm", container], capture_output=True, check=False)

    def import_root(self, tar: Path, tag: str) -> None:
        raise EngineError("buildah does not run tools here", hint="apt-get install mmdebstrap")

    def run_tools(
        self, tag: str, work: Path, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        raise EngineError("buildah does not run tools here", hint="apt-get install mmdebstrap")

    def _network_off(self) -> list[str]:
        return _no_network() if self._isolation == "chroot" else []


def _container_name(kind: str) -> str:
    """By it a container is removed if this process is killed: the engine's daemon would let it run on."""
    return f"dsv32-{kind}-{secrets.token_hex(8)}"


def _no_network() -> list[str]:
    """Words before a command that leave it no network but loopback: chroot isolation has the caller's."""
    unshare = [proc.require("unshare", "util-linux"), "--net"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    return [*unshare, sys.executable, "-m", "dsv32_image.loopback"]


def _load_lean(load_from: Callable[[Path], None], image: LoadableImage, work: Path, known: set[str]) -> None:
    """Load without gzip and without what the engine holds; if it does not take that, in ordinary form."""
    layout = work / "load"
    try:
        try:
            write_loading_layout(image, layout, known=known)
            load_from(layout)
        except EngineError:
            write_loading_layout(image, layout, known=None)
            load_from(layout)
    finally:
        shutil.rmtree(layout, ignore_errors=True)


def _own_tags(program: str, name: str = "{{.Repository}}") -> list[str]:
    """The images of this project that an engine holds; their layers need not be loaded again."""
    command = [program, "images", "--format", name + ":{{.Tag}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith("localhost/dsv32")]


def _unnamed(program: str, inspect: Sequence[str], form: str) -> dict[str, str]:
    """Images without a name that carry the label of a build, and its value."""
    ask = [program, "images", "--all", "--quiet", "--no-trunc"]
    ask += ["--filter", "dangling=true", "--filter", f"label={LABEL}"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    found = {}
    for image in (line.removeprefix("sha256:") for line in done.stdout.split()):
        words = [program, *inspect, form % json.dumps(LABEL), image]
        found[image] = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return found


def _layers_of(program: str, tags: Sequence[str]) -> set[str]:
    if not tags:
        return set()
    command = [program, "image", "inspect", "--format", "{{json .RootFS.Layers}}", *tags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {layer for line in done.stdout.splitlines() for layer in json.loads(line) or []}


def _build_args(args: Mapping[str, str]) -> list[str]:
    return [word for key, value in sorted(args.items()) for word in ("--build-arg", f"{key}={value}")]
