"""Compile CUDA C++ at first use with torch's NVRTC library, and cache the result on disk.

Nothing is compiled at install time, and no CUDA toolkit is needed. The cache key is a hash of the
source, the options and the compiler's version, so a change of any of these compiles again.
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

from ... import build_cache, recording

CUDA = Path(__file__).parents[1]
COMMON = CUDA / "kernels" / "common.cuh"  # prepended to every source
# Path of each source by file name; other modules may add their own.
SOURCES = {path.name: path for path in CUDA.glob("*/*.cu")}
# Headers that are prepended to some sources, after COMMON. The text of a cell's step, made by
# definition/cuda.py, takes the place of the line STEP in unit.cuh.
HEADERS = {
    "steps.cu": ("units.cuh",),
    "cell_steps.cu": ("units.cuh", "unit.cuh"),
    "diagonal.cu": ("units.cuh", "unit.cuh"),
    "small.cu": ("block.cuh",),
    "small_cell.cu": ("unit.cuh", "block.cuh"),
    "persistent.cu": ("exchange.cuh",),
    "persistent_cell.cu": ("unit.cuh", "exchange.cuh"),
    "weight_noise.cu": ("normal.cuh",),
    "normals.cu": ("normal.cuh",),
}
STEP = "/* The functions of the cell's step stand here. */\n"
# Sources with architecture-specific instructions, which later architectures do not have.
ARCHITECTURE_SPECIFIC = ("warpgroup.cu",)

_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def add_source(path: Path) -> str:
    """Add a file of kernels that lies elsewhere; return the name that `load` knows it by."""
    SOURCES[path.name] = path
    return path.name


def tf32() -> bool:
    """Return True if float32 products of recurrent layers may use TF32: torch's nn.LSTM setting."""
    return _setting.fp32_precision == "tf32"


_setting: Any = torch.backends.cudnn.rnn  # looked up once: the lookup is slower than the read


class Chip(NamedTuple):
    """The properties of a GPU that kernel plans depend on."""

    processors: int  # streaming multiprocessors
    shared: int  # maximum shared memory of a block, bytes
    major: int  # compute capability


@cache
def chip(device: int) -> Chip:
    """Return the properties of the GPU with this index."""
    of = torch.cuda.get_device_properties(device)
    return Chip(
        of.multi_processor_count, getattr(of, "shared_memory_per_block_optin", 48 * 1024), of.major
    )


# The number of concurrent loops on a GPU, one entry for each active `shared_by` block.
_sharers = [1]


@contextmanager
def shared_by(loops: int) -> Iterator[None]:
    """Let each of `loops` concurrent loops use only its share of the chip inside the `with` block.

    Each of these loops runs on its own stream of one GPU.
    """
    _sharers.append(loops)
    try:
        yield
    finally:
        _sharers.remove(loops)


def sharers() -> int:
    """Return the number of concurrent loops that share a GPU."""
    return max(_sharers)


