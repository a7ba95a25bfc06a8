"""Load the weights of other toolkits into the layers and cells of this package.

A toolkit differs from `torch.nn` in the shape of its matrices, the order of its gates, the number
of its biases, and in what it adds to the forget gate at run time without storing it. `load_arrays`
takes these differences as arguments. The other functions know them for one toolkit.

Gates have one letter each: i, f, g, o of an LSTM (g is the candidate), r, z, n of a GRU (n is the
candidate), n of a plain RNN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from . import cells

Array: TypeAlias = Any  # a NumPy array, a tensor, or anything that NumPy reads as an array
Module = TypeVar("Module", bound=nn.Module)

GATES = {"LSTM": "ifgo", "GRU": "rzn", "RNN": "n"}  # the order of torch.nn
BIASES = ("bias_ih", "bias_hh")


class ResetFirstGRUCell(nn.Module):
    """A GRU cell with the reset gate before the product: W_n (r ⊙ h) in place of r ⊙ (W_n h).

    This is the GRU of Keras with `reset_after=False`, of TensorFlow's `GRUCell` and of the zoneout
    paper. No order of the weights makes it the GRU of PyTorch. It computes one step; zoneout comes
    from `ZoneoutCell`.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.

    >>> import torch, zoneout as zo
    >>> cell = zo.ZoneoutCell(zo.ResetFirstGRUCell(10, 20), rates=0.1)
    >>> h = cell(torch.randn(4, 10), torch.zeros(4, 20))
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next h [B, H] from x [B, input_size] and h [B, H]."""
        x_r, x_z, x_n = nn.functional.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        u_r, u_z, u_n = self.weight_hh.chunk(3)
        r, z = (x_r + h @ u_r.T).sigmoid(), (x_z + h @ u_z.T).sigmoid()
        return z * h + (1 - z) * (x_n + (r * h) @ u_n.T).tanh()


class OutputFirst(nn.Module):
    """A cell whose state also carries its output, so that the output can be left without zoneout.

    Tacotron-2 in TensorFlow, OpenSeq2Seq and Haste's `ZoneoutWrapper` return h before zoneout and
    carry h after zoneout to the next step. Here the state is (output, h, …), and `ZoneoutCell` gets
    one rate for each: 0 for the output. So h is the second state and c the third, and their masks
    are not those of an `LSTMCell` with the same seed.

    Args:
        cell: a module `(x, state) -> state` whose state is a tuple, such as `nn.LSTMCell`.

    >>> import torch, zoneout as zo
    >>> cell = zo.ZoneoutCell(zo.OutputFirst(torch.nn.LSTMCell(10, 20)), rates=(0.0, 0.1, 0.1))
    >>> y, h, c = cell(torch.randn(4, 10), (torch.zeros(4, 20),) * 3)
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return (output, h, …) from x and the state (output, h, …)."""
        h, *rest = self.cell(x, state[1:])
        return h, h, *rest


# --- the functions --------------------------------------------------------------------------------


def load_arrays(
    layer: Module,
    kernel: Array,
    recurrent: Array | None = None,
    bias: Array | None = None,
    recurrent_bias: Array | None = None,
    *,
    order: str,
    forget_bias: float = 0.0,
    index: int = 0,
    reverse: bool = False,
) -> Module:
    """Load matrices [in, gates · H] with the gates in any order.

    Args:
        layer: an `LSTM`, `GRU`, `RNN` or cell of this package or of `torch.nn`, without norm and
            projection; or a `ResetFirstGRUCell`.
        kernel: the matrix of the input [in, gates · H]; without `recurrent` both matrices in one
            array [in + H, gates · H], input rows first.
        recurrent: the matrix of h, [H, gates · H].
        bias: one number per gate and unit, [gates · H]; None is zero.
        recurrent_bias: the same beside `recurrent`, for toolkits with two biases.
        order: the gates of the last axis by their letters, such as `"igfo"`.
        forget_bias: what the toolkit adds to the forget gate at run time.
        index: the layer of a stack that is loaded, from 0.
        reverse: True loads its backward direction.

    Returns:
        `layer`.

    >>> import numpy as np, zoneout as zo
    >>> layer = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.1, hidden=0.1))
    >>> tensorflow_kernel, bias = np.ones((7, 16)), np.zeros(16)
    >>> _ = zo.load_arrays(layer, tensorflow_kernel, bias=bias, order="igfo", forget_bias=1.0)
    """
    arrays = (kernel, recurrent, bias, recurrent_bias)
    return _load(layer, _kind(layer), arrays, order, forget_bias, _suffix(layer, index, reverse))


def _load(
    layer: Module,
    kind: str,
    arrays: tuple[Array, Array | None, Array | None, Array | None],
    order: str,
    forget_bias: float,
    suffix: str,
) -> Module:
    """Load the arrays of `load_arrays` into a layer with the gates of a kind."""
    kernel, recurrent, bias, recurrent_bias = arrays
    gates = GATES[kind]
    if sorted(order) != sorted(gates):
        raise ValueError(f"order: expected the gates {gates} in any order, got {order!r}")
    if forget_bias and kind != "LSTM":
        raise ValueError(f"forget_bias: expected 0 for a {kind}, got {forget_bias}")
    weight: Tensor = getattr(layer, f"weight_ih{suffix}")
    (wide, inputs), hidden = weight.shape, len(weight) // len(gates)
    if recurrent is None:
        kernel = _array("kernel", kernel, (inputs + hidden, wide))
        kernel, recurrent = kernel[:inputs], kernel[inputs:]
    first = _array("bias", 0.0 if bias is None else bias, (wide,), fill=bias is None)
    second = _array(
        "recurrent_bias",
        0.0 if recurrent_bias is None else recurrent_bias,
        (wide,),
        fill=recurrent_bias is None,
    )
    values = {
        "weight_ih": _reorder(_array("kernel", kernel, (inputs, wide)), order, gates).T,
        "weight_hh": _reorder(_array("recurrent", recurrent, (hidden, wide)), order, gates).T,
        "bias_ih": _reorder(first, order, gates),
        "bias_hh": _reorder(second, order, gates),
    }
    if forget_bias:
        values["bias_ih"][hidden : 2 * hidden] += forget_bias
    missing = [name for name in BIASES if getattr(layer, name + suffix, None) is None]
    for name in missing:
        if values.pop(name).any():
            raise ValueError(
                f"bias: expected none or zero, since {type(layer).__name__} has no {name}{suffix}, "
                "got other numbers; try a layer with bias=True"
            )
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name + suffix).copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return layer


def load_keras(layer: Module, weights: Sequence[Array], *, index: int = 0) -> Module:
    """Load what `get_weights()` of a Keras `LSTM`, `GRU` or `SimpleRNN` returns.

    A bidirectional layer takes the arrays of `Bidirectional`, forward direction first. A GRU with
    `reset_after=False` goes into a `ResetFirstGRUCell`.

    Args:
        layer: an `LSTM`, `GRU`, `RNN` or cell of this package or of `torch.nn`, without norm and
            projection; or a `ResetFirstGRUCell`.
        weights: kernel [in, gates · H], recurrent kernel [H, gates · H] and bias [gates · H], of
            each direction. The bias may be missing; a GRU with `reset_after=True` has [2, 3H].
        index: the layer of a stack that is loaded, from 0.

    Returns:
        `layer`.

    >>> import numpy as np, zoneout as zo
    >>> keras_weights = [np.ones((3, 12)), np.ones((4, 12)), np.zeros((2, 12))]
    >>> layer = zo.load_keras(zo.GRU(3, 4, batch_first=True), keras_weights)
    """
    order = {"LSTM": "ifgo", "GRU": "zrn", "RNN": "n"}[_kind(layer)]
    directions = 2 if getattr(layer, "bidirectional", False) else 1
    arrays = list(weights)
    if len(arrays) not in (2 * directions, 3 * directions):
        raise ValueError(
            f"weights: expected {3 * directions} arrays (kernel, recurrent kernel, bias), or "
            f"{2 * directions} without biases, got {len(arrays)}"
        )
    each = len(arrays) // directions
    for direction in range(directions):
        kernel, recurrent, *bias = arrays[direction * each : (direction + 1) * each]
        biases = _keras_biases(layer, *bias)
        load_arrays(
            layer, kernel, recurrent, *biases, order=order, index=index, reverse=direction == 1
        )
    return layer


def load_haste(
    layer: Module,
    weights: Mapping[str, Array],
    *,
    prefix: str = "",
    index: int = 0,
    reverse: bool = False,
) -> Module:
    """Load the weights of a Haste `LSTM` or `GRU`, of its PyTorch or TensorFlow package.

    Args:
        layer: an `LSTM`, `GRU` or cell of this package or of `torch.nn`, without norm and
            projection.
        weights: the entries `kernel` [in, gates · H], `recurrent_kernel` [H, gates · H], `bias`
            [gates · H], and of a GRU `recurrent_bias`, such as the `state_dict` of
            `haste_pytorch`. The TensorFlow package stores `kernel` with both matrices in one
            array, and both biases of a GRU end to end in `bias`.
        prefix: what stands before these names.
        index: the layer of a stack that is loaded, from 0.
        reverse: True loads its backward direction.

    Returns:
        `layer`.

    >>> import numpy as np, zoneout as zo
    >>> haste = {"kernel": np.ones((3, 16)), "recurrent_kernel": np.ones((4, 16))}
    >>> noise = zo.Zoneout(hidden=0.1)  # Haste's zoneout=0.1
    >>> layer = zo.load_haste(zo.LSTM(3, 4, noise=noise), haste | {"bias": np.zeros(16)})
    """
    kind = _kind(layer)
    if kind == "RNN":
        raise TypeError("layer: expected an LSTM or GRU, which Haste has, got an RNN")
    bias = _entry(weights, prefix, "bias")
    second = weights.get(f"{prefix}recurrent_bias")
    if kind == "GRU" and second is None:
        bias, second = _halves("bias", bias)
    return load_arrays(
        layer,
        _entry(weights, prefix, "kernel"),
        weights.get(f"{prefix}recurrent_kernel"),
        bias,
        second,
        order="igfo" if kind == "LSTM" else "zrn",
        index=index,
        reverse=reverse,
    )


def load_tensorflow(
    layer: Module,
    weights: Mapping[str, Array],
    *,
    prefix: str = "",
    forget_bias: float = 1.0,
    index: int = 0,
    reverse: bool = False,
) -> Module:
    """Load the weights of a TensorFlow 1 cell: `LSTMCell`, `BasicLSTMCell`, `GRUCell` and others.

    Args:
        layer: an `LSTM`, `RNN` or cell of this package or of `torch.nn`, without norm and
            projection; for a `GRUCell` a `ResetFirstGRUCell`; for an `LSTMCell` with peepholes a
            `Recurrent` or `RecurrentCell` of `zo.cells.peephole_lstm`.
        weights: `kernel` [in + H, gates · H] and `bias` [gates · H] of an LSTM or RNN; with
            peepholes also `w_i_diag`, `w_f_diag` and `w_o_diag` [H]; of a `GRUCell`
            `gates/kernel` and `gates/bias` for two gates, `candidate/kernel` and `candidate/bias`
            for one.
        prefix: what stands before these names, such as `"decoder/lstm_cell/"`.
        forget_bias: what an LSTM cell adds when it runs: 1.0 unless its constructor was told
            otherwise. It is not in the checkpoint.
        index: the layer of a stack that is loaded, from 0.
        reverse: True loads its backward direction.

    Returns:
        `layer`.

    >>> import numpy as np, zoneout as zo
    >>> checkpoint = {"lstm_cell/kernel": np.ones((7, 16)), "lstm_cell/bias": np.zeros(16)}
    >>> noise = zo.Zoneout(cell=0.1, hidden=0.1)
    >>> cell = zo.load_tensorflow(zo.LSTMCell(3, 4, noise=noise), checkpoint, prefix="lstm_cell/")
    """
    if getattr(layer, "definition", None) == cells.peephole_lstm:
        return _load_peepholes(layer, weights, prefix, forget_bias, _suffix(layer, index, reverse))
    kind = _kind(layer)
    if kind == "GRU":
        if not isinstance(layer, ResetFirstGRUCell):
            raise _reset_first_error(layer, "TensorFlow's GRUCell")
        parts = [
            np.concatenate(
                [
                    _numpy(_entry(weights, prefix, f"gates/{name}")),
                    _numpy(_entry(weights, prefix, f"candidate/{name}")),
                ],
                axis=-1,
            )
            for name in ("kernel", "bias")
        ]
        return load_arrays(layer, parts[0], bias=parts[1], order="rzn")
    return load_arrays(
        layer,
        _entry(weights, prefix, "kernel"),
        bias=_entry(weights, prefix, "bias"),
        order={"LSTM": "igfo", "RNN": "n"}[kind],
        forget_bias=forget_bias if kind == "LSTM" else 0.0,
        index=index,
        reverse=reverse,
    )


def _load_peepholes(
    layer: Module, weights: Mapping[str, Array], prefix: str, forget_bias: float, suffix: str
) -> Module:
    """Load TensorFlow's `LSTMCell` with peepholes into a layer of `peephole_lstm`."""
    _check_plain(layer)
    values = {}
    for gate in "ifo":
        parameter: Tensor = getattr(layer, f"p_{gate}{suffix}")
        name = f"w_{gate}_diag"
        values[parameter] = _array(name, _entry(weights, prefix, name), tuple(parameter.shape))
    kernel, bias = (_entry(weights, prefix, name) for name in ("kernel", "bias"))
    _load(layer, "LSTM", (kernel, None, bias, None), "igfo", forget_bias, suffix)
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(torch.from_numpy(value))
    return layer


