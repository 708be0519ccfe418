"""Known causes in what programs print: each in the words that were seen, and none in words that are near."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv32_image import proc
from dsv32_image.diagnose import Kind, diagnose
from dsv32_image.errors import BuildError
from dsv32_image.smoke_step import causes

ROOT = Path(__file__).parents[2]
TE = "/opt/venv/lib/python3.13/site-packages/transformer_engine/transformer_engine_torch.cpython-313.so"
SEEN = [
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update …",
        Kind.DRIVER_TOO_OLD,
        "it knows CUDA 12.4",
        "driver 580",
    ),
    (
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        Kind.DRIVER_TOO_OLD,
        "CUDA 13.0",
        "driver 580",
    ),
    (
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0, please update",
        Kind.DRIVER_TOO_OLD,
        "CUDA 13.0",
        "driver 580",
    ),
    (
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        Kind.TOOLKIT_MISSING,
        "container toolkit is not set up",
        "nvidia-ctk runtime configure --runtime=docker",
    ),
    (
        "docker: Error response: failed to discover GPU vendor from CDI: no known GPU vendor found",
        Kind.TOOLKIT_MISSING,
        "container toolkit is not set up",
        "nvidia-container-toolkit",
    ),
    (
        "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown.",
        Kind.NO_GPU,
        "no driver offers one",
        "doctor",
    ),
    ("RuntimeError: No CUDA GPUs are available", Kind.NO_GPU, "No CUDA GPUs", "--variant cpu"),
    (
        "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all",
        Kind.CDI_UNRESOLVED,
        "nvidia.com/gpu=all",
        "nvidia-ctk cdi generate",
    ),
    (
        "Error: crun: error stat'ing file /lib/x86_64-linux-gnu/libEGL_nvidia.so.535.161.07: No such file or "
        "directory: OCI runtime attempted to invoke a command that was not found",
        Kind.CDI_UNRESOLVED,
        "older than the driver",
        "nvidia-ctk cdi generate",
    ),
    (
        f"ImportError: {TE}: undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_jRKSs",
        Kind.OTHER_TORCH,
        "transformer_engine_torch.cpython-313.so was compiled for another torch",
        "--no-cache",
    ),
    (
        "ImportError: /x/flash_mla/cuda.so: undefined symbol: _ZNK3c1010TensorImpl4sizeEv",
        Kind.OTHER_TORCH,
        "cuda.so was compiled for another torch",
        "versions.lock",
    ),
    ("tar: s/t.tar: Cannot write: No space left on device", Kind.DISK_FULL, "t.tar", "docker system df"),
    (
        "ERROR: failed to solve: write /var/lib/docker/overlay2/x: no space left on device",
        Kind.DISK_FULL,
        "overlay2",
        "doctor",
    ),
    (
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a1: No space left on device (28)",
        Kind.SHM_FULL,
        "nccl-a1",
        "--shm-size 8g",
    ),
    (
        "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        Kind.COMPILER_KILLED,
        "(cc1plus) was killed",
        "halve MAX_JOBS",
    ),
    ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", Kind.COMPILER_KILLED, "(cicc)", "MAX_JOBS"),
    ("collect2: fatal error: ld terminated with signal 9 [Killed]", Kind.COMPILER_KILLED, "(ld)", "MAX_JOBS"),
    ("cc1plus: out of memory allocating 65536 bytes", Kind.COMPILER_KILLED, "(cc1plus)", "MAX_JOBS"),
    (
        "error running container: from /usr/bin/crun creating container for [/bin/sh -c KEY=1 sh /run/tools/"
        "install-layer]: cgroups in hybrid mode not supported, drop all controllers from cgroupv2",
        Kind.RUNTIME_REFUSES,
        "cgroups in hybrid mode not supported",
        "BUILDAH_ISOLATION=chroot",
    ),
    (
        "Error: crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted: OCI permission denied",
        Kind.RUNTIME_REFUSES,
        "RLIMIT_NOFILE",
        "--engine buildah",
    ),
    (
        "cudaSetDevice failed: 802 system not yet initialized",
        Kind.FABRIC_NOT_READY,
        "802",
        "nvidia-fabricmanager",
    ),
]
NEAR = [
    "",
    "3 passed, 1 failed",
    "AssertionError: 0.1 != 0.2",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "ImportError: /usr/lib/libfoo.so.1: undefined symbol: foo_bar",
    "docker: Error response from daemon: No such image: localhost/dsv32:cu130",
    "test_killed_ranks_are_noticed PASSED",
    "error running container: from /usr/bin/crun creating container for [/bin/x]: executable file not found",
]


@pytest.mark.parametrize(
    ("text", "kind", "problem", "hint"), SEEN, ids=[f"{k}-{t[:24]}" for t, k, _, _ in SEEN]
)
def test_a_known_cause_is_named_with_its_next_step(text, kind, problem, hint):
    for found in (diagnose(text), diagnose(f"#9 12.3 Collecting\n#9 14.0 {text}\nmore\n")):
        assert found is not None
        assert found.kind is kind
        assert problem in found.problem
        assert hint in found.hint
        assert "\n" not in found.problem + found.hint


def test_every_kind_has_been_seen():
    assert {kind for _, kind, _, _ in SEEN} == set(Kind)


@pytest.mark.parametrize("text", NEAR)
def test_what_is_only_near_is_not_diagnosed(text):
    assert diagnose(text) is None


def test_a_long_line_is_cut_around_the_words():
    found = diagnose("x" * 5000 + " write: no space left on device " + "y" * 5000)
    assert found is not None
    assert "no space left on device" in found.problem
    assert len(found.problem) < 200


def test_a_failed_command_says_its_known_cause():
    script = "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1"
    with pytest.raises(BuildError) as caught:
        proc.run(["sh", "-c", script], what="docker build", hint="see the log")
    assert caught.value.message.startswith("docker build failed with exit code 1: the compiler (cc1plus)")
    assert "MAX_JOBS" in caught.value.hint


def test_a_failed_command_without_known_cause_keeps_its_own_hint():
    with pytest.raises(BuildError) as caught:
        proc.run(["sh", "-c", "exit 3"], what="docker build", hint="see the log")
    assert caught.value.hint == "see the log"


def test_a_watched_command_shows_its_words_and_keeps_their_end(capfd):
    script = "import sys; print('out'); sys.stderr.write('x' * 200_000 + 'end\\n'); sys.exit(7)"
    code, said = proc.watch([sys.executable, "-c", script])
    shown = capfd.readouterr()
    assert code == 7
    assert said.endswith("xend\n") and len(said) < 100_000
    assert shown.out == "out\n"
    assert len(shown.err) == 200_004


def test_a_character_that_falls_on_the_edge_of_a_block_stays_whole(capfd):
    script = "import sys; sys.stderr.buffer.write(('x' + '…' * 60_000).encode())"
    _, said = proc.watch([sys.executable, "-c", script])
    assert set(said) == {"…"} or set(said) == {"x", "…"}
    assert capfd.readouterr().err == "x" + "…" * 60_000


def test_a_smoke_file_that_cannot_be_imported_is_a_failed_line_of_the_report(tmp_path):
    shutil.copy(ROOT / "smoke" / "conftest.py", tmp_path)
    # The report names torch, which the host side does not have.
    fake = "__version__ = '0'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n"
    (tmp_path / "torch.py").write_text(fake)
    (tmp_path / "test_te.py").write_text(f"raise ImportError('{TE}: undefined symbol: _ZN3c105Error')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--smoke-report=report.json"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(t["file"], t["name"], t["outcome"]) for t in report["tests"]] == [
        ("test_te.py", "import", "failed")
    ]
    assert [known.kind for known in causes(report)] == [Kind.OTHER_TORCH]


def test_the_causes_of_failed_smoke_tests_are_said_once_each():
    old = "The NVIDIA driver on your system is too old (found version 12040)."
    tests = [{"outcome": "failed", "reason": old}] * 3
    tests += [{"outcome": "failed", "reason": "assert 1 == 2"}, {"outcome": "skipped", "reason": "no GPU"}]
    assert [known.kind for known in causes({"tests": tests})] == [Kind.DRIVER_TOO_OLD]
