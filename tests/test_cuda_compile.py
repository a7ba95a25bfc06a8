"""Every kernel is compiled for the H200 at the paper's shapes, with no GPU: it compiles, and
fits on the chip.
"""

import re

import pytest
import torch
from products import authors_gru, cornn
from test_cuda_cells import SIZES, fitting_cell, ind_rnn, min_gru, peephole

from zoneout import cells
from zoneout.definition.cuda import print_unit
from zoneout.ops.cuda.kernels import any_cell, batch, diagonal, persistent, small, steps, warpgroup
from zoneout.ops.cuda.pointwise import norms, rows
from zoneout.ops.cuda.runtime import compiler
from zoneout.ops.cuda.runtime.arguments import (
    ALL_FEATURES,
    CELLS,
    TYPES,
    common_defines,
    mode_defines,
)
from zoneout.paper.training import optimizer_kernel as optimizer

HOPPER, PROCESSORS, SHARED = (9, 0), 132, 232448
SHAPES = {
    "char-PTB": (32, 1000),
    "word-PTB": (20, 1500),
    "pMNIST": (100, 100),
    "speech": (64, 1024),
    "512": (64, 512),
}


def setup_module() -> None:
    try:
        compiler.compiler()
    except RuntimeError as error:
        pytest.skip(f"{error}; pip install nvidia-cuda-nvrtc brings it")


def build(source, defines, capability=HOPPER, step=""):
    """What the assembler says of a source's kernels: registers, bytes spilled, bytes of shared
    memory.
    """
    text, options = compiler.program(capability, source, defines, step)
    image, said = compiler.compiled(text, [*options, "--ptxas-options=-v"])
    assert "Potential Performance Loss" not in said, (
        said
    )  # products of warpgroups one after another
    assert image[:4] == b"\x7fELF"
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert registers and len(registers) == len(spilled)
    return registers, spilled


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "everything"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_steps(cell, dtype, plain):
    """A kernel of the path step by step does not compile, or needs more registers than a thread
    has.
    """
    vector = (
        4 if dtype == torch.bfloat16 else 1
    )  # units of a thread, where they are aligned and where not
    _, spilled = build("steps.cu", steps.defines_of(cell, dtype, vector, plain))
    assert max(spilled) == 0


@pytest.mark.parametrize("modes", [None, (1, 1)], ids=str)
@pytest.mark.parametrize("block", [512, 1024])
@pytest.mark.parametrize("vector", [4, 1])
@pytest.mark.parametrize("cell", CELLS[:3])
def test_steps_in_half(cell, vector, block, modes, monkeypatch):
    """A kernel for products in half precision does not compile, or a block has not the registers
    for its threads.
    """
    monkeypatch.setattr(steps, "tf32", lambda: True)
    defines = steps.defines_of(cell, torch.float32, vector, True, block, modes, modes is not None)
    registers, spilled = build("steps.cu", defines)
    assert len(registers) == (1 if cell == cells.rnn_tanh else 2)
    assert max(spilled) <= (
        0 if block == 512 else 20 if modes is None else 8
    )  # with more than 2,048 units
    assert cell == cells.rnn_tanh or min(registers) <= 2**16 // block


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", [0, 1, 2], ids=["plain", "layer norm", "running statistics"])
def test_small(norm, dtype, back):
    """The paper's pMNIST model no longer fits in one block, or spills what it reads at every
    step.
    """
    tiles = small.plan(
        cells.lstm, 2 if dtype == torch.bfloat16 else 4, 100, 100, back, PROCESSORS, SHARED, norm
    )
    assert tiles is not None and tiles.shared <= SHARED
    _, spilled = build(
        "small.cu", small.defines_of(cells.lstm, dtype, back, tiles, 0, mode_defines((1, 1)))
    )
    assert max(spilled) <= 256  # bytes: TF32 has twice the weights


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", [cells.gru, cells.rnn_tanh])
def test_other_cells(cell, dtype, back):
    """The weights of another cell no longer fit at the sizes of the character model and of
    pMNIST, or are spilled.
    """
    tiles = small.plan(cell, dtype.itemsize, 100, 100, back, PROCESSORS, SHARED)
    assert tiles is not None and tiles.shared <= SHARED
    _, spilled = build(
        "small.cu", small.defines_of(cell, dtype, back, tiles, 0, mode_defines((1, 1)))
    )
    assert max(spilled) <= 288  # bytes: a GRU's way back in TF32
    batch, hidden = SHAPES["char-PTB"]
    large = persistent.plan(cell, dtype, hidden, batch, back, PROCESSORS, SHARED)
    assert (
        large is not None
        and large.blocks * large.groups <= PROCESSORS
        and large.layout.shared <= SHARED
    )
    _, spilled = build("persistent.cu", persistent.defines_of(cell, dtype, back, large, 0))
    assert max(spilled) <= 256


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_batch(dtype, back):
    """The paper's pMNIST model with batch norm no longer fits in one cluster, or spills what it
    reads at every step.
    """
    tiles = batch.plan(
        cells.lstm, 2 if dtype == torch.bfloat16 else 4, 100, 100, back, True, SHARED
    )
    assert tiles is not None and tiles.blocks <= batch.MOST_BLOCKS and tiles.shared <= SHARED
    _, spilled = build(
        "batch.cu", batch.defines_of(cells.lstm, dtype, back, tiles, True, 0, (1, 1))
    )
    assert max(spilled) == 0


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("hidden", [37, 200])
@pytest.mark.parametrize("cell", CELLS)
def test_batch_with_everything(cell, hidden, back):
    """The kernel for every noise, lengths, resets and directions does not compile for some cell
    or number of parts.
    """
    tiles = batch.plan(cell, 2, hidden, 40, back, False, SHARED)
    assert tiles is not None and tiles.unit_groups == (1 if hidden <= 128 else 2)
    defines = batch.defines_of(
        cell, torch.float16, back, tiles, hidden % 2 == 0, ALL_FEATURES, None
    )
    _, spilled = build("batch.cu", defines)
    assert max(spilled) <= 256


