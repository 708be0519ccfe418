"""A host made of a text file: what commands print, what files hold, which limits there are.

like NAME               start from another host
user UID, cores N, now YYYY-MM-DD, limit NAME BYTES, disk FOLDER DEVICE TOTAL_GB FREE_GB
program NAME            there, but never asked anything
without NAME-or-/path   all commands of a program, or all files that begin so, are gone
$ [CODE] command        `| ` lines: standard output, `! ` lines: standard error
< /path                 `| ` lines: its content
"""

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path

from dsv32_image import engine_discovery as engines
from dsv32_image.doctor.probe import NOT_THERE, Filesystem, Result
from dsv32_image.errors import EngineError

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@dataclass
class FakeHost:
    """A `Probe`. The engine is chosen by the real code, over scripts that print what the file says."""

    bin: Path
    commands: dict = field(default_factory=dict)
    programs: set = field(default_factory=set)
    files: dict = field(default_factory=dict)
    disks: dict = field(default_factory=dict)
    limits: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    engines: dict = field(default_factory=dict)
    answers: dict = field(default_factory=lambda: {"index": "", "mirror": ""})

    def load(self, name):
        body = None
        for line in (FOLDER / f"{name}.txt").read_text().splitlines():
            if line.startswith(("|", "!")):
                body(line[0], line[2:])
                continue
            word, _, rest = line.partition(" ")
            if word == "like":
                self.load(rest)
            elif word == "$":
                body = self._command(rest)
            elif word == "<":
                body = self._file(rest)
            elif word == "without":
                self._without(rest)
            elif word == "program":
                self.programs.add(rest)
            elif word == "limit":
                key, value = rest.split()
                self.limits[key] = None if value == "unlimited" else int(value)
            elif word == "disk":
                path, device, total, free = rest.split()
                sizes = (int(float(gb) * 10**9) for gb in (total, free))
                self.disks[path] = (int(device), *sizes)
            elif word in ("user", "cores", "now"):
                self.facts[word] = rest
            else:
                assert word == "#", f"{name}.txt: {line}"
        return self

    def _command(self, rest):
        code = 0
        if rest.startswith("["):
            code, _, rest = rest[1:].partition("] ")
        said = self.commands[rest] = {"code": int(code), "|": [], "!": []}
        self.programs.add(rest.split()[0])
        return lambda kind, text: said[kind].append(text)

    def _file(self, path):
        lines = self.files[path] = []
        return lambda _kind, text: lines.append(text)

    def _without(self, name):
        if name.startswith("/"):
            self.files = {path: text for path, text in self.files.items() if not path.startswith(name)}
        else:
            self.programs.discard(name)
            self.commands = {c: said for c, said in self.commands.items() if c.split()[0] != name}

    def run(self, *command):
        words = " ".join((Path(command[0]).name, *command[1:]))
        if words.split()[0] not in self.programs:
            return Result(code=NOT_THERE, err=f"{command[0]}: No such file or directory")
        assert words in self.commands, f"the host does not say what this prints: {words}"
        said = self.commands[words]
        out, err = ("".join(f"{line}\n" for line in said[kind]) for kind in "|!")
        return Result(code=said["code"], out=out, err=err)

    def which(self, program):
        return f"/usr/bin/{program}" if program in self.programs else ""

    def read(self, path):
        lines = self.files.get(path)
        return None if lines is None else "".join(f"{line}\n" for line in lines)

    def list(self, path):
        inside = (p.removeprefix(f"{path}/") for p in self.files if p.startswith(f"{path}/"))
        return sorted({p.partition("/")[0] for p in inside})

    def exists(self, path):
        return path in self.files or bool(self.list(path))

    def filesystem(self, path):
        for folder in (path, *map(str, Path(path).parents)):
            if folder in self.disks:
                device, total, free = self.disks[folder]
                return Filesystem(device=device, total=total, free=free)
        return None

    def engine(self, name):
        if name not in self.engines:
            try:
                self.engines[name] = self._choose(name)
            except EngineError as error:
                self.engines[name] = error
        if isinstance(self.engines[name], EngineError):
            raise self.engines[name]
        return self.engines[name]

    def _choose(self, name):
        self.bin.mkdir(exist_ok=True)
        for old in self.bin.iterdir():
            old.unlink()
        for program in self.programs & {"docker", "podman", "buildah", "skopeo"}:
            cases = "".join(self._case(program, command) for command in self.commands)
            path = self.bin / program
            path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 99 ;;\nesac\n')
            path.chmod(0o755)
        before = os.environ["PATH"]
        os.environ["PATH"] = str(self.bin)
        try:
            return engines.choose(name)
        finally:
            os.environ["PATH"] = before

    def _case(self, program, command):
        name, _, words = command.partition(" ")
        if name != program:
            return ""
        said = self.commands[command]
        prints = "".join(f"echo '{line}'\n" for line in said["|"])
        prints += "".join(f"echo '{line.replace(chr(39), '')}' >&2\n" for line in said["!"])
        return f"'{words}')\n{prints}exit {said['code']} ;;\n"

    def limit(self, name):
        return self.limits[name]

    def uid(self):
        return int(self.facts["user"])

    def cores(self):
        return int(self.facts["cores"])

    def now(self):
        day = datetime.datetime.fromisoformat(self.facts["now"]).replace(tzinfo=datetime.UTC)
        return day.timestamp()

    def index(self):
        return self.answers["index"]

    def mirror(self):
        return self.answers["mirror"]
