"""Any arguments at all: the right result, or an error that is a sentence; never anything else.

The right result is the reference backend's (which `test_oracle.py` holds against NumPy).
ZONEOUT_FUZZ=20 tries twenty times as many cases, each time others; `benchmarks/fuzz.py` goes on for
as long as it is let.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fuzzing import some
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout
from zoneout.ops import TOLERANCES

zo: Any = zoneout  # what is given here has wrong types on purpose


# Things that no argument of a layer is; most arguments refuse most of them.
PLAIN = [
    None,
    -1,
    0,
    1.5,
    -0.0,
    math.nan,
    math.inf,
    2**40,
    True,
    "",
    "unit",
    "1",
    b"\0",
    [],
    [None],
    (),
    {},
    object(),
    1j,
]
SIZES = [value for value in PLAIN if value != 2**40]
JUNK = st.sampled_from(PLAIN) | st.builds(
    lambda shape: torch.zeros(shape), st.lists(st.integers(0, 3), max_size=4)
)
RATES = (
    st.sampled_from([0.0, 0.05, 0.5, 1.0])
    | st.floats(0, 1)
    | st.builds(lambda k: torch.linspace(0, 1, k), st.integers(1, 6))
)
SEEDS = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 9).map(torch.tensor)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float16]
)


@st.composite
def either(draw: st.DrawFn, good: Any, wild: float) -> Any:
    """Mostly something good; with a chance of `wild` anything."""
    return draw(JUNK) if draw(st.floats(0, 1, exclude_max=True)) < wild else draw(good)


@st.composite
def noises(draw: st.DrawFn, wild: float) -> Any:
    """One noise with any of its arguments."""
    kind = draw(
        st.sampled_from(
            [
                "Zoneout",
                "StateDropout",
                "RecurrentDropout",
                "VariationalDropout",
                "WeightDrop",
                "WeightNoise",
            ]
        )
    )
    rates = RATES | st.lists(RATES, max_size=3)
    arguments: dict[str, Any] = {"at_eval": st.sampled_from(["expectation", "off", "sample"])}
    masks = st.sampled_from(["unit", "shared", "step", "sequence", "static"])
    if kind in ("Zoneout", "StateDropout"):
        arguments |= {
            "cell": rates,
            "hidden": rates,
            "mask": masks,
            "seed": st.none() | st.integers(0, 99),
        }
    elif kind == "RecurrentDropout":
        arguments |= {"rate": rates, "mask": masks}
    elif kind == "VariationalDropout":
        arguments |= {"input": rates, "hidden": rates}
    else:
        arguments |= {"std" if kind == "WeightNoise" else "rate": rates}
    names = draw(st.sets(st.sampled_from(sorted(arguments))))
    chosen = {name: draw(either(arguments[name], wild)) for name in sorted(names)}
    hold = (
        {"hold_output_gate": draw(st.booleans())}
        if kind == "RecurrentDropout" and draw(st.booleans())
        else {}
    )
    return kind, chosen | hold


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A layer and a call of it. Half of the cases are meant to be good, in the others anything
    may be wrong.
    """
    wild = draw(st.sampled_from([0.0, 0.0, 0.03, 0.2]))
    kind = draw(st.sampled_from(["LSTM", "GRU", "RNN"]))
    steps, batch, inputs, hidden = (draw(st.integers(low, 6)) for low in (1, 0, 1, 1))
    dtype = draw(DTYPES)
    layer: dict[str, Any] = {
        "num_layers": st.integers(1, 3),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.5, 1.0]),
        "bidirectional": st.booleans(),
        "norm": st.sampled_from([None, None, "layer", zo.RecurrentBatchNorm(3)]),
        "learn_initial_state": st.booleans(),
    }
    layer |= {"proj_size": st.integers(0, hidden)} if kind == "LSTM" else {}
    layer |= {"nonlinearity": st.sampled_from(["tanh", "relu"])} if kind == "RNN" else {}
    given_ = {
        name: draw(either(value, wild)) for name, value in layer.items() if draw(st.booleans())
    }
    # A tensor in the place of torch's own arguments gets torch's own errors, and so does a size
    # beyond all memory.
    given_ = {
        name: value
        for name, value in given_.items()
        if name == "norm" or not isinstance(value, Tensor)
    }
    if given_.get("num_layers") == 2**40:
        del given_["num_layers"]
    noise = draw(st.lists(noises(wild), max_size=3))
    options: dict[str, Any] = {
        "lengths": st.lists(st.integers(0, steps + (wild > 0)), min_size=batch, max_size=batch),
        "resets": st.builds(
            lambda seed, swap: (
                torch.rand(
                    (batch, steps) if swap else (steps, batch),
                    generator=torch.Generator().manual_seed(seed),
                )
                < 0.3
            ),
            st.integers(0, 99),
            st.just(given_.get("batch_first") is True),
        ),
        "examples": st.integers(0, 2**31)
        | st.lists(st.integers(0, 2**32 - 1), min_size=batch, max_size=batch),
        "first_step": st.integers(0, 2**31),
        "return_cells": st.just(kind == "LSTM") | st.booleans(),
    }
    call = {
        name: draw(either(value, wild))
        for name, value in options.items()
        if draw(st.integers(0, 3)) == 0
    }
    if isinstance(call.get("return_cells"), Tensor):
        del call["return_cells"]  # nor is it asked whether a tensor is true
    return {
        "kind": kind,
        "sizes": [
            draw(st.sampled_from(SIZES) if draw(st.floats(0, 1)) < wild / 5 else st.just(n))
            for n in (inputs, hidden)
        ],
        "layer": given_,
        "noise": noise,
        "call": call | {"seed": draw(either(SEEDS, wild / 3))},
        "dtype": dtype,
        "shape": (steps, batch, inputs),
        "form": draw(
            st.sampled_from(
                ["tensor", "tensor", "numbers", "packed", "unbatched", "other dtype"]
                + ["junk"] * (wild > 0)
            )
        ),
        "state": draw(st.sampled_from(["none", "none", "given"] + ["wrong"] * (wild > 0))),
        "training": draw(st.booleans()),
        "fill": draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 30.0])),
        "junk": draw(JUNK),
    }


