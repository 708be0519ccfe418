"""The command line behind the nox sessions: `python -m dsv32_image STEP`."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv32_image import build as build_step
from dsv32_image import doctor as doctor_step
from dsv32_image import engine_discovery as engines
from dsv32_image import git_pin, patch_cli, resolve_wheels
from dsv32_image import lock as lock_step
from dsv32_image import prove as prove_step
from dsv32_image.bench import bench_build
from dsv32_image.config import ARCH, Config, VariantConfig, load_config
from dsv32_image.errors import FileAccessError, ImageError, UsageError
from dsv32_image.fetch_step import bring
from dsv32_image.files import disk_full_is_clear
from dsv32_image.identity import image_tag
from dsv32_image.layers import LayerCache, dockerfile_name
from dsv32_image.lockfile import Dist, read_lock, stale_rows
from dsv32_image.smoke_step import DRIVER, require_image, run_smoke
from dsv32_image.stages import BuildRequest, ContextRequest
from dsv32_image.store import Store, cache_home
from dsv32_image.ui import Ui, show_error, show_usage_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsv32_image.store import Locked

_STOPPED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reproducible container build for training DeepSeek-V3.2 on Megatron-Core.",
)

app.add_typer(patch_cli.app, name="patch")

VariantOption = Annotated[
    str | None,
    typer.Option("--variant", help="cpu or cu130; default: cu130 where an NVIDIA driver answers, else cpu"),
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="docker, podman or buildah; default: the first that answers")
]
ArchOption = Annotated[
    list[str] | None,
    typer.Option("--arch", help="Compute capability to compile for, e.g. 9.0; repeat it for several."),
]
MegatronOption = Annotated[
    str | None,
    typer.Option(
        "--megatron",
        metavar="git+URL@REF|VERSION",
        help="Build megatron-core from this commit (a tag or branch is looked up once), or take a release.",
    ),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Take every file from the store, or fail.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="More lines, and a traceback with an error.")]


def project_root() -> Path:
    """The folder with pyproject.toml: $DSV32_ROOT (set by nox), else the current one."""
    return Path(os.environ.get("DSV32_ROOT", ".")).resolve()


@app.callback()
def prepare(context: typer.Context) -> None:
    """Reproducible container build for training DeepSeek-V3.2 on Megatron-Core."""
    root = project_root()

    def find_source(package: str) -> Path:
        return locked_source(root, package)

    context.obj = patch_cli.Workspace(
        patches=root / "patches",
        work=root / "work",
        find_source=find_source,
        is_commit=lambda package: package in read_lock(root).git,
        commit_source=lambda asked: git_pin.commit_source(load_config(root), asked, Store(cache_home())),
    )


def locked_source(root: Path, package: str) -> Path:
    """The locked wheel or sdist of a package, fetched if the store lacks it.

    Raises:
        UsageError: Nothing of that name is locked.
    """
    for item in read_lock(root).files():
        if isinstance(item, Dist) and item.name == package:
            store = Store(cache_home())
            store.drop_damaged([item])
            bring([item], load_config(root), store, Ui(), offline=False)
            return store.path(item.sha256)
    raise UsageError(
        f"versions.lock has no Python package '{package}'", hint="patches/ lists those with a series"
    )


@app.command()
def lock(
    upgrade: Annotated[
        list[str] | None,
        typer.Argument(help="With --upgrade: only these packages move.", metavar="[NAME]..."),
    ] = None,
    *,
    upgrade_all: Annotated[
        bool, typer.Option("--upgrade", help="Let versions move: all of them, or the NAMEs given.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether versions.lock is stale; exit code 1 if so.")
    ] = False,
    megatron: MegatronOption = None,
    host: Annotated[
        bool, typer.Option("--host", help="The host's own tools instead: requirements/host.txt.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Resolve pyproject.toml to versions.lock: every deb, wheel, source and patch series by sha256."""
    root, ui = project_root(), Ui(verbose=verbose)
    if host:
        resolve_wheels.compile_host(root, upgrade=upgrade_all)
        ui.say("   lock  wrote requirements/host.txt; the next session makes .venv anew if it changed")
        return
    config = load_config(root)
    if check:
        if upgrade or upgrade_all:
            raise UsageError(
                "--check only looks, and --upgrade moves versions", hint="nox -s lock -- --upgrade [NAME]..."
            )
        rows = stale_rows(read_lock(root), config, lock_step.patch_series(root))
        if megatron is not None:
            rows += git_pin.moved_rows(read_lock(root), megatron, cache_home())
        if rows:
            ui.table("versions.lock is stale", ("input", "locked", "now"), rows, out=True)
            raise typer.Exit(1)
        print("versions.lock is up to date")
        return
    names = list(upgrade or [])
    if names and not upgrade_all:
        raise UsageError("names alone move nothing", hint=f"nox -s lock -- --upgrade {' '.join(names)}")
    moving = names if upgrade_all else None
    if megatron is not None:
        git_pin.lock_megatron(root, megatron, ui, upgrade=moving, store=Store(cache_home()))
        return
    lock_step.make_lock(root, config, ui, upgrade=moving, store=Store(cache_home()))


