"""CUDA C++ compiled when it is first needed, with the compiler library that torch brings, and kept on disk.

Nothing is compiled at install and no toolkit has to be there. A compiled kernel is kept under a name made of its
source, its options and the compiler's version, so that a change of any of these builds anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import kept

HERE = Path(__file__).parent
OWN = ("wide.cu",)  # sources with instructions that a chip's architecture alone has, and none after it

_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


def tf32() -> bool:
    """Whether float32 products of recurrent layers may be taken in TF32: torch's setting for nn.LSTM."""
    return _setting.fp32_precision == "tf32"


_setting: Any = torch.backends.cudnn.rnn  # looked up once: that takes longer than reading it


class Chip(NamedTuple):
    """What a plan has to know of a GPU."""

    processors: int
    shared: int  # bytes of shared memory that a block may have
    major: int


@cache
def chip(device: int) -> Chip:
    """The GPU with this number."""
    of = torch.cuda.get_device_properties(device)
    return Chip(of.multi_processor_count, getattr(of, "shared_memory_per_block_optin", 48 * 1024), of.major)


_sharers = [1]  # loops that run side by side on a GPU, as each of those says who is inside of `shared_by`


@contextmanager
def shared_by(loops: int) -> Iterator[None]:
    """While so many loops run side by side on a GPU, each in a stream of its own: each takes its part of the chip."""
    _sharers.append(loops)
    try:
        yield
    finally:
        _sharers.remove(loops)


