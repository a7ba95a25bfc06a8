"""The generator: every backend draws its masks from these bits, so each must be the published
one.
"""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import philox_numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoneout as zo
from zoneout.philox import as_seed, fresh_seed, philox

PUBLISHED = [  # Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, -1, 2**63, 2**64 - 1, -(2**63)])


def hexadecimal(text):
    return [int(word, 16) for word in text.split()]


def ours(seed, counters, device="cpu"):
    """The package's words [n, 4] for counters [n, 4], as plain integers."""
    columns = torch.tensor(counters, dtype=torch.int64, device=device).unbind(-1)
    return torch.stack(philox(as_seed(seed, device), *columns), dim=-1).cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "key", "output"), PUBLISHED, ids=["zeros", "ones", "pi"])
def test_published_vectors(counter, key, output, device):
    """If this fails, the bits are not Philox's: no other implementation would draw our masks."""
    low, high = hexadecimal(key)
    assert ours(low + 2**32 * high, [hexadecimal(counter)], device).tolist() == [
        hexadecimal(output)
    ]
    assert philox_numpy.philox(hexadecimal(counter), (low, high)).tolist() == hexadecimal(output)


@settings(deadline=None, derandomize=True)
@given(SEED, st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=8))
def test_equals_numpy(seed, counters):
    """If this fails, signed 64-bit arithmetic does not stand in for unsigned 32-bit words
    somewhere.
    """
    expected = philox_numpy.philox(counters, philox_numpy.key_of(seed))
    np.testing.assert_array_equal(ours(seed, counters), expected)


def test_broadcasts():
    """If this fails, a draw over coordinates that broadcast is not the draw at each of them."""
    c0, c1 = torch.arange(3), torch.arange(2)[:, None]
    words = torch.stack(
        philox(as_seed(7), c0, c1, torch.tensor(5), torch.tensor(6)), dim=-1
    )  # [2, 3, 4]
    one_by_one = [[ours(7, [(a, b, 5, 6)])[0] for a in range(3)] for b in range(2)]
    np.testing.assert_array_equal(words.numpy(), one_by_one)


TRITON = """
import json, sys
import torch, triton, triton.language as tl

@triton.jit
def words(seed_at, c0_at, c1_at, c2_at, c3_at, out, n: tl.constexpr):
    i = tl.arange(0, n)
    seed = tl.load(seed_at)
    c0, c1 = tl.load(c0_at + i).to(tl.uint32), tl.load(c1_at + i).to(tl.uint32)
    c2, c3 = tl.load(c2_at + i).to(tl.uint32), tl.load(c3_at + i).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    tl.store(out + 4 * i, w0.to(tl.int64))
    tl.store(out + 4 * i + 1, w1.to(tl.int64))
    tl.store(out + 4 * i + 2, w2.to(tl.int64))
    tl.store(out + 4 * i + 3, w3.to(tl.int64))

@triton.jit
def uniform(seed_at, offset_at, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.rand(tl.load(seed_at), tl.load(offset_at + i).to(tl.uint32)))

result = []
for seed, counters in json.load(sys.stdin):
    key = torch.tensor([seed])
    columns = [column.contiguous() for column in torch.tensor(counters).unbind(1)]
    four, rand = torch.zeros(len(counters), 4, dtype=torch.int64), torch.zeros(len(counters))
    words[(1,)](key, *columns, four, len(counters))
    uniform[(1,)](key, columns[0], rand, len(counters))
    result.append((four.tolist(), rand.tolist()))
print(json.dumps(result))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_equals_triton(tmp_path):
    """If this fails, a Triton kernel draws other masks than the reference from the same seed."""
    generator = np.random.default_rng(0)
    seeds = [0, 7, -1, 2**63 - 1, -(2**63), *generator.integers(-(2**63), 2**63, 3).tolist()]
    cases = [(seed, generator.integers(0, 2**32, (16, 4)).tolist()) for seed in seeds]
    script = (
        tmp_path / "words.py"
    )  # a file, since Triton reads its kernels' source; it decides when imported
    script.write_text(TRITON)
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=os.environ
        | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for (seed, counters), (words, rand) in zip(cases, json.loads(done.stdout), strict=True):
        assert ours(seed, counters).tolist() == words
        first = (
            ours(seed, [(c0, 0, 0, 0) for c0, *_ in counters])[:, 0]
            .astype(np.uint32)
            .view(np.int32)
        )
        uniform = np.where(first < 0, -first - 1, first).astype(np.float32) * np.float32(
            4.6566127342e-10
        )
        np.testing.assert_array_equal(np.float32(rand), uniform)


# --- seeds ----------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(SEED, st.integers(-(2**40), 2**63))
def test_fold_of_int_and_tensor_agree(seed, n):
    """If this fails, a seed kept on the device leads to other masks than the same seed on the
    host.
    """
    folded = zo.fold(seed, n)
    assert isinstance(folded, int) and folded == zo.fold(seed, n)
    assert int(zo.fold(as_seed(seed), n)) == folded


def test_fold_separates():
    """If this fails, two modules that were given a seed each share their masks."""
    folded = [
        zo.fold(seed, n) for seed in (0, 7, -7, 2**63) for n in (*range(100), 2**32, 2**33, -1)
    ]
    assert len(set(folded)) == len(folded)
    assert zo.fold(zo.fold(7, 1), 2) != zo.fold(zo.fold(7, 2), 1)


def test_as_seed_takes_64_bits_signed_or_not():
    """If this fails, a seed of somebody's 64-bit hash is refused, or two spellings of one key
    differ.
    """
    assert as_seed(2**64 - 1).item() == as_seed(-1).item() == -1
    assert as_seed(2**63).item() == -(2**63)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        seed = as_seed(torch.tensor([7], dtype=dtype))
        assert (seed.shape, seed.dtype, seed.item()) == ((), torch.int64, 7)


@pytest.mark.parametrize(
    ("seed", "error", "says"),
    [
        (2**64, ValueError, f"got {2**64}"),
        (-(2**63) - 1, ValueError, f"got {-(2**63) - 1}"),
        (1.5, TypeError, "got float"),
        ("7", TypeError, "got str"),
        (True, TypeError, "got bool"),
        (torch.tensor([1, 2]), ValueError, r"shape \(2,\)"),
        (torch.tensor(1.0), ValueError, "float32"),
        (torch.tensor(True), ValueError, "bool"),
        (torch.tensor(1j), ValueError, "complex64"),
    ],
    ids=repr,
)
def test_as_seed_refuses(seed, error, says):
    """If this fails, something that is no seed is taken for one, or the error does not say what
    came.
    """
    with pytest.raises(error, match=f"^seed: expected .*{says}"):
        as_seed(seed)


@pytest.mark.parametrize("device", DEVICES)
def test_fresh_seed_obeys_torch(device):
    """If this fails, `torch.manual_seed` does not rule the masks, or two calls in a row share
    theirs.
    """
    like = torch.empty(3, dtype=torch.float16, device=device)

    def draw(state):
        torch.manual_seed(state)
        return [fresh_seed(like).item() for _ in range(20)]

    assert draw(0) == draw(0)
    assert len({*draw(0), *draw(1)}) == 40
    seed = fresh_seed(like)
    assert (seed.shape, seed.dtype, seed.device) == ((), torch.int64, like.device)
