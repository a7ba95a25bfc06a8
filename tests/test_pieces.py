"""Without derivatives a long pass runs in pieces, and gives what it gives whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoneout as zo
from zoneout.ops import cpu
from zoneout.ops.sequence import checkpointing as pieces
from zoneout.ops.sequence import passes

STEPS, BATCH, INPUT, HIDDEN = 23, 5, 3, 6
NOISES = {
    "zoneout": zo.Zoneout(cell=0.4, hidden=0.3),
    "zoneout of a GRU": zo.Zoneout(hidden=0.3),
    "static": zo.Zoneout(cell=0.4, hidden=0.3, mask="static", seed=3),
    "recurrent dropout": zo.RecurrentDropout(rate=0.3),
    "variational": zo.VariationalDropout(input=0.3, hidden=0.2),
}


def both_ways(monkeypatch: pytest.MonkeyPatch, layer: Any, x: Any, **how: Any) -> list[Any]:
    """What a layer gives whole, and in pieces of four steps; each with the number of passes."""
    found = []
    gates = layer.weight_hh_l0.shape[0]
    for piece in (2**62, 4 * BATCH * gates + 1):
        count = [0]

        def counted(r: Any, count: list[int] = count, forward: Any = passes.forward) -> Any:
            count[0] += 1
            return forward(r)

        with monkeypatch.context() as patch:
            patch.setattr(cpu, "GATES_AT_ONCE", piece)
            patch.setattr(pieces, "LEAST", 1)
            patch.setattr(passes, "forward", counted)
            with torch.no_grad():
                found.append((layer(x, seed=7, **how), count[0]))
    return found


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for part in value for leaf in leaves(part)] if value is not None else []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, noise, options",
    [
        (zo.LSTM, "zoneout", {}),
        (zo.LSTM, "static", {}),
        (zo.LSTM, "variational", {"norm": "layer"}),
        (zo.LSTM, "recurrent dropout", {"bidirectional": True, "num_layers": 2}),
        (zo.LSTM, "zoneout", {"proj_size": 4, "learn_initial_state": True}),
        (zo.GRU, "zoneout of a GRU", {"bidirectional": True}),
        (zo.RNN, "zoneout of a GRU", {}),
    ],
)
@pytest.mark.parametrize("how", ["plain", "lengths", "resets", "one-hot"])
def test_pieces_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, kind: Any, noise: str, options: Any, how: str
) -> None:
    """If a piece began at the wrong step, state or length, its masks or its outputs would be
    others.
    """
    layer = kind(INPUT, HIDDEN, noise=NOISES[noise], backend="cpu", **options).to(dtype).train()
    x: Any = torch.randn(STEPS, BATCH, INPUT, dtype=dtype)
    more: dict[str, Any] = {"first_step": 3}
    if how == "lengths":
        more["lengths"] = torch.tensor([STEPS, 4, 0, 17, 9])
    if how == "resets":
        more["resets"] = torch.rand(STEPS, BATCH) < 0.3
    if how == "one-hot":
        x = torch.randint(INPUT, (STEPS, BATCH))
    if kind is zo.LSTM:
        more["return_cells"] = True
    (whole, ones), (parts, many) = both_ways(monkeypatch, layer, x, **more)
    passes_of_the_whole = layer.num_layers * (2 if layer.bidirectional else 1)
    in_pieces = passes_of_the_whole // (2 if layer.bidirectional and how == "resets" else 1)
    assert ones == passes_of_the_whole and many == ones + 5 * in_pieces, (
        "six pieces of at most four steps"
    )
    for one, other in zip(leaves(whole), leaves(parts), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(
            other, one, rtol=1e-2 if dtype == torch.bfloat16 else 1e-12, atol=1e-12
        )


@pytest.mark.parametrize("what", ["batch norm", "packed", "held gate", "derivatives"])
def test_what_cannot_come_apart_runs_whole(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A pass is cut where a step needs more of the one before than its state."""
    norm = zo.RecurrentBatchNorm(STEPS) if what == "batch norm" else None
    noise = (
        zo.RecurrentDropout(rate=0.4, hold_output_gate=True)
        if what == "held gate"
        else NOISES["zoneout"]
    )
    layer = zo.LSTM(INPUT, HIDDEN, noise=noise, norm=norm, backend="cpu")
    x: Any = torch.randn(STEPS, BATCH, INPUT)
    if what == "packed":
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([23, 17, 9, 4, 1]))
    if what == "derivatives":
        monkeypatch.setattr(cpu, "GATES_AT_ONCE", 1)
        y, _ = layer(x, seed=7)
        y.sum().backward()
        assert layer.weight_hh_l0.grad.abs().sum() > 0
        return
    (whole, ones), (parts, many) = both_ways(monkeypatch, layer, x)
    assert ones == many == 1
    assert all(
        torch.equal(one, other) for one, other in zip(leaves(whole), leaves(parts), strict=True)
    )