@app.command()
def fetch(
    *, variant: VariantOption = None, offline: OfflineOption = False, verbose: VerboseOption = False
) -> None:
    """Bring every locked file into the store, checked while it streams."""
    root, ui = project_root(), Ui(verbose=verbose)
    config = load_config(root)
    name = _variant(config, variant, ui)
    files, store = list(read_lock(root).files(name)), Store(cache_home())
    for file in store.drop_damaged(files):
        ui.say(f"  fetch  {file} in the store was damaged; removed")
    bring(files, config, store, ui, offline=offline)


@app.command()
def build(
    *,
    variant: VariantOption = None,
    engine: EngineOption = None,
    offline: OfflineOption = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Make every layer anew; only the store is used.")
    ] = False,
    recompile: Annotated[
        bool, typer.Option("--recompile", help="Compile wheels anew, and fail if their bytes change.")
    ] = False,
    arch: ArchOption = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, help="Compilers at once; 0: as processors and memory allow.")
    ] = 0,
    verbose: VerboseOption = False,
) -> None:
    """Build the image, write it to dist/ and load it into the engine; prints its digest last."""
    root, ui = project_root(), Ui(verbose=verbose)
    config = load_config(root)
    name = _variant(config, variant, ui)
    plain = _context_request(root, config, name, ui, offline=offline, archs=arch)
    request = BuildRequest(
        **vars(plain),
        engine=engines.choose(engine, ui.say),
        fresh=no_cache or recompile,
        recompile=recompile,
        jobs=jobs,
    )
    digest = build_step.build(request, ui)
    ui.say(f"  image  {image_tag(name)} in {request.engine.name}; OCI layout: dist/{name}")
    print(digest.manifest)


