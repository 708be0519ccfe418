"""CUDA C++ kernels, compiled at first use by NVRTC, which torch brings along, and launched through ctypes.

For what Triton cannot say: warp ballots, one barrier per block-wide count. A build step would need nvcc and a
wheel per torch; NVRTC needs a library that is loaded anyway, and one second.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch


class CudaError(RuntimeError):
    """A call to NVRTC or to the driver failed; the message has its code, and the compiler's log."""


@functools.lru_cache(maxsize=1)
def nvrtc() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA, or None where it is not found."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = [str(p) for root in roots for p in sorted(root.glob(f"*/lib/{name}"))]
    for path in (*found, name):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _check(code: int, what: str, log: str = "") -> None:
    if code:
        raise CudaError(f"{what} failed with code {code}. {log}".strip())


def cubin(source: str, arch: str) -> bytes:
    """Machine code of CUDA C++ source for an architecture such as sm_90. Raises CudaError with the log."""
    lib = nvrtc()
    if lib is None:
        raise CudaError("NVRTC (libnvrtc) was not found beside torch nor on the library path.")
    program = ctypes.c_void_p()
    _check(
        lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"dsv32.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
        code = lib.nvrtcCompileProgram(program, len(options), options)
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(1, size.value))
        lib.nvrtcGetProgramLog(program, log)
        _check(code, "compiling a kernel", log.value.decode(errors="replace"))
        _check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        out = ctypes.create_string_buffer(size.value)
        _check(lib.nvrtcGetCUBIN(program, out), "nvrtcGetCUBIN")
        return out.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def function(source: str, name: str, device: int) -> ctypes.c_void_p:
    """The kernel `name` of `source`, loaded on a device whose context is current on this thread."""
    major, minor = torch.cuda.get_device_capability(device)
    code = cubin(source, f"sm_{major}{minor}")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
    _check(
        _driver().cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()),
        f"cuModuleGetFunction {name}",
    )
    return kernel


Argument = ctypes.c_void_p | ctypes.c_int | ctypes.c_longlong


def launch(
    source: str, name: str, blocks: int, threads: int, device: torch.device, *arguments: Argument
) -> None:
    """Launch kernel `name` on torch's current stream; the arguments are ctypes values in its order."""
    with torch.cuda.device(device):
        kernel = function(source, name, torch.cuda.current_device())
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        _check(
            _driver().cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None),
            f"launching {name}",
        )
