"""`doctor` on good and bad hosts. Each bad host is the good one with one thing broken: one line changes."""

import json
import re
from pathlib import Path

import pytest
from fake_host import NAMES, FakeHost

from dsv32_image import cli, doctor
from dsv32_image.doctor import nvidia, probe
from dsv32_image.doctor.container_checks import parse_spec
from dsv32_image.doctor.probe import Asked
from dsv32_image.errors import HostUnfitError, UsageError
from dsv32_image.ui import Ui

ROOT = Path(__file__).parents[3]

# Host, check, status, and words of detail and fix that must be there. No other line may fail or warn.
BAD = [
    ("driver-550", [("driver", "fail", "550.163.01; CUDA 13.x needs 580", "cuda-compat-13-0")]),
    ("driver-mismatch", [("driver", "fail", "another version than the loaded module", "reboot")]),
    ("driver-not-loaded", [("driver", "fail", "1 NVIDIA GPU.*nouveau is loaded", "blacklist nouveau")]),
    (
        "no-gpu",
        [
            ("driver", "fail", "no NVIDIA GPU on the PCI bus", "--build-only"),
            ("toolkit", "fail", "could not select device driver", "nvidia-container-toolkit"),
        ],
    ),
    ("old-cards", [("gpus", "fail", "2 x NVIDIA A100.*compiled for 9.0 and 10.0", "H200")]),
    (
        "one-old-card",
        [
            ("gpus", "warn", "2 x NVIDIA H200 .*1 x NVIDIA RTX A2000", "CUDA_VISIBLE_DEVICES=0,1"),
            ("persistence", "warn", "off for GPU 2", "nvidia-persistenced"),
        ],
    ),
    ("toolkit-missing", [("toolkit", "fail", "nvidia-ctk is not there", "runtime configure")]),
    ("runtime-not-configured", [("toolkit", "warn", "1.18.0, but docker", "--runtime=docker")]),
    ("cdi-missing", [("cdi", "fail", "no specification", "cdi generate --output=/etc/cdi/nvidia.yaml")]),
    (
        "cdi-stale",
        [
            (
                "cdi",
                "fail",
                r"does not list GPU 7; .*driver 570.172.08, loaded is 580.95.05; .*libcuda.*not there \(2",
                "cdi generate --output=/etc/cdi/nvidia.yaml",
            )
        ],
    ),
    (
        "cdi-twice",
        [("cdi", "fail", "several specifications: .*toolkit.yaml, /etc/cdi/nvidia", "all but one")],
    ),
    ("shm-64m", [("shm", "fail", "64.0 MB, less than", "size=8g")]),
    ("memlock-64k", [("memlock", "fail", "65.5 kB: NCCL", "memlock unlimited")]),
    (
        "docker-dead",
        [
            ("engine", "fail", "no daemon answers.*Is the docker daemon running", "scripts/nox"),
            ("mmdebstrap", "fail", "no docker or podman", "apt-get install mmdebstrap"),
            ("toolkit", None, "", ""),
        ],
    ),
    ("buildx-missing", [("engine", "fail", "28.5.1 .* has no buildx", "scripts/nox")]),
    (
        "docker-dead-buildah-there",
        [("other engines", "warn", "docker: .*no daemon answers", "systemctl start docker")],
    ),
    ("unshare-refused", [("network off", "fail", "Operation not permitted", "CAP_SYS_ADMIN")]),
    ("disk-full", [("disk", "fail", "20.0 GB free for cache.*about 45.0 GB", "25.0 GB at cache")]),
    ("disk-engine-full", [("disk", "fail", "6.0 GB free for engine /var/lib/docker", "17.0 GB at engine")]),
    (
        "fabric-manager-missing",
        [("fabric", "fail", "8 of 8 GPUs: In Progress.*inactive", "nvidia-fabricmanager 580.95.05")],
    ),
    (
        "fabric-manager-other-version",
        [("fabric", "fail", "580.82.07, which must be the driver's 580.95.05: failed", "580.95.05")],
    ),
    ("virtual-machine", [("persistence", "warn", "off for GPU 0", "nvidia-persistenced")]),
    ("pcie-cards", [("topology", "warn", "1 of 1 pairs without NVLink .NODE.", "PCIe")]),
    ("nvlink-down", [("nvlink", "warn", "GPU 3: 2 of 18", "errorcounters")]),
    ("ib-port-down", [("infiniband", "warn", "1 of 2 ports active; mlx5_1/1 DOWN", "ibstat")]),
    ("peermem-missing", [("peermem", "warn", "through host memory", "modprobe nvidia-peermem")]),
    ("clock-1970", [("clock", "fail", "1970-01-01 .* before", "timedatectl")]),
    (
        "small-container",
        [
            ("memory", "warn", "8.6 GB, by the limit of this container", "MAX_JOBS=1"),
            ("cores", "warn", "1", "more"),
            ("open files", "warn", "1024", "ulimit -n"),
        ],
    ),
    ("rootless-restricted", [("user", "fail", "cannot have a user namespace", "apparmor_restrict")]),
    ("rootless-without-newuidmap", [("user", "fail", "needs newuidmap", "apt-get install uidmap")]),
    ("rootless-without-ids", [("user", "fail", "no range of ids .*/etc/subuid$", "--add-subuids")]),
]
GOOD = ["h200", "podman", "rootless", "cdi-runtime-folder-wins"]