def test_batch_knows_its_limits():
    """A batch or a hidden size is taken that a cluster does not have the threads, blocks or
    memory for.
    """
    for size in (2, 4):
        for back in (False, True):
            assert batch.plan(cells.lstm, size, 129, 65, back, True, SHARED) is None
            assert batch.plan(cells.lstm, size, 100, 129, back, True, SHARED) is None
            assert batch.plan(cells.lstm, size, 257, 1, back, True, SHARED) is None
            assert batch.plan(cells.lstm, size, 128, 128, back, False, SHARED) is not None


@pytest.mark.parametrize("source", ["dropout.cu", "weight_noise.cu"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_dropout_and_weight_noise(dtype, source):
    """What drops units and weights, or adds noise to weights, does not compile."""
    build(source, common_defines(None, dtype))


# Published cells, the built-in ones, and the largest random one.
OWN = [peephole, cells.lstm, cells.gru, fitting_cell(5, *SIZES[5][:3])]
UNITWISE = [min_gru, ind_rnn, fitting_cell(9, *SIZES[9][:3])]


@pytest.mark.parametrize("vector", [4, 1])
@pytest.mark.parametrize("variant", ["zoneout", "all", "given"])
@pytest.mark.parametrize("cell", OWN, ids=lambda cell: cell.name)
def test_steps_of_any_cell(cell, variant, vector):
    """A generated step does not compile, or needs more registers than a thread has."""
    dtype = torch.bfloat16 if vector == 4 else torch.float32
    defines, step = any_cell.defines_of(dtype, vector), print_unit(cell, variant)
    defines += (("GIVEN_MASKS", int(variant == "given")),)
    registers, spilled = build("cell_steps.cu", defines, step=step)
    assert len(registers) == 4 and max(spilled) == 0


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["char-PTB", "speech", "512"])
def test_persistent_of_any_cell(shape, dtype, back):
    """The weights of a paper's shape no longer fit beside a generated step."""
    batch, hidden = SHAPES[shape]
    tiles = persistent.plan(peephole, dtype, hidden, batch, back, PROCESSORS, SHARED)
    assert tiles is not None
    defines = persistent.defines_of(peephole, dtype, back, tiles, 0)
    _, spilled = build("persistent_cell.cu", defines, step=print_unit(peephole, "zoneout"))
    assert max(spilled) <= 256


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("features", [0, ALL_FEATURES], ids=["plain", "everything"])
def test_small_of_any_cell(features, dtype, back):
    """The weights of pMNIST's shape no longer fit beside a generated step."""
    tiles = small.plan(peephole, dtype.itemsize, 100, 100, back, PROCESSORS, SHARED)
    assert tiles is not None
    defines = small.defines_of(peephole, dtype, back, tiles, features)
    step = print_unit(peephole, "all" if features else "zoneout")
    _, spilled = build("small_cell.cu", defines, step=step)
    assert features or max(spilled) <= 64


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("cell", [cells.mgu, authors_gru, cornn], ids=lambda cell: cell.name)
def test_small_with_products(cell, back):
    """The matrices of a cell's products no longer fit in a block, or its step beside them."""
    tiles = small.plan(cell, 2, 128, 32, back, PROCESSORS, SHARED)
    assert tiles is not None and tiles.shared <= 100 * 1024
    defines = small.defines_of(cell, torch.bfloat16, back, tiles, ALL_FEATURES)
    _, spilled = build("small_cell.cu", defines, step=print_unit(cell, "all"))
    assert max(spilled) == 0
    assert small.plan(cell, 2, 512, 32, back, PROCESSORS, SHARED) is None


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("cell", OWN, ids=lambda cell: cell.name)
def test_persistent_of_any_cell_with_everything(cell, back):
    """The kernel for every noise, lengths, resets and directions does not compile."""
    tiles = persistent.plan(cell, torch.bfloat16, 500, 20, back, PROCESSORS, SHARED)
    assert tiles is not None
    defines = persistent.defines_of(cell, torch.bfloat16, back, tiles, ALL_FEATURES)
    build("persistent_cell.cu", defines, step=print_unit(cell))


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("features", [0, ALL_FEATURES], ids=["plain", "everything"])
@pytest.mark.parametrize("cell", UNITWISE, ids=lambda cell: cell.name)
def test_diagonal(cell, features, back):
    """Loads that are under way no longer fit in registers: the kernel waits for every one."""
    defines = diagonal.diagonal_defines(cell, torch.bfloat16, back, features)
    step = print_unit(cell, "all" if features else "zoneout")
    _, spilled = build("diagonal.cu", defines, step=step)
    assert max(spilled) == 0
    if cell in (min_gru, ind_rnn):
        assert dict(defines)["AHEAD"] == diagonal.AHEAD == 16


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows(dtype):
    """What is done to rows does not compile, or leaves no room for as many threads as hide its
    waiting.
    """
    registers, spilled = build("rows.cu", rows.defines_of(dtype))
    assert len(registers) == 5 and max(spilled) == 0 and max(registers) <= 32


@pytest.mark.parametrize("paper", [False, True], ids=["ordinary", "paper"])
@pytest.mark.parametrize("rule", range(len(optimizer.RULES)), ids=optimizer.RULES)
def test_optimizers(rule, paper):
    """A rule does not compile."""
    _, spilled = build(optimizer.SOURCE, optimizer.defines_of(rule, paper))
    assert max(spilled) == 0


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_persistent(shape, dtype, back):
    """The weights of a paper's shape no longer fit: what is spilled is read from memory at every
    step.
    """
    batch, hidden = SHAPES[shape]
    tiles = persistent.plan(cells.lstm, dtype, hidden, batch, back, PROCESSORS, SHARED)
    assert tiles is not None
    assert tiles.blocks * tiles.groups <= PROCESSORS and tiles.layout.shared <= SHARED
    _, spilled = build("persistent.cu", persistent.defines_of(cells.lstm, dtype, back, tiles, 0))
    assert max(spilled) <= 256


@pytest.mark.parametrize("processors", [PROCESSORS, 66, 108])
@pytest.mark.parametrize("cell", CELLS)
def test_plans_fit(cell, processors):
    """A plan leaves out units, rows or depth, or takes more of the chip than there is."""
    found = 0
    for dtype in TYPES:
        for back in (False, True):
            for hidden in (1, 31, 32, 100, 513, 1000, 1056, 1500, 2048, 3000):
                for batch_size in (1, 8, 9, 16, 17, 64, 100, 128, 300):
                    tiles = persistent.plan(
                        cell, dtype, hidden, batch_size, back, processors, SHARED
                    )
                    if tiles is None:
                        continue
                    found += 1
                    size, gates = (
                        2 if tiles.half else dtype.itemsize,
                        {cells.lstm: 4, cells.gru: 4 if back else 3}.get(cell, 1),
                    )
                    assert (
                        tiles.blocks * tiles.units >= hidden
                        and tiles.groups * tiles.rows >= batch_size
                    )
                    assert tiles.groups == 1 or tiles.row_octets == 2 * tiles.tiles
                    assert (
                        8 * tiles.row_octets >= min(batch_size, tiles.rows)
                        and tiles.row_octets <= 2 * tiles.tiles
                    )
                    assert (
                        tiles.blocks * tiles.groups <= processors and tiles.layout.shared <= SHARED
                    )
                    assert tiles.k_steps * persistent.WARPS * 32 // size >= hidden * (
                        gates if back else 1
                    )
                    assert 1 <= tiles.layout.resident <= tiles.k_steps and tiles.k_steps % 2 == 0
                    assert tiles.layout.chunks_in_flight >= 1
                    columns = -(-(tiles.units if back else tiles.units * gates) // 8)
                    assert 2 * columns * tiles.layout.resident <= persistent.MOST_RESIDENT
                    assert not tiles.half or (
                        dtype == torch.float32 and (not back or cell in (cells.lstm, cells.gru))
                    )
                    assert bool(tiles.source_blocks) == (tiles.half and back)
                    if tiles.source_blocks:
                        check_scale_factors(tiles)
    assert found > 100


def check_scale_factors(tiles):
    """K-steps with one factor come from two blocks, or a warp reads fewer factors than the blocks
    that its values come from.
    """
    of_block, k = tiles.units // 4, tiles.k_steps
    for warp in range(persistent.WARPS):
        sources = [step // of_block for step in range(warp * k, (warp + 1) * k)]
        assert sources[-1] < sources[0] + tiles.source_blocks and k % tiles.k_steps_per_factor == 0
        assert all(
            len(set(sources[f : f + tiles.k_steps_per_factor])) == 1
            for f in range(0, k, tiles.k_steps_per_factor)
        )
        end = sources[0] + tiles.source_blocks
        assert (
            tiles.rows * persistent.WARPS * k * 32 + end * tiles.row_octets * 32
            <= tiles.buffer_bytes
        )
    assert end >= tiles.blocks


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_persistent_with_everything(cell, dtype, back):
    """The kernel for every noise, lengths, resets and directions does not compile for some cell."""
    tiles = persistent.plan(cell, dtype, 500, 20, back, PROCESSORS, SHARED)
    assert tiles is not None
    build("persistent.cu", persistent.defines_of(cell, dtype, back, tiles, ALL_FEATURES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "hidden"), [(128, 2000), (64, 2048), (128, 768)])
def test_warpgroup(batch, hidden, dtype):
    """The weights of text8 no longer fit, or a product waits for the one before it."""
    tiles = warpgroup.plan(hidden, batch, PROCESSORS, SHARED)
    assert (
        tiles is not None and tiles.shared <= SHARED and tiles.groups * tiles.k_steps <= PROCESSORS
    )
    registers, spilled = build("warpgroup.cu", warpgroup.defines_of(dtype, tiles, (1, 1)))
    # What two warpgroups take has to be what the third one gives, or they wait for it for ever.
    assert max(spilled) == 0 and registers == [(2 * 232 + 40) // 3]


def test_plans_of_many_rows():
    """A plan leaves out units or rows, or takes more of the chip than there is."""
    found = 0
    for hidden in range(8, 2200, 8):
        for batch_size in (1, 33, 64, 65, 128, 129, 256, 1000):
            tiles = warpgroup.plan(hidden, batch_size, PROCESSORS, SHARED)
            if tiles is None:
                continue
            found += 1
            assert (
                tiles.k_steps * warpgroup.UNITS_PER_BLOCK >= hidden
                and tiles.groups * tiles.slabs * warpgroup.ROWS >= batch_size
            )
            assert (
                tiles.groups * tiles.k_steps <= PROCESSORS
                and tiles.shared <= SHARED
                and tiles.stages >= 2
            )
            assert tiles.resident % (warpgroup.K_STEPS_PER_CHUNK // 2) == 0
    assert found > 500
    assert (
        warpgroup.plan(2000, 129, PROCESSORS, SHARED) is None
        and warpgroup.plan(2120, 8, PROCESSORS, SHARED) is None
    )
    assert warpgroup.plan(100, 64, PROCESSORS, SHARED) is None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (12, 0)], ids=str)
def test_other_chips(capability, dtype):
    """What runs where the faster kernels do not is written for one chip: the others have not all
    instructions.
    """
    plain = common_defines(None, dtype)
    build("steps.cu", steps.defines_of(cells.lstm, dtype, 1, True), capability)
    unit = any_cell.defines_of(dtype)
    build("cell_steps.cu", unit, capability, print_unit(peephole))
    unitwise = diagonal.diagonal_defines(min_gru, dtype, True, ALL_FEATURES)
    build("diagonal.cu", unitwise, capability, print_unit(min_gru))
    for layer in (True, False):
        made = norms.plan(layer, dtype.itemsize, 400, 9, 1, False)
        build("norms.cu", norms.defines_of(dtype, made, False, True), capability)
    for source in ("rows.cu", "dropout.cu", "weight_noise.cu"):
        build(source, plain, capability)


def test_chips_that_the_compiler_does_not_know():
    """A chip that is newer than the compiler is refused, or gets code of another family."""
    assert compiler.architecture((9, 0)) == compiler.architecture((9, 9)) == 90
    assert compiler.architecture((7, 5)) == 75 and compiler.architecture((8, 6)) == 86
    assert compiler.architecture((12, 9)) // 10 == 12
    with pytest.raises(RuntimeError, match=r"knows no GPU of compute capability 99\.1"):
        compiler.architecture((99, 1))
