"""The models of the paper: a language model for characters and words, and a classifier of sequences.

Nothing here draws from torch's generators: weights are a function of the run's seed, dropout and noise of the seed of
the update and of their coordinates, as the masks inside the layers are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zoneout as zo

from ..draws import example_ids
from ..noise import plane
from ..ops.dropout import dropout
from ..ops.products import linear
from ..ops.weight_noise import weight_noise
from ..philox import as_seed
from .config import LAYERS, Config
from .processes import alone, memory_of, one_thread

CLASSES, PIXELS = 10, 784  # of mnist

# Planes of the generator beyond those of any layer, one for each thing that is drawn outside the layers.
_INPUT, _OUTPUT, _WORDS, _OUTPUT_OF_SEQUENCE = range(LAYERS, LAYERS + 4)


class Output(NamedTuple):
    """What a model gives for a batch."""

    logits: Tensor  # language: [T, B, symbols]; images: [B, classes]
    hidden: Tensor  # [T, B, H]: what the last layer gives, before dropout
    state: Any  # to go on from


class RecurrentModel(nn.Module):
    """Input, recurrent layers, softmax: what both models share."""

    def __init__(self, config: Config, inputs: int, outputs: int, steps: int) -> None:
        super().__init__()
        model = config.model
        self.weight_noise, self.dropout = config.weight_noise, model.dropout
        self.variational = config.variational_dropout
        self.embedding = nn.Embedding(inputs, model.embedding) if model.embedding else None
        norms = {"none": None, "layer": "layer", "batch": zo.RecurrentBatchNorm(steps, model.norm_momentum)}
        kinds: dict[str, Any] = {"lstm": zo.LSTM, "gru": zo.GRU, "rnn": zo.RNN, "rnn-relu": zo.RNN}
        extra = {"nonlinearity": "relu"} if model.cell == "rnn-relu" else {}
        self.recurrent = kinds[model.cell](
            model.embedding or inputs,
            model.hidden,
            model.layers,
            dropout=model.dropout if model.layers > 1 else 0.0,
            noise=noises(config),
            norm=norms[model.norm],
            learn_initial_state=model.learn_initial_state,
            backend=config.backend,
            **extra,
        )
        self.softmax = nn.Linear(model.hidden, outputs)
        if model.tied:
            assert self.embedding is not None
            self.softmax.weight = self.embedding.weight

    def initial_state(self, batch: int) -> Any:
        """The state that a sequence starts from: learned, or zero."""
        layer = self.recurrent
        shape = (layer.num_layers, batch, layer.hidden_size)
        names = ("h0", "c0") if layer.mode == "LSTM" else ("h0",)
        if layer.learn_initial_state:
            states = tuple(getattr(layer, name)[:, None].expand(shape) for name in names)
        else:
            states = tuple(self.softmax.weight.new_zeros(shape) for _ in names)
        return states if len(states) > 1 else states[0]

    def logits(self, hidden: Tensor, seed: Tensor | None, rows: Tensor, first_step: int) -> Tensor:
        """The softmax's input, [T, B, outputs]."""
        hidden = self.drop(hidden, self.dropout, _OUTPUT, seed, rows, first_step)
        hidden = self.drop(hidden, self.variational.output, _OUTPUT_OF_SEQUENCE, seed, rows, mask="sequence")
        return linear(hidden, self.noisy(self.softmax.weight, _OUTPUT, seed), self.softmax.bias)

    def drop(
        self,
        x: Tensor,
        rate: float,
        where: int,
        seed: Tensor | None,
        rows: Tensor,
        first_step: int = 0,
        mask: str = "unit",
    ) -> Tensor:
        """Dropout, while training."""
        if not self.training or not rate:
            return x
        assert seed is not None
        return dropout(x, rate, seed, plane("dropout", where, 0), rows, first_step, mask=mask)

    def noisy(self, weight: Tensor, where: int, seed: Tensor | None) -> Tensor:
        """A weight matrix with Gaussian noise added, while training."""
        if not self.training or not self.weight_noise:
            return weight
        assert seed is not None
        return weight_noise(weight, self.weight_noise, seed, plane("weight_noise", where, 0))

    def seed(self, seed: int | Tensor | None) -> Tensor | None:
        if seed is None and self.training:
            raise ValueError("seed: expected one in training, since dropout and masks are drawn from it; got None")
        return None if seed is None else as_seed(seed, self.softmax.weight.device)