def load_chainer(
    layer: Module,
    weights: Mapping[str, Array],
    *,
    prefix: str = "",
    index: int = 0,
    reverse: bool = False,
) -> Module:
    """Load the weights of a Chainer `LSTM` or `StatefulZoneoutLSTM`.

    Args:
        layer: an LSTM; see `load_arrays`.
        weights: `upward/W` [4H, in], `upward/b` and `lateral/W` [4H, H], as `save_npz` names them.
            Their rows go unit by unit: candidate, i, f, o of the first unit, then of the second.
        prefix: what stands before these names.
        index: the layer of a stack that is loaded, from 0.
        reverse: True loads its backward direction.

    Returns:
        `layer`.

    >>> import numpy as np, zoneout as zo
    >>> chainer = {"upward/W": np.ones((16, 3)), "lateral/W": np.ones((16, 4))}
    >>> layer = zo.load_chainer(zo.LSTM(3, 4), chainer | {"upward/b": np.zeros(16)})
    """
    if (kind := _kind(layer)) != "LSTM":
        raise TypeError(f"layer: expected an LSTM, got a {kind}")

    def by_gate(name: str) -> np.ndarray[Any, Any]:
        rows = _numpy(_entry(weights, prefix, name))
        if rows.ndim == 0 or len(rows) % 4:
            raise ValueError(f"{name}: expected 4 rows for each unit, got shape {rows.shape}")
        return rows.reshape(-1, 4, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape).T

    arrays = [by_gate(name) for name in ("upward/W", "lateral/W", "upward/b")]
    return load_arrays(layer, *arrays, order="gifo", index=index, reverse=reverse)


