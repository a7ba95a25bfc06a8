"""Export to ONNX: by plain torch.onnx.export, and as ONNX's own operators where nothing is replaced in a step.

What noises, norms and resets become is in test_ecosystem.py.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zoneout as zo
from zoneout import ops

STEPS, BATCH, INPUT, HIDDEN = 6, 4, 3, 5
MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
# Torch's exporter and the packages behind it warn about each other's future.
pytestmark = pytest.mark.filterwarnings("ignore")

OFF = zo.Zoneout(hidden=0.3, at_eval="off")
TWO_WAYS: dict[str, Any] = dict(num_layers=2, bidirectional=True)


class Together(nn.Module):
    """Several layers in one model, since most of the time goes into starting an export."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, states: list[Any], lengths: Tensor) -> Any:
        bare = [layer(x) for layer in self.layers[1:]]
        return bare, [layer(x, hx, lengths=lengths) for layer, hx in zip(self.layers, states)]


def states_of(layer: Any) -> Any:
    h = torch.randn(len(layer.suffixes()), BATCH, HIDDEN)
    return (h, torch.randn_like(h)) if layer.kind == "lstm" else h


def in_onnxruntime(model: nn.Module, args: tuple[Any, ...], path: Path) -> None:
    """Hold what onnxruntime computes to the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {value.name: leaf.numpy() for value, leaf in zip(session.get_inputs(), tree_leaves(args), strict=True)}
    for got, want in zip(session.run(None, given), tree_leaves(model(*args)), strict=True):
        found = torch.from_numpy(got)
        assert found.shape == want.shape and found.dtype == want.dtype
        assert (found - want).norm() <= ops.TOLERANCES[want.dtype] * want.norm() + 1e-30


def exported(model: nn.Module, args: tuple[Any, ...], path: Path, **options: Any) -> list[str]:
    """Export by torch's own function, compare in onnxruntime, and return the graph's operators."""
    import onnx

    torch.onnx.export(model.eval(), args, path, verbose=False, **options)
    in_onnxruntime(model, args, path)
    return [node.op_type for node in onnx.load(path).graph.node]


@needs_onnx
def test_a_layer_without_noise_is_onnxs_own_operator(tmp_path):
    """A layer that replaces nothing runs as a Scan, several times slower, or as an operator that computes another."""
    layers = (
        zo.LSTM(INPUT, HIDDEN, **TWO_WAYS),
        zo.LSTM(INPUT, HIDDEN, bias=False, noise=zo.Zoneout(cell=0.0, hidden=0.0)),
        zo.GRU(INPUT, HIDDEN, noise=[OFF, zo.VariationalDropout(input=0.2, hidden=0.2)], bidirectional=True),
        zo.RNN(INPUT, HIDDEN, noise=zo.WeightDrop(rate=0.2), bidirectional=True),
        zo.RNN(INPUT, HIDDEN, nonlinearity="relu", bias=False),
    )
    states = [states_of(layer) for layer in layers]
    args = torch.randn(STEPS, BATCH, INPUT), states, torch.tensor([6, 0, 3, 1])
    found = exported(Together(*layers), args, tmp_path / "model.onnx")
    assert [found.count(name) for name in ("LSTM", "GRU", "RNN", "Scan")] == [6, 4, 6, 0]


@needs_onnx
def test_own_operators_take_any_batch_and_half_precision(tmp_path):
    """An operator is tied to the sizes it was exported with, or gives float32 where the layer gives float16."""
    dynamic = torch.export.Dim.DYNAMIC
    layer, path = zo.LSTM(INPUT, HIDDEN, bidirectional=True, dtype=torch.float16).eval(), tmp_path / "model.onnx"
    x = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float16)
    assert "Scan" not in exported(layer, (x,), path, dynamic_shapes=({0: dynamic, 1: dynamic},))
    in_onnxruntime(layer, (torch.randn(9, 2, INPUT, dtype=torch.float16),), path)


@needs_onnx
def test_what_onnxs_operators_cannot_say_is_a_scan(tmp_path):
    """A projection, every c_t, a norm or float64 goes to an operator that has no place for it."""
    layers = [
        (zo.LSTM(INPUT, HIDDEN, proj_size=2), {}),
        (zo.LSTM(INPUT, HIDDEN), {"return_cells": True}),
        (zo.GRU(INPUT, HIDDEN, norm="layer"), {}),
        (zo.GRU(INPUT, HIDDEN).double(), {}),
    ]
    model = nn.ModuleList(layer for layer, _ in layers)
    model.forward = lambda x: [layer(x.to(layer.weight_ih_l0.dtype), **call) for layer, call in layers]
    assert exported(model, (torch.randn(STEPS, BATCH, INPUT),), tmp_path / "model.onnx").count("Scan") == 4


# --- plain torch.onnx.export -----------------------------------------------------------------------


@needs_onnx
def test_plain_export_says_what_cannot_be_exported(tmp_path):
    """A model that draws, or the older exporter, ends in torch's words about a missing operator."""
    layer, x = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1)), torch.randn(STEPS, BATCH, INPUT)
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"model draws noise.*call model\.eval\(\)"):
        torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", verbose=False)
    with pytest.raises(NotImplementedError, match=r"dynamo=False.*zoneout\.onnx\.export"):
        torch.onnx.export(nn.Sequential(layer).eval(), (x,), tmp_path / "layer.onnx", dynamo=False)


def test_an_exporter_that_is_loaded_already_is_registered_with(monkeypatch):
    """A program that imports torch.onnx before zoneout cannot export."""
    assert torch.onnx.__name__ in sys.modules
    called = []
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(zo.onnx, "_register_refusal", lambda: called.append("torch.onnx"))
    monkeypatch.setattr(zo.onnx, "_register_translations", lambda: None)
    zo.onnx.register()
    assert called == ["torch.onnx"]


def test_a_torch_with_another_registry_still_exports():
    """A change of torch's internals makes zoneout break the export of models that have nothing to do with it."""
    from zoneout.onnx import _RegisterOnImport

    def fails() -> None:
        raise TypeError("onnx_impl() got an unexpected keyword argument")

    with pytest.warns(UserWarning, match=r"unexpected keyword.*try zoneout\.onnx\.export"):
        _RegisterOnImport({"torch.onnx": fails}).registered("torch.onnx")