@pytest.fixture
def host(tmp_path):
    return lambda name: FakeHost(bin=tmp_path / "bin").load(name)


def asked(variant="cu130", **words):
    return Asked(variant=variant, root=ROOT, cache=Path("/cache"), **words)


def test_each_host_file_is_used():
    assert sorted([*GOOD, *(name for name, _ in BAD)]) == NAMES


@pytest.mark.parametrize("name", GOOD)
def test_a_good_host_passes_every_check(host, name):
    found = doctor.examine(host(name), asked())
    assert [f for f in found if f.status != "pass"] == []
    doctor.require_fit(found, asked())


def test_the_good_host_is_asked_everything(host):
    found = [f.check for f in doctor.examine(host("h200"), asked(network=True))]
    assert len(set(found)) == len(found)
    # What only buildah needs, and engines beside the one in use.
    assert len(found) == len(doctor.CHECKS) - 2


@pytest.mark.parametrize(("name", "lines"), BAD, ids=[name for name, _ in BAD])
def test_a_bad_host_is_told_what_is_wrong_and_how_to_mend_it(host, name, lines):
    found = {f.check: f for f in doctor.examine(host(name), asked())}
    expected = {check: status for check, status, _, _ in lines}
    for check, status, detail, fix in lines:
        if status:
            assert found[check].status == status, found[check]
            assert re.search(detail, found[check].detail), found[check]
            assert fix in found[check].fix
    others = [f for f in found.values() if f.status != "pass" and f.check not in expected]
    assert others == []


@pytest.mark.parametrize("name", NAMES)
def test_every_line_that_does_not_pass_has_a_fix_and_is_one_line(host, name):
    for finding in doctor.examine(host(name), asked(network=True)):
        assert finding.status in ("pass", "warn", "fail")
        assert bool(finding.fix) == (finding.status != "pass"), finding
        assert "\n" not in finding.detail + finding.fix


def test_cpu_asks_no_question_about_gpus(host):
    found = doctor.examine(host("no-gpu"), asked("cpu"))
    assert {f.check for f in found} == {
        *("engine", "mmdebstrap", "user", "disk", "memory", "cores", "shm", "open files", "clock")
    }
    doctor.require_fit(found, asked("cpu"))


def test_a_machine_without_gpu_can_build_cu130(host):
    words = asked(build_only=True)
    doctor.require_fit(doctor.examine(host("no-gpu"), words), words)


def test_what_is_enough_for_cpu_is_not_for_cu130(host):
    assert doctor.examine(host("disk-full"), asked("cpu"))[3].status == "pass"


def test_a_build_that_finds_its_layers_needs_less_room(host):
    machine = host("disk-full")
    machine.files[f"{ROOT}/dist/cu130/index.json"] = []
    found = {f.check: f for f in doctor.examine(machine, asked())}
    assert found["disk"].status == "warn"


def test_a_failed_check_is_an_error_that_names_it(host):
    found = doctor.examine(host("toolkit-missing"), asked())
    with pytest.raises(HostUnfitError) as caught:
        doctor.require_fit(found, asked())
    assert "toolkit" in caught.value.message
    assert "nvidia-container-toolkit" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "variant"), [("h200", "cu130"), ("driver-not-loaded", "cu130"), ("no-gpu", "cpu")]
)
def test_the_variant_follows_the_gpu_not_the_driver(host, name, variant):
    assert doctor.choose_variant(host(name), None) == variant


def test_an_unknown_variant_lists_the_known_ones(host):
    with pytest.raises(UsageError) as caught:
        doctor.choose_variant(host("h200"), "rocm")
    assert "cpu, cu130" in caught.value.hint


def test_the_network_is_only_asked_with_network(host):
    machine = host("h200")
    machine.answers = {"index": "the package index cannot be reached:\n  | timed out", "mirror": "404"}
    assert not {"index", "mirror"} & {f.check for f in doctor.examine(machine, asked())}
    found = {f.check: f for f in doctor.examine(machine, asked(network=True))}
    assert (found["index"].status, found["mirror"].status) == ("fail", "fail")
    assert "UV_DEFAULT_INDEX" in found["index"].fix