def load_torch(layer: Module, weights: Mapping[str, Tensor], *, prefix: str = "") -> Module:
    """Load a layer or cell out of the `state_dict` of a larger PyTorch model.

    It finds the weights of ESPnet, fairseq, NVIDIA's Tacotron 2, AWD-LSTM and fastai. A cell's
    weights may go into a layer of one direction, and the other way round. Of a matrix under weight
    drop it takes the true one, `weight_hh_l0_raw`, in the wrapper or in the wrapped module.

    Args:
        layer: any layer or cell of this package or of `torch.nn`.
        weights: the `state_dict`.
        prefix: what stands before the names of the parameters, such as `"lstm.0.cell."`.

    Returns:
        `layer`.

    >>> import torch, zoneout as zo
    >>> model = torch.nn.ModuleDict({"decoder": torch.nn.LSTMCell(3, 4)})
    >>> layer = zo.load_torch(zo.LSTM(3, 4), model.state_dict(), prefix="decoder.")
    """
    names = list(layer.state_dict())
    single = not any("_l1" in name or "_reverse" in name for name in names)
    found = {}
    for name in names:
        spellings = [name]
        if single:
            spellings.append(name.removesuffix("_l0") if name.endswith("_l0") else f"{name}_l0")
        places = [
            f"{prefix}{inside}{spelling}{raw}"
            for spelling in spellings
            for raw in ("_raw", "")
            for inside in ("module.", "")
        ]
        key = next((place for place in places if place in weights), None)
        if key is None:
            raise _missing_error(weights, prefix, name)
        found[name] = weights[key]
        if found[name].shape != layer.state_dict()[name].shape:
            raise ValueError(
                f"{key}: expected shape {tuple(layer.state_dict()[name].shape)}, "
                f"got {tuple(found[name].shape)}"
            )
    layer.load_state_dict(found)
    return layer