def processors(device: int) -> int:
    """How many processors of the GPU with this number one loop may fill, if it can do with less than all."""
    return max(1, chip(device).processors // max(_sharers))


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver, for attributes that are numbers."""

    _fields_ = [("id", ctypes.c_int64), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class Launch(ctypes.Structure):
    """`CUlaunchConfig` of the driver."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("blocks_x", "blocks_y", "blocks_z")),
        *((name, ctypes.c_uint) for name in ("threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """One function of a compiled module."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle

    def allow_shared(self, size: int) -> None:
        """Let the kernel have this much shared memory a block."""
        check(driver().cuFuncSetAttribute(self.handle, _MAX_SHARED, size))

    def resident_blocks(self, threads: int, shared: int) -> int:
        """How many blocks fit on the whole device at once."""
        each = ctypes.c_int()
        check(
            driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(each), self.handle, threads, ctypes.c_size_t(shared)
            )
        )
        return each.value * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def fits(self, blocks: int, threads: int, shared: int, cluster: int = 1) -> bool:
        """Whether so many blocks fit on the whole device at once, those of a cluster side by side."""
        if cluster == 1:
            return blocks <= self.resident_blocks(threads, shared)
        if cluster > 8 and driver().cuFuncSetAttribute(self.handle, _LARGE_CLUSTERS, 1):
            return False
        size, count = LaunchAttribute(_CLUSTER, cluster, (ctypes.c_int * 15)(1, 1)), ctypes.c_int()
        how = Launch(blocks, 1, 1, threads, 1, 1, shared, None, ctypes.pointer(size), 1)
        status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self.handle, ctypes.byref(how))
        return not status and blocks <= count.value * cluster

    def launch(
        self,
        blocks: int | tuple[int, int],
        threads: int | tuple[int, int],
        arguments: Any,
        shared: int = 0,
        cooperative: bool = False,
        stream: ctypes.c_void_p | None = None,
    ) -> None:
        """Launch, in torch's current stream if no other is given; `arguments` is what `pack` made."""
        x, y = threads if isinstance(threads, tuple) else (threads, 1)
        across, down = blocks if isinstance(blocks, tuple) else (blocks, 1)
        if stream is None:
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
        if cooperative:
            check(driver().cuLaunchCooperativeKernel(self.handle, across, down, 1, x, y, 1, shared, stream, arguments))
        else:
            check(driver().cuLaunchKernel(self.handle, across, down, 1, x, y, 1, shared, stream, arguments, None))


class Ready(NamedTuple):
    """A loop that is ready to start, in the current stream or a lane beside it."""

    start: Callable[[Any], None]  # with the lane, or None
    fills: bool = False  # whether its blocks wait for each other, and so have to be on the chip together


def pack(values: Sequence[Any]) -> Any:
    """The arguments of a launch, from ctypes values that must outlive it."""
    return _pointers(len(values))(*map(ctypes.addressof, values))


@cache
def _pointers(count: int) -> Any:
    """The type of so many pointers, which ctypes would make anew whenever the last one has been collected."""
    return ctypes.c_void_p * count


@cache
def load(device: int, source: str, names: tuple[str, ...], defines: tuple[tuple[str, int], ...]) -> tuple[Kernel, ...]:
    """The kernels called `names` of a source file, compiled for a device."""
    image = machine_code(torch.cuda.get_device_capability(device), source, defines)
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        check(driver().cuModuleLoadData(ctypes.byref(module), image))
        found = []
        for name in names:
            function = ctypes.c_void_p()
            check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            found.append(Kernel(function))
    return tuple(found)


def machine_code(capability: tuple[int, int], source: str, defines: Sequence[tuple[str, int]]) -> bytes:
    """A source file compiled for a compute capability, from the disk where it is there."""
    return _kept(*program(capability, source, defines))


def program(capability: tuple[int, int], source: str, defines: Sequence[tuple[str, int]]) -> tuple[str, list[str]]:
    """What the compiler is given for a source file: its text and options."""
    text = "".join((HERE / name).read_text() for name in ("common.cuh", source))
    only = "a" if source in OWN else ""
    options = [f"--gpu-architecture=sm_{architecture(capability)}{only}", "--std=c++17"]
    return text, options + [f"--define-macro={name}={value}" for name, value in defines]


@cache
def architecture(capability: tuple[int, int]) -> int:
    """What to compile for: the chip's own number, or the last one before it whose machine code it runs."""
    major, minor = capability
    count = ctypes.c_int()
    _check_nvrtc(compiler().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check_nvrtc(compiler().nvrtcGetSupportedArchs(known))
    fitting = [one for one in known if one // 10 == major and one % 10 <= minor]
    if not fitting:
        version = ".".join(map(str, _version()))
        raise RuntimeError(f"CUDA's run-time compiler {version} knows no GPU of compute capability {major}.{minor}")
    return max(fitting)


def _kept(text: str, options: Sequence[str]) -> bytes:
    """The compiled image, from the disk where it is there."""
    said = "\n".join((text, *options, *map(str, _version())))
    name = f"cuda-{hashlib.sha256(said.encode()).hexdigest()[:24]}"
    if (image := kept.find(name, ".cubin")) is not None:
        return image
    image, _ = compiled(text, options)
    kept.keep(name, ".cubin", image)
    return image


def compiled(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """The machine code of a source and what the compiler said, or an error with that."""
    nvrtc = compiler()
    program = ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"zoneout.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.value.decode()
        if status != 0:
            raise RuntimeError(f"a kernel did not compile with {list(options)}:\n{said}")
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, image))
        return image.raw, said
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


# --- the libraries ---------------------------------------------------------------------------------


class _Thread(threading.local):
    """What is known of a thread."""

    bound = False


_thread = _Thread()


def driver() -> ctypes.CDLL:
    """The driver's library, to be called with torch's current device: a new thread, as autograd has, may have none."""
    if not _thread.bound:
        _bind()
        _thread.bound = True
    return library()


def _bind() -> None:
    """Give the thread a device's context, as the first call of CUDA's runtime would."""
    context, device = ctypes.c_void_p(), torch.cuda.current_device()
    check(library().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(library().cuCtxSetCurrent(context))


@cache
def library() -> ctypes.CDLL:
    """The driver's library."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("the CUDA driver's library was not found (looked for libcuda.so.1)")


@cache
def compiler() -> ctypes.CDLL:
    """The run-time compiler's library, of the CUDA that torch was built for."""
    major = torch.version.cuda.split(".")[0] if torch.version.cuda else "*"
    names = [f"libnvrtc.so.{major}", "libnvrtc.so", f"nvrtc64_{major}0_0.dll"]
    for path in _wheels(names):
        for part in sorted(path.parent.glob("libnvrtc-builtins.so*")):  # it looks for this one by its bare name
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"CUDA's run-time compiler was not found (looked for {', '.join(names)})")


def _wheels(names: Sequence[str]) -> list[Path]:
    """Where the wheels that torch depends on put their libraries."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [Path(where) for where in spec.submodule_search_locations or []]
    folders.append(Path(torch.__file__).parent / "lib")
    return [path for folder in folders for name in names for path in sorted(folder.rglob(name))]


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def check(status: int) -> None:
    """An error where the driver has said that something is wrong."""
    if status != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({status})")


def _check_nvrtc(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA's run-time compiler: error {status}")