@app.command()
def context(
    *, variant: VariantOption = None, offline: OfflineOption = False, verbose: VerboseOption = False
) -> None:
    """Lay out the build context for an engine of your own, root file system included."""
    root, ui = project_root(), Ui(verbose=verbose)
    config = load_config(root)
    name = _variant(config, variant, ui)

    folder = build_step.full_context(_context_request(root, config, name, ui, offline=offline), ui)
    words = f"DOCKER_BUILDKIT=1 docker build --network none --tag {image_tag(name)}"
    words += f" --file docker/{dockerfile_name(name)}"
    print(f"cd {shlex.quote(str(root))} && {words} {folder.relative_to(root)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def smoke(
    arguments: typer.Context,
    *,
    variant: VariantOption = None,
    engine: EngineOption = None,
    gpus: Annotated[
        bool | None,
        typer.Option("--gpus/--no-gpus", help="Give the container the GPUs; default: if there are any."),
    ] = None,
    no_container: Annotated[
        bool, typer.Option("--no-container", help="Run the suite in this machine's python3 instead.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Run the smoke suite inside the built image; a table and smoke-report.json. Extra words go to pytest."""
    root, ui = project_root(), Ui(verbose=verbose)
    config = load_config(root)
    name = _variant(config, variant, ui)
    runner = None if no_container else engines.choose(engine, ui.say)
    if runner and not build_step.is_current(root, config, config.variant(name)):
        ui.say(
            "  smoke  not the image that `nox -s build` gives now: files changed, or it was built with --arch"
        )
    code = run_smoke(
        root, name, runner, arguments.args, ui, gpus=gpus if config.variant(name).cuda_archs else False
    )
    if code:
        raise typer.Exit(code)


@patch_cli.app.command("prove")
def prove(
    packages: Annotated[
        list[str] | None, typer.Argument(help="Folders under patches/; all by default.")
    ] = None,
    *,
    variant: VariantOption = None,
    engine: EngineOption = None,
    no_container: Annotated[
        bool, typer.Option("--no-container", help="Run the tests in --python instead of the image.")
    ] = False,
    python: Annotated[
        str, typer.Option(help="With --no-container: a Python that has torch and the packages.")
    ] = sys.executable,
    jobs: Annotated[int, typer.Option(min=1, help="Test runs at once.")] = min(4, os.cpu_count() or 1),
    verbose: VerboseOption = False,
) -> None:
    """Take each patch out in turn and run the tests its header names; exit 1 when one passes without it."""
    root, ui = project_root(), Ui(verbose=verbose)
    prove_step.require_series(root, packages or [])
    absent: set[str] = set()
    if no_container:
        run = prove_step.run_in_python(python)
    else:
        name, runner = _variant(load_config(root), variant, ui), engines.choose(engine)
        require_image(image_tag(name), name, runner)
        run = prove_step.run_in_image(runner, image_tag(name))
        lock = read_lock(root)
        absent = set(lock.patches) - {dist.name for layer in lock.variant(name) for dist in layer.wheels}
    with ui.step("prove", "the tests of each patch, with and without it"):
        rows = prove_step.prove(
            root,
            packages or [],
            lambda item: locked_source(root, item),
            run,
            jobs=jobs,
            absent=absent,
        )
    prove_step.show(rows, ui)
    if any(row.answer == "no" for row in rows):
        raise typer.Exit(1)


@app.command()
def doctor(
    *,
    variant: Annotated[
        str | None,
        typer.Option("--variant", help="cpu or cu130; default: cu130 where there is an NVIDIA GPU, else cpu"),
    ] = None,
    engine: EngineOption = None,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="Only what building needs, which is no GPU.")
    ] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Also ask the package index and the Debian mirror.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, no table.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Check what this host needs to build and to run the image; each line with the fix."""
    root, ui = project_root(), Ui(verbose=verbose)
    probe = doctor_step.HostProbe(root)
    asked = doctor_step.Asked(
        variant=doctor_step.choose_variant(probe, variant),
        root=root,
        cache=cache_home(),
        engine=engine,
        network=network,
        build_only=build_only,
    )
    findings = doctor_step.examine(probe, asked)
    doctor_step.report(findings, asked, ui, as_json=as_json)
    doctor_step.require_fit(findings, asked)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="What to measure: build.")] = "build",
    *,
    variant: VariantOption = None,
    engine: EngineOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure cold, warm and one-patch builds beside the bare minimum, in one run."""
    if what != "build":
        raise UsageError(f"nothing called '{what}' can be measured", hint="nox -s bench -- build")
    root, ui = project_root(), Ui(verbose=verbose)
    config = load_config(root)
    name = _variant(config, variant, ui)
    bench_build(root, config, config.variant(name), engines.choose(engine, ui.say), Store(cache_home()), ui)


@app.command()
def clean(
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the store and the finished layers.")
    ] = False,
) -> None:
    """Remove build/ and dist/; with --all also what is cached for all checkouts."""
    ui = Ui()
    for path in build_step.clean(project_root(), cache_home(), everything=everything):
        ui.say(f"  clean  {path}")


def _context_request(
    root: Path, config: Config, name: str, ui: Ui, *, offline: bool, archs: Sequence[str] | None = None
) -> ContextRequest:
    store = Store(cache_home())
    variant = config.variant(name)
    if archs:
        variant = _for_archs(variant, archs)

    def fetcher(items: Sequence[Locked]) -> None:
        bring(items, config, store, ui, offline=offline)

    cache = LayerCache(cache_home())
    return ContextRequest(root=root, config=config, variant=variant, store=store, cache=cache, fetch=fetcher)


def _for_archs(variant: VariantConfig, archs: Sequence[str]) -> VariantConfig:
    if not variant.cuda_archs:
        raise UsageError(f"variant '{variant.name}' compiles nothing for a GPU", hint="leave out --arch")
    for arch in archs:
        if not ARCH.fullmatch(arch):
            raise UsageError(
                f"'{arch}' is no compute capability", hint="--arch 9.0 is Hopper, 10.0 Blackwell"
            )
    return replace(variant, cuda_archs=tuple(sorted(set(archs), key=float)))


def _variant(config: Config, asked: str | None, ui: Ui) -> str:
    """The variant asked for, else what fits this machine; said in one line."""
    if asked is not None:
        return config.variant(asked).name
    gpu = DRIVER.exists()
    name, why = ("cu130", "an NVIDIA driver answers") if gpu else ("cpu", "no NVIDIA driver here")
    ui.say(f"variant  {name} ({why}; --variant decides)")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the only place where errors become messages and exit codes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "--verbose" in words
    try:
        with disk_full_is_clear(cache_home()):
            code = app(words, standalone_mode=False)
        if code == _STOPPED:  # what Typer makes of Ctrl-C
            print("stopped; what was finished stays, run it again to go on", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except ImageError as error:
        if verbose:
            raise
        show_error(error.message, error.hint)
        return error.exit_code
    except OSError as error:
        if verbose or error.filename is None:
            raise
        hint = "check owner and permissions; DSV32_CACHE names another cache"
        show_error(f"{error.filename}: {error.strerror}", hint)
        return FileAccessError.exit_code
    except KeyboardInterrupt:  # outside of what Typer runs
        return _STOPPED
    except Exception as error:
        if not hasattr(error, "format_message"):  # Typer keeps the class of its usage errors for itself
            raise
        show_usage_error(error)
        return UsageError.exit_code