# --- checks and pieces ----------------------------------------------------------------------------


def _kind(layer: nn.Module) -> str:
    """Return "LSTM", "GRU" or "RNN"; raise if the layer is none, or has a norm or projection."""
    if isinstance(layer, ResetFirstGRUCell):
        return "GRU"
    definition = getattr(layer, "definition", None)
    kinds: dict[str, tuple[Any, tuple[type[nn.Module], ...]]] = {
        "LSTM": ((cells.lstm,), (nn.LSTM, nn.LSTMCell)),
        "GRU": ((cells.gru,), (nn.GRU, nn.GRUCell)),
        "RNN": ((cells.rnn_tanh, cells.rnn_relu), (nn.RNN, nn.RNNCell)),
    }
    for kind, (definitions, classes) in kinds.items():
        if isinstance(layer, classes) or any(definition == one for one in definitions):
            _check_plain(layer)
            return kind
    raise TypeError(
        f"layer: expected an LSTM, GRU, RNN or one of their cells, got {type(layer).__name__}"
    )


def _check_plain(layer: nn.Module) -> None:
    """Raise if a layer has a norm or a projection."""
    if getattr(layer, "norm", None) is not None or getattr(layer, "proj_size", False):
        raise ValueError("layer: expected no norm and no proj_size, got one that has them")