class LanguageModel(RecurrentModel):
    """Predicts the next symbol.

    >>> model = LanguageModel(Config(), symbols=50).eval()
    >>> model(torch.zeros(7, 3, dtype=torch.int64)).logits.shape
    torch.Size([7, 3, 50])
    """

    def __init__(self, config: Config, symbols: int) -> None:
        super().__init__(config, symbols, symbols, config.batches.length - (config.batches.kind == "chunks"))

    def forward(
        self,
        tokens: Tensor,
        state: Any = None,
        *,
        seed: int | Tensor | None = None,
        examples: int | Tensor | None = None,
        first_step: int = 0,
    ) -> Output:
        """Logits for what comes after each of `tokens` [T, B]; `seed` and the rest as the layers take them."""
        key = self.seed(seed)
        rows = example_ids(examples, tokens.shape[1], tokens.device)
        x = tokens  # which the layer takes for one-hot rows
        if self.embedding is not None:
            table = self.noisy(self.embedding.weight, _INPUT, key)
            # On a GPU the way back of F.embedding waits for the host, which a captured graph must not.
            x = table[tokens] if table.is_cuda else F.embedding(tokens, table)
            x = self.drop(x, self.dropout, _INPUT, key, rows, first_step)
            x = self.drop_words(x, tokens, key, rows)
        hidden, state = self.recurrent(x, state, seed=key, examples=rows, first_step=first_step)
        return Output(self.logits(hidden, key, rows, first_step), hidden, state)

    def drop_words(self, x: Tensor, tokens: Tensor, seed: Tensor | None, rows: Tensor) -> Tensor:
        """Dropout of whole symbols, while training: each is kept or not wherever it stands in a sequence."""
        rate = self.variational.words
        if not self.training or not rate:
            return x
        every = x.new_ones(1, len(rows), self.softmax.out_features)
        kept = self.drop(every, rate, _WORDS, seed, rows, mask="sequence")
        return x * kept[0].gather(1, tokens.t()).t()[..., None]


class Classifier(RecurrentModel):
    """Reads an image one pixel a step and classifies it from the last hidden state.

    >>> model = Classifier(Config()).eval()
    >>> model(torch.zeros(20, 3, 1)).logits.shape
    torch.Size([3, 10])
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, 1, CLASSES, PIXELS)

    def forward(
        self,
        pixels: Tensor,
        state: Any = None,
        *,
        seed: int | Tensor | None = None,
        examples: int | Tensor | None = None,
        first_step: int = 0,
    ) -> Output:
        """Logits for images [T, B, 1], each pixel a number from 0 to 1."""
        key = self.seed(seed)
        rows = example_ids(examples, pixels.shape[1], pixels.device)
        hidden, state = self.recurrent(pixels, state, seed=key, examples=rows, first_step=first_step)
        last = state[0] if isinstance(state, tuple) else state  # [layers, B, H]
        return Output(self.logits(last[-1:], key, rows, first_step)[0], hidden, state)


def noises(config: Config) -> list[Any]:
    """The noises inside the layers. A static mask is the run's own: another seed has another mask."""
    at_eval = config.evaluation.at_eval
    found: list[Any] = []
    methods: list[tuple[Any, Any]] = [
        (zo.Zoneout, config.zoneout),
        (zo.RecurrentDropout, config.recurrent_dropout),
        (zo.StateDropout, config.state_dropout),
    ]
    for number, (kind, settings) in enumerate(methods):
        own = {"seed": zo.fold(config.seed, number)} if settings.mask == "static" else {}
        found.append(kind(**vars(settings), **own, at_eval=at_eval))
    tied = config.variational_dropout
    found.append(zo.VariationalDropout(input=tied.input, hidden=tied.hidden, at_eval=at_eval))
    found.append(zo.WeightDrop(rate=config.weight_drop, at_eval=at_eval))
    found.append(zo.WeightNoise(std=config.weight_noise, at_eval=at_eval))
    return [noise for noise in found if noise.rules()]


def build(config: Config, symbols: int = 0) -> LanguageModel | Classifier:
    """The model of a config, its weights a function of `config.seed`; `symbols` is the size of a text's vocabulary."""
    # torch's own initialisers draw from the global generator: it is put back afterwards.
    with alone, torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(int(zo.fold(config.seed, _INPUT)) % 2**63)
        model = _model(config, symbols)
        initialise(model, config)
    return model