def outcome(case: dict[str, Any], backend: str) -> Any:
    """What a case gives: an error, or every tensor of it by name, gradients included."""
    generator = torch.Generator().manual_seed(7)
    dtype, (steps, batch, inputs) = case["dtype"], case["shape"]

    def numbers(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * case["fill"]).to(
            dtype
        )

    torch.manual_seed(0)
    try:
        noise = [getattr(zo, kind)(**arguments) for kind, arguments in case["noise"]]
        layer = getattr(zo, case["kind"])(
            *case["sizes"], dtype=dtype, noise=noise, backend=backend, **case["layer"]
        )
        layer.train(case["training"])
        swap = layer.batch_first
        x: Any = numbers(*((batch, steps, inputs) if swap else (steps, batch, inputs)))
        call = dict(case["call"])
        if case["form"] == "numbers":
            x = torch.randint(0, inputs, (steps, batch), generator=generator)
            x = (
                x.t() if swap else x
            )  # what a layer with batch_first makes of it is its own business
        elif case["form"] == "packed" and batch:
            x = pack_padded_sequence(numbers(steps, batch, inputs), [steps] * batch)
            call.pop("lengths", None)
        elif case["form"] == "unbatched":
            x = numbers(steps, inputs)
        elif case["form"] == "other dtype":
            x = x.to(torch.float64 if dtype == torch.float32 else torch.float32)
        elif case["form"] == "junk":
            x = case["junk"]
        leaf = x if isinstance(x, Tensor) and x.is_floating_point() else None
        if leaf is not None:
            leaf.requires_grad_()
        hx = None
        if case["state"] != "none":
            count, rows = len(layer.suffixes()), () if case["form"] == "unbatched" else (batch,)
            wrong = case["state"] == "wrong"
            states = [
                numbers(count + wrong, *rows, layer.output_size),
                numbers(count, *rows, layer.hidden_size),
            ]
            hx = tuple(states) if layer.kind == "lstm" else states[0]
        y, ended, *cells = layer(x, hx, **call)
        y = y.data if isinstance(x, torch.nn.utils.rnn.PackedSequence) else y
        found = {"y": y, "cells": cells[0].data if cells else None}
        found |= {
            f"end {k}": s for k, s in enumerate(ended if isinstance(ended, tuple) else (ended,))
        }
        found = {name: value for name, value in found.items() if value is not None}
        sum(v.double().sum() for v in found.values()).backward()
        found |= {f"of {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}
        found |= {"of x": leaf.grad} if leaf is not None and leaf.grad is not None else {}
        return {name: value.detach() for name, value in found.items()}
    except (ValueError, TypeError, NotImplementedError) as error:
        return error


@pytest.mark.filterwarnings(
    "ignore:dropout option"
)  # torch's, of a dropout between layers where there is one
@pytest.mark.filterwarnings("ignore:.* rounds to [01]")  # ours, of a rate that is drawn as 0 or 1
@some(500)
@given(calls())
def test_any_layer_gives_the_right_result_or_a_sentence(case: dict[str, Any]) -> None:
    """A layer crashes in the depths, swallows nonsense, or its fast backend gives something
    else.
    """
    expected, found = outcome(case, "reference"), outcome(case, "cpu")
    if isinstance(expected, Exception) or isinstance(found, Exception):
        assert type(expected) is type(found) and str(expected) == str(found), (expected, found)
        assert len(str(expected).split()) >= 4, f"not a sentence: {expected}"
        return
    assert expected.keys() == found.keys()
    dtype = case["dtype"]
    # Norms of a few units divide by almost nothing: in float32 that is rounding made large, in both
    # of them.
    exact = dtype == torch.float64 or (dtype == torch.float32 and case["layer"].get("norm") is None)
    # Where a gradient cancels to nothing, what is left is the rounding of terms as large as the
    # others.
    largest = max(
        (value.norm().nan_to_num(0, 0, 0) for value in expected.values()), default=torch.zeros(())
    )
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        finite = value.isfinite()
        assert torch.equal(found[name].isfinite(), finite) or dtype == torch.float16, (
            f"{name} overflows in one of them"
        )
        if exact and finite.all():
            error = (found[name] - value).norm()
            assert error <= TOLERANCES[dtype] * largest, f"{name}: {error:.1e} from the reference"


@pytest.mark.filterwarnings("ignore:.* rounds to [01]")  # ours, of a rate that is drawn as 0 or 1
@some(300)
@given(noises(0.3))
def test_any_noise_is_made_or_refused(case: tuple[str, dict[str, Any]]) -> None:
    """A noise takes an argument that means nothing, or fails on it in the depths."""
    kind, arguments = case
    try:
        noise = getattr(zo, kind)(**arguments)
    except (ValueError, TypeError) as error:
        named = any(name in str(error) for name in (kind, *arguments))
        assert len(str(error).split()) >= 4 and named, f"not a sentence: {error}"
        return
    assert noise == getattr(zo, kind)(**arguments) and hash(noise) == hash(
        getattr(zo, kind)(**arguments)
    )
    assert repr(noise).startswith(f"{kind}(")


# --- what it found --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cells_have_the_dtype_of_the_outputs(dtype: torch.dtype) -> None:
    """The cells of a layer in half precision came in float32 from the fused loop."""
    y, _, cells = zo.LSTM(3, 4, dtype=dtype)(torch.zeros(5, 2, 3, dtype=dtype), return_cells=True)
    assert cells.dtype == y.dtype


def test_an_empty_batch_with_a_norm_does_not_warn() -> None:
    """torch warned of the moments of nothing."""
    zo.LSTM(3, 4, norm="layer", backend="reference")(torch.zeros(5, 0, 3))


@pytest.mark.parametrize("value", [[], torch.tensor(0.0), "no", 2])
def test_hold_output_gate_is_a_flag(value: Any) -> None:
    """Anything was taken for a flag, and the noise had no hash."""
    with pytest.raises((TypeError, ValueError), match="hold_output_gate"):
        zo.RecurrentDropout(rate=0.5, hold_output_gate=value)