def test_an_engine_that_was_asked_for_is_the_one_examined(host):
    found = doctor.examine(host("docker-dead-buildah-there"), asked(engine="docker"))
    assert found[0].status == "fail"
    assert "systemctl start docker" in found[0].fix


def test_json_is_stable_and_the_only_thing_on_standard_output(host, capsys):
    words = asked()
    found = doctor.examine(host("fabric-manager-missing"), words)
    doctor.report(found, words, Ui(), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["format", "variant", "counts", "findings"]
    assert document["format"] == 1
    assert document["counts"]["fail"] == 1
    assert all(list(row) == ["check", "status", "detail", "fix"] for row in document["findings"])


def test_the_table_has_a_line_a_check_and_the_fix_below_it(host, capsys):
    words = asked()
    found = doctor.examine(host("driver-550"), words)
    doctor.report(found, words, Ui(), as_json=False)
    shown = capsys.readouterr().out
    assert all(finding.check in shown for finding in found)
    assert "fix: install driver 580 or newer" in shown
    assert shown.rstrip().endswith("0 warn, 1 fail")


def test_a_failed_check_is_the_exit_code_of_the_command_line(monkeypatch, capsys, host):
    machine = host("docker-dead")
    monkeypatch.setattr(doctor, "HostProbe", lambda root: machine)
    monkeypatch.setenv("DSV32_ROOT", str(ROOT))
    assert cli.main(["doctor", "--variant", "cpu", "--json"]) == HostUnfitError.exit_code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["variant"] == "cpu"
    assert shown.err.startswith("error: cpu cannot be built and run here yet: engine")
    assert "next: " in shown.err


@pytest.mark.parametrize("variant", ["cpu", "cu130"])
def test_the_machine_that_runs_the_tests_is_examined_to_the_end(variant, monkeypatch, capsys):
    monkeypatch.setenv("DSV32_ROOT", str(ROOT))
    code = cli.main(["doctor", "--variant", variant, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (HostUnfitError.exit_code if document["counts"]["fail"] else 0)
    assert {"engine", "disk", "memory", "clock"} <= {row["check"] for row in document["findings"]}


def test_tools_that_print_nothing_are_no_traceback(host):
    machine = host("h200")
    for said in machine.commands.values():
        said["|"] = []
    for path in machine.files:
        machine.files[path] = []
    # An empty `docker version` is not an answer; the engine has tests of its own.
    machine.programs -= {"docker"}
    found = {f.check: f.status for f in doctor.examine(machine, asked())}
    assert found["driver"] == "fail"


def test_the_real_probe_says_what_is_missing_without_raising(tmp_path):
    here = probe.HostProbe(tmp_path)
    assert here.run("no-such-program-here").code == probe.NOT_THERE
    assert here.read(str(tmp_path / "absent")) is None
    assert here.list(str(tmp_path / "absent")) == []
    assert not here.exists(str(tmp_path / "absent"))
    below = here.filesystem(str(tmp_path / "absent" / "deeper"))
    assert below is not None and below.device == tmp_path.stat().st_dev
    assert here.run("sh", "-c", "echo out; echo err >&2; exit 3") == probe.Result(
        code=3, out="out\n", err="err\n"
    )


def test_a_program_that_does_not_end_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_PATIENCE", 0.2)
    assert probe.HostProbe(tmp_path).run("sleep", "5").code == probe.TIMED_OUT


def test_a_cdi_specification_in_json_is_read_as_one_in_yaml():
    library = {"hostPath": "/usr/lib/libcuda.so.580.95.05", "containerPath": "/usr/lib/libcuda.so.580.95.05"}
    device = {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
    hook = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook"}
    document = {
        "kind": "nvidia.com/gpu",
        "devices": [device],
        "containerEdits": {"mounts": [library], "hooks": [hook]},
    }
    for text in (json.dumps(document), json.dumps(document, indent=1), json.dumps(document, separators=",:")):
        spec = parse_spec("/etc/cdi/x.json", text)
        assert spec is not None
        assert (spec.devices, spec.nodes) == ({"all"}, ["/dev/nvidia0"])
        assert spec.libraries == ["/usr/lib/libcuda.so.580.95.05"]
    assert parse_spec("/etc/cdi/x.json", json.dumps({**document, "kind": "amd.com/gpu"})) is None


def test_the_fabric_section_ends_where_the_next_begins(host):
    machine = host("h200")
    lines = ["GPU 0", "    Fabric", "        State : In Progress", "    Other", "        Status : Success"]
    machine.commands["nvidia-smi -q"] = {"code": 0, "|": lines, "!": []}
    assert [(s.state, s.status) for s in nvidia.fabric(machine)] == [("In Progress", "")]
