"""What a GPU does to rows around the loop, against plain torch calls; without a GPU, emulated."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from zoneout.ops.cuda.pointwise import rows
from zoneout.ops.sequence import packing

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
HALVES = [torch.float32, torch.bfloat16, torch.float16]
RAGGED = {"ragged": [5, 2, 0, 4, 1], "to the end": [5] * 5, "nothing": [0] * 5, "one row": [3]}
STEPS = 5


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the kernels run; rows of every type are moved by them."""
    if request.param == "cpu":
        request.getfixturevalue("emulated")
        monkeypatch.setattr(packing, "has_kernel", lambda v: not packing._transformed(v))
    return request.param


def numbers(dtype, *shape):
    """Numbers of a type, none of them zero."""
    whole = torch.randint(1, 100, shape)
    return whole > 0 if dtype == torch.bool else whole.to(dtype)


LIE = {
    "without gaps": lambda v: v,
    "one number on": lambda v: torch.cat((v.new_zeros(1), v.flatten()))[1:].view(v.shape),
    "one number apart": lambda v: torch.nn.functional.pad(v, (0, 1))[..., :-1],
    "rows first": lambda v: v.transpose(0, -2).contiguous().transpose(0, -2),
    "backwards": lambda v: v.flip(-1).contiguous().mT.contiguous().mT.flip(-1),
    "all the same": lambda v: v[..., :1].expand(v.shape),
}


def alive_of(lengths):
    """[T, B]: whether a row is there."""
    return torch.arange(STEPS)[:, None] < torch.tensor(lengths)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lie", LIE)
@pytest.mark.parametrize("width", [1, 3, 8, 37])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_within(device, dtype, width, lie):
    """Something stands past an end, a row is another's, or a word is read where it is not
    aligned.
    """
    for lengths in RAGGED.values():
        v = numbers(dtype, STEPS, len(lengths), width)
        want = torch.where(alive_of(lengths)[..., None], LIE[lie](v), torch.zeros((), dtype=dtype))
        got = rows.zero_past_lengths(LIE[lie](v.to(device)), torch.tensor(lengths, device=device))
        assert got.is_contiguous() and got.dtype == dtype and torch.equal(got.cpu(), want)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lie", LIE)