def processors(device: int) -> int:
    """Return the number of multiprocessors that one loop may fill, if it does not need all."""
    return max(1, chip(device).processors // sharers())


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver, for integer attributes."""

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
        """Set the maximum dynamic shared memory of a block, in bytes."""
        check(driver().cuFuncSetAttribute(self.handle, _MAX_SHARED, size))

    def resident_blocks(self, threads: int, shared: int) -> int:
        """Return the number of blocks that fit on the whole device at once."""
        each = ctypes.c_int()
        check(
            driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(each), self.handle, threads, ctypes.c_size_t(shared)
            )
        )
        return (
            each.value
            * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        )

    def fits(self, blocks: int, threads: int, shared: int, cluster: int = 1) -> bool:
        """Return True if all blocks fit on the device at once, in clusters of `cluster` blocks."""
        if cluster == 1:
            return blocks <= self.resident_blocks(threads, shared)
        if cluster > 8 and driver().cuFuncSetAttribute(self.handle, _LARGE_CLUSTERS, 1):
            return False
        size, count = LaunchAttribute(_CLUSTER, cluster, (ctypes.c_int * 15)(1, 1)), ctypes.c_int()
        how = Launch(blocks, 1, 1, threads, 1, 1, shared, None, ctypes.pointer(size), 1)
        status = driver().cuOccupancyMaxActiveClusters(
            ctypes.byref(count), self.handle, ctypes.byref(how)
        )
        return not status and blocks <= count.value * cluster

    def launch(
        self,
        blocks: int | tuple[int, int],
        threads: int | tuple[int, int],
        values: Sequence[Any],
        shared: int = 0,
        cooperative: bool = False,
        stream: ctypes.c_void_p | None = None,
    ) -> None:
        """Launch the kernel with ctypes values on a stream, by default torch's current one."""
        x, y = threads if isinstance(threads, tuple) else (threads, 1)
        across, down = blocks if isinstance(blocks, tuple) else (blocks, 1)
        how, pointers = (across, down, x, y, shared, cooperative), pointers_to(values)
        recording.launch(self.start, how, values, ctypes.addressof(pointers), stream)

    def start(
        self, across: int, down: int, x: int, y: int, shared: int, cooperative: int, pointers: int,
        stream: ctypes.c_void_p | int | None = None,
    ) -> None:  # fmt: skip
        """Launch the kernel with the addresses of its arguments, which begin at `pointers`."""
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        grid = (self.handle, across, down, 1, x, y, 1, shared, stream, pointers)
        if cooperative:
            check(driver().cuLaunchCooperativeKernel(*grid))
        else:
            check(driver().cuLaunchKernel(*grid, None))


class Ready(NamedTuple):
    """A loop that is ready to start on the current stream or on a side stream."""

    start: Callable[[Any], None]  # called with the side stream, or None for the current one
    # True if the blocks wait for each other, so all of them must be on the chip at once.
    fills_chip: bool = False


def pointers_to(values: Sequence[Any]) -> Any:
    """Return an array of pointers to ctypes values, which must outlive it."""
    return _pointers(len(values))(*map(ctypes.addressof, values))


def at_each_step(
    kernel: Kernel,
    blocks: tuple[int, int],
    threads: tuple[int, int],
    before: tuple[Any, ...],
    after: tuple[Any, ...] = (),
    stream: int = 0,
) -> Callable[[int], None]:
    """Return a prepared launch of a kernel as a function of the step.

    The kernel's arguments are `before`, the step, then `after`. Their values may change later, but
    their addresses must not.
    """
    if recording.is_recording():
        return lambda t: kernel.launch(blocks, threads, (*before, ctypes.c_int(t), *after))
    config, step = Launch(*blocks, 1, *threads, 1, 0, stream), ctypes.c_int()
    values = (*before, step, *after)
    call, at, pointers = driver().cuLaunchKernelEx, ctypes.byref(config), pointers_to(values)

    def launch(t: int, alive: Any = values) -> None:
        step.value = t
        if status := call(at, kernel.handle, pointers, None):
            raise RuntimeError(f"CUDA: error {status} at a launch of step {t}")

    return launch


@cache
def _pointers(count: int) -> Any:
    """Return the ctypes array type of `count` pointers.

    Without the cache, ctypes would build the type again each time it has been garbage-collected.
    """
    return ctypes.c_void_p * count


def capture_of(stream: int) -> int:
    """Return the number of the capture that a stream is part of; 0 if the driver does not say."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = getattr(driver(), "cuStreamGetCaptureInfo_v2", None)
    if ask is None:
        return 0
    at = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)
    check(ask(*at, None, None, None))
    return number.value


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow driver calls that would end a capture of the current stream, such as a first load."""
    mode = ctypes.c_int(_RELAXED)
    check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        yield
    finally:
        check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))


@cache
def load(
    device: int,
    source: str,
    names: tuple[str, ...],
    defines: tuple[tuple[str, int], ...],
    step: str = "",
) -> tuple[Kernel, ...]:
    """Return the kernels `names` of a source file, compiled for a device.

    `step`: the text of a cell's step, for sources that run any cell.
    """
    image = machine_code(torch.cuda.get_device_capability(device), source, defines, step)
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        with relaxed_capture():
            check(driver().cuModuleLoadData(ctypes.byref(module), image))
        kernels = []
        for name in names:
            function = ctypes.c_void_p()
            check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            kernels.append(Kernel(function))
    return tuple(kernels)


def machine_code(
    capability: tuple[int, int], source: str, defines: Sequence[tuple[str, int]], step: str = ""
) -> bytes:
    """Return a source file compiled for a compute capability, from the disk cache if present."""
    return _cached(*program(capability, source, defines, step))


