"""Regularised recurrent layers for PyTorch: LSTM, GRU and RNN with zoneout and related methods."""

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) - 1 :][:2] == ["-m", "zoneout"]:
    # `python -m zoneout --help` begins with this import. It answers without torch.
    from zoneout_command import answer_help

    answer_help()

from . import cells, init, onnx, systems
from .convert import convert, revert
from .definition import DefinitionError, candidate, cell, held, product, shown, update
from .draws import masks
from .layers import GRU, LSTM, RNN, Recurrent
from .load import (
    OutputFirst,
    ResetFirstGRUCell,
    load_arrays,
    load_chainer,
    load_haste,
    load_keras,
    load_tensorflow,
    load_torch,
)
from .noise import (
    FastDropout,
    RecurrentDropout,
    StateDropout,
    Swapout,
    VariationalDropout,
    WeightDrop,
    WeightNoise,
    Zoneout,
)
from .norm import RecurrentBatchNorm, estimate_statistics
from .penalties import activation_penalty, norm_stabilizer
from .philox import fold
from .schedule import RateSchedule
from .step_cells import GRUCell, LSTMCell, RecurrentCell, RNNCell
from .wrap import ZoneoutCell, zoneout

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "DefinitionError",
    "FastDropout",
    "GRUCell",
    "LSTMCell",
    "OutputFirst",
    "RNNCell",
    "RateSchedule",
    "Recurrent",
    "RecurrentBatchNorm",
    "RecurrentCell",
    "RecurrentDropout",
    "ResetFirstGRUCell",
    "StateDropout",
    "Swapout",
    "VariationalDropout",
    "WeightDrop",
    "WeightNoise",
    "Zoneout",
    "ZoneoutCell",
    "activation_penalty",
    "candidate",
    "cell",
    "cells",
    "convert",
    "estimate_statistics",
    "fold",
    "held",
    "init",
    "load_arrays",
    "load_chainer",
    "load_haste",
    "load_keras",
    "load_tensorflow",
    "load_torch",
    "masks",
    "norm_stabilizer",
    "onnx",
    "product",
    "revert",
    "shown",
    "systems",
    "update",
    "zoneout",
]

__version__ = "0.1.0"

onnx.register()  # so that plain torch.onnx.export can translate zoneout's operators
