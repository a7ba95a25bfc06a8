"""Regularised recurrent layers for PyTorch: LSTM, GRU and RNN with zoneout and related methods."""

from . import init, onnx
from .convert import convert, revert
from .draws import masks
from .layers import GRU, LSTM, RNN
from .noise import RecurrentDropout, StateDropout, VariationalDropout, WeightDrop, WeightNoise, Zoneout
from .norm import RecurrentBatchNorm, estimate_statistics
from .penalties import norm_stabilizer
from .philox import fold
from .step_cells import GRUCell, LSTMCell, RNNCell
from .wrap import ZoneoutCell, zoneout

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "RNNCell",
    "RecurrentBatchNorm",
    "RecurrentDropout",
    "StateDropout",
    "VariationalDropout",
    "WeightDrop",
    "WeightNoise",
    "Zoneout",
    "ZoneoutCell",
    "convert",
    "estimate_statistics",
    "fold",
    "init",
    "masks",
    "norm_stabilizer",
    "onnx",
    "revert",
    "zoneout",
]

__version__ = "0.1.0"

onnx.register()  # so that plain torch.onnx.export can translate zoneout's operators