def program(
    capability: tuple[int, int], source: str, defines: Sequence[tuple[str, int]], step: str = ""
) -> tuple[str, list[str]]:
    """Return the compiler's input for a source file: the source text and the options."""
    files = [COMMON, *(COMMON.with_name(name) for name in HEADERS.get(source, ()))]
    text = "".join(path.read_text() for path in (*files, SOURCES[source])).replace(STEP, step)
    suffix = "a" if source in ARCHITECTURE_SPECIFIC else ""
    options = [f"--gpu-architecture=sm_{architecture(capability)}{suffix}", "--std=c++17"]
    return text, options + [f"--define-macro={name}={value}" for name, value in defines]


@cache
def architecture(capability: tuple[int, int]) -> int:
    """Return the architecture to compile for, as NVRTC numbers it.

    This is the chip's own, or else the latest earlier one whose machine code the chip runs. Raise
    if NVRTC supports neither.
    """
    major, minor = capability
    count = ctypes.c_int()
    _check_nvrtc(compiler().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    supported = (ctypes.c_int * count.value)()
    _check_nvrtc(compiler().nvrtcGetSupportedArchs(supported))
    usable = [number for number in supported if number // 10 == major and number % 10 <= minor]
    if not usable:
        version = ".".join(map(str, _version()))
        raise RuntimeError(
            f"CUDA's run-time compiler {version} knows no GPU of compute capability {major}.{minor}"
        )
    return max(usable)


def _cached(text: str, options: Sequence[str]) -> bytes:
    """Return the compiled image, from the disk cache if present."""
    key = "\n".join((text, *options, *map(str, _version())))
    name = f"cuda-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    if (image := build_cache.find(name, ".cubin")) is not None:
        return image
    image, _ = compiled(text, options)
    build_cache.keep(name, ".cubin", image)
    return image


def compiled(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Compile a source: return the machine code and the compiler's log, or raise with the log."""
    nvrtc = compiler()
    program = ctypes.c_void_p()
    _check_nvrtc(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"zoneout.cu", 0, None, None)
    )
    try:
        option_array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), option_array)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.value.decode()
        if status != 0:
            raise RuntimeError(f"a kernel did not compile with {list(options)}:\n{log}")
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, image))
        return image.raw, log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


# --- the libraries ---


class _Thread(threading.local):
    """State of one thread."""

    bound = False  # True once the thread has a CUDA context


_thread = _Thread()


def driver() -> ctypes.CDLL:
    """Return the driver's library, after giving this thread a CUDA context if it has none.

    A new thread, such as one of autograd's, may have none. The context is torch's current device's.
    """
    if not _thread.bound:
        _bind()
        _thread.bound = True
    return library()


def _bind() -> None:
    """Set the thread's context if it has none, as the first call of the CUDA runtime would."""
    context, device = ctypes.c_void_p(), torch.cuda.current_device()
    check(library().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(library().cuCtxSetCurrent(context))


@cache
def library() -> ctypes.CDLL:
    """Load the driver's library."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver_library = ctypes.CDLL(name)
        except OSError:
            continue
        pointer, sizes = ctypes.c_void_p, [ctypes.c_uint] * 7
        driver_library.cuLaunchKernel.argtypes = [pointer, *sizes, pointer, pointer, pointer]
        driver_library.cuLaunchCooperativeKernel.argtypes = [pointer, *sizes, pointer, pointer]
        return driver_library
    raise RuntimeError("the CUDA driver's library was not found (looked for libcuda.so.1)")


@cache
def compiler() -> ctypes.CDLL:
    """Load the run-time compiler (NVRTC) of the CUDA version that torch was built for."""
    major = torch.version.cuda.split(".")[0] if torch.version.cuda else "*"
    names = [f"libnvrtc.so.{major}", "libnvrtc.so", f"nvrtc64_{major}0_0.dll"]
    for path in _wheels(names):
        # NVRTC loads this library by its bare name.
        for part in sorted(path.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"CUDA's run-time compiler was not found (looked for {', '.join(names)})")


def _wheels(names: Sequence[str]) -> list[Path]:
    """Return the paths of libraries with these names in the wheels that torch depends on."""
    spec = importlib.util.find_spec("nvidia")
    folders = (
        [] if spec is None else [Path(where) for where in spec.submodule_search_locations or []]
    )
    folders.append(Path(torch.__file__).parent / "lib")
    return [path for folder in folders for name in names for path in sorted(folder.rglob(name))]


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def check(status: int) -> None:
    """Raise if a status code of the driver is an error."""
    if status != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({status})")


def _check_nvrtc(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA's run-time compiler: error {status}")
