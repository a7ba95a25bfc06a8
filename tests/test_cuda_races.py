"""Threads of a kernel wait for each other wherever they use the same memory."""

from __future__ import annotations

import ctypes
import re
import tempfile
from pathlib import Path

import emulator
import pytest
import races
import torch

from zoneout.ops.cuda.runtime import compiler

if emulator.RACES and __name__ != "__main__":
    pytest.skip("this process is itself checked", allow_module_level=True)
if races.command() is None:
    pytest.skip("there is no ThreadSanitizer", allow_module_level=True)

# Each line marked FREE orders what the threads do: without it there is a race.
KERNELS = {
    "barrier": """
extern "C" __global__ void planted(float *out, u32 *flag) {
    __shared__ float all[64];
    all[threadIdx.x] = (float)threadIdx.x;
    __syncthreads(); // FREE
    out[threadIdx.x] = all[threadIdx.x ^ 32];
}""",
    "warp": """
extern "C" __global__ void planted(float *out, u32 *flag) {
    __shared__ float all[64];
    all[threadIdx.x] = __shfl_xor_sync(~0u, (float)threadIdx.x, 1);
    __shfl_xor_sync(~0u, 1.0f, 1); /* threads meet here, but memory is not ordered */
    __syncwarp(); // FREE
    out[threadIdx.x] = all[threadIdx.x ^ 1];
}""",
    "blocks": """
extern "C" __global__ void planted(float *out, u32 *flag) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        out[0] = 1.0f;
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
        return;
    }
    u32 seen = 0;
    while (!seen) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        __syncwarp();
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory"); // FREE
    out[0] += 1.0f;
}""",
    "grid": """
extern "C" __global__ void planted(float *out, u32 *flag) {
    if (blockIdx.x) return; // FREE
    out[threadIdx.x] = 1.0f;
}""",
}


def load(name: str, free: bool, folder: Path) -> emulator.Kernel:
    """Return a kernel with or without what orders its threads."""
    lines = KERNELS[name].splitlines()
    file = f"{name}-{'free' if free else 'race'}.cu"
    compiler.SOURCES[file] = folder / file
    compiler.SOURCES[file].write_text(
        "\n".join(line for line in lines if free or not line.endswith("// FREE"))
    )
    constants = (("TYPE", 0), ("CELL", 0), ("GATES", 4), ("FAST", 0))
    return emulator.load(0, file, ("planted",), constants)[0]


def launch(kernel: emulator.Kernel, cooperative: bool) -> None:
    """Run two blocks of 64 threads."""
    out, flag = torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    addresses = [ctypes.c_void_p(v.data_ptr()) for v in (out, flag)]
    given = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in addresses))
    kernel.start(2, 1, 64, 1, 0, int(cooperative), ctypes.addressof(given))


def test_planted() -> None:
    """A race in a kernel is not seen, or order between threads is taken for a race."""
    status, said = races.reports_of([__file__])
    assert status == 0
    assert {*re.findall(r"\w+-(?:free|race)\.cu", said)} == {f"{name}-race.cu" for name in KERNELS}


# The kernel whose blocks exchange values. `make test-races` has the others.
CHECKED = "random_cells and emulated and persistent_cell and 4-both-lengths"


def test_no_races() -> None:
    """A kernel reads what another thread may not have written yet."""
    file = str(races.TESTS / "test_cuda_cells.py")
    chosen = ["-q", "-p", "no:cacheprovider", "-n0", "-k", CHECKED, file]
    status, said = races.reports_of(["-m", "pytest", *chosen])
    assert status == 0
    assert not said, said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # ThreadSanitizer finds the lines of libraries that are there at its first report.
        kernels = [
            (name, load(name, free, Path(folder))) for name in KERNELS for free in (True, False)
        ]
        for name, kernel in kernels:
            launch(kernel, cooperative=name == "blocks")