@pytest.mark.parametrize("width", [1, 3, 8, 37])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_and_padded(device, dtype, width, lie):
    """A packed row is laid where another belongs, on the way there or back, or the padding is
    not zero.
    """
    for lengths in (
        [5, 5, 3, 1, 1],
        [5] * 4,
        [5],
        [2, 1, 1],
    ):  # of the last nothing is left before the end
        alive = alive_of(lengths)
        counts = alive.sum(1)
        full = numbers(dtype, STEPS, len(lengths), width)
        packed = LIE[lie](full[alive])
        want = torch.zeros_like(full)
        want[alive] = packed
        there = packing.packing_of(counts, len(lengths), packed.to(device))
        assert there.lengths.tolist() == lengths and there.total == sum(lengths)
        got = packing.padded(LIE[lie](full[alive].to(device)), there)
        assert got.is_contiguous() and torch.equal(got.cpu(), want)
        back = packing.packed(LIE[lie](full.to(device)), there)
        assert back.is_contiguous() and torch.equal(back.cpu(), LIE[lie](full)[alive])


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # the first time that torch.func is used
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's vmap, of index_copy_
@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_derivatives_of_packed_and_padded(device, pack):
    """A derivative, backwards, forwards, a second one or many at once, is of other rows."""
    v = torch.randn(
        (4, 3, 3) if pack else (9, 3), dtype=torch.float64, device=device, requires_grad=True
    )
    there = packing.packing_of(torch.tensor([3, 3, 2, 1]), 3, torch.empty(9, 3, device=device))

    def move(v):
        return (packing.packed if pack else packing.padded)(v, there)

    def plain(v):
        return packing._by_torch(v, *there, pack)

    want = plain(v)
    assert torch.equal(move(v), want)
    assert torch.autograd.gradcheck(lambda v: move(v).square(), v, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda v: move(v).pow(3), v)
    assert torch.equal(
        torch.func.vmap(move)(torch.stack((v, 2 * v))), torch.stack((want, 2 * want))
    )
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(jacobian(move)(v), torch.autograd.functional.jacobian(plain, v))
    d = torch.randn(3, *want.shape, dtype=v.dtype, device=device)
    (many,) = torch.autograd.grad(move(v), v, d, is_grads_batched=True)
    assert torch.equal(many, torch.stack([torch.autograd.grad(move(v), v, own)[0] for own in d]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_and_padded_compiled(device, dynamic):
    """A compiler breaks the graph, ties it to one number of rows, or takes its own way back."""

    def there_and_back(rows, counts, batch):
        there = packing.packing_of(counts, batch, rows)
        return packing.packed(packing.padded(rows, there) * 2, there)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for each in ([3, 3, 2, 1], [4, 2, 1, 1]):
        counts = torch.tensor(each)
        v = torch.randn(sum(each), 3, device=device, requires_grad=True)
        got = compiled(v, counts, each[0])
        assert torch.equal(got, 2 * v)
        (d,) = torch.autograd.grad(got.square().sum(), v)
        assert torch.equal(d, 8 * v)


def test_packed_input_cannot_be_captured(monkeypatch):
    """A CUDA graph would keep the sizes of one batch, or the error speaks of pinned memory."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    packed = pack_padded_sequence(torch.zeros(4, 2, 1), torch.tensor([4, 2]))
    with pytest.raises(RuntimeError, match="lengths=… on the GPU instead"):
        packing.packing_of(packed.batch_sizes, 2, SimpleNamespace(is_cuda=True))


@pytest.mark.parametrize("blocks", [1, 1024])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_clear(device, dtype, lengths, blocks, monkeypatch):
    """What is past an end is left as it was, what is before it is written to, or an array is
    forgotten.
    """
    monkeypatch.setattr(rows, "BLOCKS", blocks)
    alive = alive_of(lengths).flatten()
    count = len(alive)

    def unwritten(width, of=dtype, first=0):
        memory = torch.full((first + count * width,), float("nan"), dtype=of, device=device)
        return memory[first:].view(count, width)

    arrays = [
        unwritten(37),
        unwritten(1),
        unwritten(8, torch.float32),
        unwritten(148),
        unwritten(16, first=1),
    ]
    arrays += [unwritten(70), unwritten(2)]
    rows.clear(torch.tensor(lengths, device=device), STEPS, None, *arrays, arrays[3], None)
    for v in arrays:
        bits = v.cpu().view(torch.int16)
        assert not bits[~alive].any() and v.cpu()[alive].isnan().all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reversed"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_last(device, dtype, lengths, reverse):
    """The last state is that of another step, row or cell, or a sequence of no steps has none."""
    batch = len(lengths)
    h, c = torch.randn(STEPS, batch, 37).to(dtype), torch.randn(STEPS, batch, 51)
    h0, c0 = torch.randn(batch, 37).to(dtype), torch.randn(51).expand(batch, 51)
    ends = torch.tensor(lengths, device=device)
    both = ((h, h0), (c, c0))

    def wanted(v, v0):
        return torch.stack(
            [
                v0[b] if end == 0 else v[0 if reverse else end - 1, b]
                for b, end in enumerate(lengths)
            ]
        )

    for states, of in ((both, dtype), (both[:1], dtype), (both[1:], torch.float32)):
        given = [(v.flatten(0, 1).to(device), v0.to(device)) for v, v0 in states]
        for unsaid in (None,) if lengths == [STEPS] * batch else ():  # to the end
            got = rows.final_states(given, STEPS, unsaid, reverse, of)
            assert all(
                torch.equal(mine.cpu(), wanted(*state).to(of)) for mine, state in zip(got, states)
            )
        got = rows.final_states(given, STEPS, ends, reverse, of)
        assert len(got) == len(states)
        for mine, state in zip(got, states):
            assert torch.equal(mine.cpu(), wanted(*state).to(of))


def plainly_entered(loop, lengths, reverse):
    """[T, B, P]: h as it entered, one row at a time."""
    h_in = torch.zeros(STEPS, loop.batch, loop.outputs, dtype=loop.y.dtype)
    y, h0 = loop.y.view(h_in.shape), loop.h0
    for b, end in enumerate(lengths):
        h = h0[b]
        for t in range(end)[:: -1 if reverse else 1]:
            cut = t + 1 if reverse else t  # a cut lies before its step
            if loop.resets is not None and (not reverse or cut < end) and loop.resets[cut, b]:
                h = loop.reset_h[b]
            h_in[t, b] = h if loop.scale_h is None else h * loop.scale_h[b]
            h = y[t, b]
    return h_in


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("has", ["", "resets", "scale", "resets scale"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reversed"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_entered(device, dtype, lengths, reverse, has):
    """h of another step enters, a reset is forgotten or made where a row begins, or x or the
    ones stand elsewhere.
    """
    torch.manual_seed(0)
    batch, alive = len(lengths), alive_of(lengths).flatten()
    for outputs, inputs, ones in ((37, 3, 8), (8, 8, 0), (32, 1, 7), (5, 16, 3)):
        on = dict(dtype=dtype)
        y, x = (
            torch.randn(STEPS * batch, outputs).to(**on),
            torch.randn(STEPS * batch, inputs).to(**on),
        )
        h0, reset_h = torch.randn(batch, outputs).to(**on), torch.randn(batch, outputs).to(**on)
        resets = torch.rand(STEPS, batch) < 0.5
        loop = SimpleNamespace(
            steps=STEPS, batch=batch, outputs=outputs, y=y, h0=h0,
            resets=resets if "resets" in has else None,
            reset_h=reset_h if "resets" in has else None,
            scale_h=torch.randn(batch, outputs).to(**on) if "scale" in has else None,
        )  # fmt: skip
        want = plainly_entered(loop, lengths, reverse).view(-1, outputs)
        there = SimpleNamespace(
            **{k: v.to(device) if torch.is_tensor(v) else v for k, v in vars(loop).items()}
        )
        ends = torch.tensor(lengths, device=device)
        for said in (ends, None) if lengths == [STEPS] * batch else (ends,):
            out = torch.empty(STEPS * batch, outputs + inputs + ones, dtype=dtype, device=device)
            h_in, beside, last = (
                rows.recurrent_inputs(there, said, reverse, x.to(device), out)
                .cpu()
                .split((outputs, inputs, ones), dim=1)
            )
            assert torch.equal(h_in[alive], want[alive]) and h_in.isfinite().all()
            assert torch.equal(beside, x) and torch.equal(last, torch.ones_like(last))
            alone = rows.recurrent_inputs(
                there, said, reverse, None, torch.empty_like(there.y)
            ).cpu()
            assert torch.equal(alone, h_in)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parted(device, dtype):
    """A column ends up in another part, or a word is read where it is not aligned."""
    for widths in ((8, 8), (37, 3, 1, 1), (64, 1), (1,), (0, 5)):
        v = torch.randn(33, sum(widths) + 2).to(dtype)
        parts = [(sum(widths[:k]), width) for k, width in enumerate(widths)]
        got = rows.split_columns(v.to(device), parts)
        for mine, (first, width) in zip(got, parts, strict=True):
            assert mine.is_contiguous() and torch.equal(mine.cpu(), v[:, first : first + width])


def test_nothing_to_do(device):
    """A batch without rows, or rows without numbers, launch a grid of no blocks."""
    none, some = (
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.tensor([2, 1], device=device),
    )
    assert rows.zero_past_lengths(torch.zeros(3, 0, 4, device=device), none).shape == (3, 0, 4)
    assert rows.zero_past_lengths(torch.zeros(3, 2, 0, device=device), some).shape == (3, 2, 0)
    rows.clear(none, 3, torch.zeros(0, 4, device=device))
    rows.clear(some, 3, None)
    empty = torch.zeros(0, 4, device=device)
    (h,) = rows.final_states([(empty, empty)], 3, none, False, torch.float32)
    assert h.shape == (0, 4)
    assert [part.shape for part in rows.split_columns(empty, [(0, 1), (1, 3)])] == [(0, 1), (0, 3)]
    loop = SimpleNamespace(
        steps=3, batch=0, outputs=4, y=empty, h0=empty, resets=None, reset_h=None, scale_h=None
    )
    assert rows.recurrent_inputs(loop, None, False, None, empty) is empty


@pytest.mark.gpu
def test_more_than_two_to_the_32_words():
    """An offset of 32 bits overflows: the last rows land on the first."""
    if torch.cuda.get_device_properties(0).total_memory < 32 * 2**30:
        pytest.skip("needs 32 GiB of GPU memory")
    v = torch.ones(
        3, 2, 750_000_001, dtype=torch.uint8, device="cuda"
    )  # 4.5e9 bytes, one in a word
    v[1, 1, -1] = v[2, 0, -2] = 7
    got = rows.zero_past_lengths(v, torch.tensor([3, 2], device="cuda"))
    assert torch.equal(got[:2], v[:2]) and torch.equal(got[2, 0], v[2, 0]) and not got[2, 1].any()