def _suffix(layer: nn.Module, index: int, reverse: bool) -> str:
    """Return the suffix of the parameters of one layer and direction; raise if it has none."""
    if hasattr(layer, "weight_ih"):
        suffix, fits = "", not index and not reverse
    else:
        suffix = f"_l{index}{'_reverse' if reverse else ''}"
        fits = hasattr(layer, f"weight_ih{suffix}")
    if not fits:
        raise ValueError(
            f"index, reverse: expected a layer and direction of {layer}, got {index} and {reverse}"
        )
    return suffix


def _numpy(value: Array) -> np.ndarray[Any, Any]:
    """Return a value as a float64 array of its own."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    return np.array(value, dtype=np.float64)


def _array(
    name: str, value: Array, shape: tuple[int, ...], fill: bool = False
) -> np.ndarray[Any, Any]:
    """Return a value as an array; raise if it has another shape."""
    array = np.full(shape, value) if fill else _numpy(value)
    if array.shape != shape:
        hint = "; try its transpose" if array.shape == shape[::-1] and len(shape) == 2 else ""
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}{hint}")
    return array


def _reorder(array: np.ndarray[Any, Any], theirs: str, ours: str) -> np.ndarray[Any, Any]:
    """Return the array with the blocks of its last axis in another order."""
    blocks = dict(zip(theirs, np.split(array, len(theirs), axis=-1), strict=True))
    return np.concatenate([blocks[gate] for gate in ours], axis=-1)


def _halves(name: str, array: Array) -> list[np.ndarray[Any, Any]]:
    """Return the two halves of a bias that holds two biases end to end."""
    flat = _numpy(array).reshape(-1)
    if len(flat) % 2:
        raise ValueError(f"{name}: expected two biases end to end, got {len(flat)} numbers")
    return np.split(flat, 2)


def _keras_biases(layer: nn.Module, *bias: Array) -> list[np.ndarray[Any, Any]]:
    """Return the biases of a Keras layer; raise if they are those of another kind of GRU."""
    if not bias:
        return []
    array = _numpy(bias[0])
    if _kind(layer) != "GRU":
        return [array]
    resets_first = isinstance(layer, ResetFirstGRUCell)
    if array.ndim == 1 and not resets_first:
        raise _reset_first_error(layer, "a Keras GRU with reset_after=False (its bias has one row)")
    if array.ndim == 2 and resets_first:
        raise TypeError(
            "layer: expected a GRU or GRUCell for a Keras GRU with reset_after=True (its bias has "
            "two rows), got ResetFirstGRUCell"
        )
    return list(array) if array.ndim == 2 else [array]


def _reset_first_error(layer: nn.Module, theirs: str) -> TypeError:
    return TypeError(
        f"layer: expected a ResetFirstGRUCell for {theirs}, got {type(layer).__name__}; the reset "
        "gate is applied before the product there"
    )


def _entry(weights: Mapping[str, Array], prefix: str, name: str) -> Array:
    """Return an entry of a mapping; raise if there is none."""
    if prefix + name not in weights:
        raise _missing_error(weights, prefix, name)
    return weights[prefix + name]


def _missing_error(weights: Mapping[str, Array], prefix: str, name: str) -> ValueError:
    keys = list(weights)
    shown = ", ".join(map(str, keys[:8])) + (", …" if len(keys) > 8 else "")
    return ValueError(f"weights: expected an entry {prefix + name!r}, got {shown}; try prefix=…")