class _Undrawn(TorchFunctionMode):
    """Leaves out the draws of nn.Embedding: on the meta device the first takes torch seconds, for importing sympy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return given["tensor"] if func is nn.init.normal_ and "tensor" in given else func(*args, **given)


def outline(config: Config, symbols: int = 0) -> LanguageModel | Classifier:
    """The model of a config without its weights: what it has, and in which shapes."""
    check(config, symbols)
    with torch.device("meta"), _Undrawn():
        return _model(config, symbols)


def check(config: Config, symbols: int = 1, device: torch.device | None = None, copies: int = 1) -> None:
    """Raise if a tensor of the model would be too large, or `copies` of the model do not fit in memory."""
    room = memory_of(device or torch.device("cpu"))
    needed = 4 * copies * _size(config, symbols)
    if room is not None and needed > room:
        raise ValueError(
            f"model: expected one that has room in {room / 2**30:,.1f} GiB of memory, got one that needs at least "
            f"{needed / 2**30:,.1f}; try a smaller --model.hidden, --model.layers or --model.embedding"
        )


def _size(config: Config, symbols: int) -> int:
    """How many numbers a model consists of. From the second on its layers are alike: two of them tell it of all."""

    def count(layers: int) -> int:
        with torch.device("meta"), _Undrawn():
            model = _model(replace(config, model=replace(config.model, layers=layers)), symbols)
        return sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))

    try:
        one = count(1)
        return one + (config.model.layers - 1) * (count(2) - one if config.model.layers > 1 else 0)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ValueError(
            "model: expected sizes that a tensor can have; try a smaller --model.hidden or --model.embedding"
        ) from error


def _model(config: Config, symbols: int) -> LanguageModel | Classifier:
    return LanguageModel(config, symbols) if config.task == "language" else Classifier(config)


@torch.no_grad()
def initialise(model: RecurrentModel, config: Config) -> None:
    """Start weights and biases as the config says; initial states and the scales of norms start as they do."""
    settings = config.model
    if settings.init == "uniform":
        zo.init.uniform_(model, settings.init_bound)
    elif settings.init != "torch":
        for name, parameter in model.named_parameters():
            kind = name.rpartition(".")[2]
            if kind.startswith("bias"):
                parameter.zero_()
            elif kind.startswith("weight"):
                _matrix_(parameter, settings.init, kind.startswith("weight_hh"), settings.cell)
    gates = settings.hidden
    for name, parameter in model.recurrent.named_parameters():
        if name.startswith("bias_hh") and settings.one_bias:
            parameter.zero_().requires_grad_(False)
        elif name.startswith("bias_ih") and settings.cell == "lstm":
            parameter[gates : 2 * gates] += settings.forget_bias


def _matrix_(weight: Tensor, init: str, recurrent: bool, cell: str) -> None:
    if init == "block-orthogonal":
        zo.init.block_orthogonal_(weight)
        return
    zo.init.orthogonal_(weight)
    if init == "identity" and recurrent:
        # As the paper's classifier had it: g is the identity, the other gates are one orthogonal matrix.
        side = weight.shape[1]
        others = torch.empty(len(weight) - side, side)
        if len(others):
            zo.init.orthogonal_(others)
        before = {"lstm": 2, "gru": 2}.get(cell, 0) * side  # the candidate is the third block of both
        weight.copy_(torch.cat([others[:before], torch.eye(side), others[before:]]))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_of(output: Output, targets: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """What is minimised, and the mean negative log-likelihood in nats, which is what is shown."""
    nats = F.cross_entropy(at_least_float32(output.logits).flatten(0, -2), targets.flatten())
    loss = nats
    if config.loss == "sum" and config.task == "language":
        loss = loss * len(targets)
    if config.norm_stabilizer:
        loss = loss + zo.norm_stabilizer(at_least_float32(output.hidden), config.norm_stabilizer)
    return loss, nats.detach()


def loss_scale(targets: Tensor, config: Config) -> float:
    """What the loss is multiplied by on the way back, for derivatives that would be too small for fp16.

    Whatever the loss is a mean of, a prediction's own derivative is then at most a quarter: far from both ends of fp16,
    also where a few thousand of them are added up.
    """
    if config.precision != "fp16":
        return 1.0
    return targets.numel() / (4 * len(targets) if config.loss == "sum" and config.task == "language" else 4)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision widened: losses are not computed in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
