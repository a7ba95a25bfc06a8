"""The paper's models: a language model for characters or words, and a sequence classifier.

Nothing here depends on the state of torch's random generators, or changes it. Weights are a
function of the run's seed. Dropout and noise are functions of the update's seed and of their
coordinates, like the masks inside the layers.
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

from ...draws import example_ids
from ...ops import linear
from ...ops.dropout import dropout
from ...ops.weight_noise import weight_noise
from ...philox import as_seed
from ...streams import plane
from ...systems.output import GatedOutput
from .config import LAYERS, Config
from .processes import alone, memory_of, one_thread
from .stacks import LSTMS, initial_state, layers_of, parameters_of_systems, recurrent

CLASSES, PIXELS = 10, 784  # of mnist

# Random draws outside the layers: each has a layer number that no recurrent layer can have.
_INPUT, _OUTPUT, _WORDS, _OUTPUT_OF_SEQUENCE = range(LAYERS, LAYERS + 4)


class Output(NamedTuple):
    """The output of a model for one batch."""

    logits: Tensor  # language: [T, B, symbols]; images: [B, classes]
    hidden: Tensor  # [T, B, H]: the output of the recurrent part, before dropout
    state: Any  # the final recurrent state, from which the next batch can continue
    dropped: Any = None  # `hidden` after dropout, the input of the softmax


class RecurrentModel(nn.Module):
    """Base class of both models: input, recurrent layers, softmax."""

    temperature: Tensor | None

    def __init__(
        self, config: Config, inputs: int, outputs: int, steps: int, embedding: int = 0
    ) -> None:
        super().__init__()
        model = config.model
        self.weight_noise, self.dropout = config.weight_noise, model.dropout
        implied = model.dropout if embedding else 0.0
        self.input_dropout = implied if model.input_dropout is None else model.input_dropout
        # Chosen on the validation part after training; a buffer, so that it is saved.
        chosen = torch.ones(()) if config.evaluation.temperature else None
        self.register_buffer("temperature", chosen)
        self.variational = config.variational_dropout
        self.embedding = nn.Embedding(inputs, embedding) if embedding else None
        self.recurrent = recurrent(config, embedding or inputs, steps, noises(config))
        inside = getattr(self.recurrent, "softmax", None)  # the softmax of a surprisal-lstm
        size: int = self.recurrent.output_size
        # An hm-lstm has its own.
        apart = model.output > 0 and model.cell != "hm-lstm"
        sizes = [size] if model.system else model.units
        self.output = GatedOutput(sizes, model.output) if apart else None
        self.softmax = inside or nn.Linear(model.output if apart else size, outputs)
        if model.tied:
            assert self.embedding is not None
            self.softmax.weight = self.embedding.weight

    def initial_state(self, batch: int) -> Any:
        """Return the initial state of a sequence: learned, or zero."""
        return initial_state(self.recurrent, batch, self.softmax.weight)

    def begin_epoch(self, epoch: int) -> None:
        """Tell layers with a schedule of their own (the slope of an HM-LSTM) where training is."""
        for module in self.modules():
            if isinstance(module, zo.systems.HMLSTM):
                module.begin_epoch(epoch)

    def dropped(self, hidden: Tensor, seed: Tensor | None, rows: Tensor, first_step: int) -> Tensor:
        """Return the outputs of the recurrent layers after dropout."""
        hidden = self.drop(hidden, self.dropout, _OUTPUT, seed, rows, first_step)
        return self.drop(
            hidden, self.variational.output, _OUTPUT_OF_SEQUENCE, seed, rows, mask="sequence"
        )

    def logits(self, dropped: Tensor, seed: Tensor | None) -> Tensor:
        """Return the logits [T, B, outputs], the input of the softmax."""
        weight = self.noisy(self.softmax.weight, _OUTPUT, seed)
        logits = linear(dropped, weight, self.softmax.bias)
        if self.training or self.temperature is None:
            return logits
        return logits / self.temperature

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
        """Apply dropout in training mode; otherwise return `x`."""
        if not self.training or not rate:
            return x
        assert seed is not None
        return dropout(x, rate, seed, plane("dropout", where, 0), rows, first_step, mask=mask)

    def noisy(self, weight: Tensor, where: int, seed: Tensor | None) -> Tensor:
        """Return the weight matrix, in training mode with Gaussian noise added."""
        if not self.training or not self.weight_noise:
            return weight
        assert seed is not None
        return weight_noise(weight, self.weight_noise, seed, plane("weight_noise", where, 0))

    def seed(self, seed: int | Tensor | None) -> Tensor | None:
        """Return the seed as a tensor on the model's device; raise if it is None in training."""
        if seed is None and self.training:
            raise ValueError(
                "seed: expected one in training, got None; dropout and masks are drawn from the "
                "seed"
            )
        return None if seed is None else as_seed(seed, self.softmax.weight.device)


class LanguageModel(RecurrentModel):
    """Predicts the next symbol.

    >>> model = LanguageModel(Config(), symbols=50).eval()
    >>> model(torch.zeros(7, 3, dtype=torch.int64)).logits.shape
    torch.Size([7, 3, 50])
    """

    def __init__(self, config: Config, symbols: int) -> None:
        steps = config.batches.length - (config.batches.kind == "chunks")
        super().__init__(config, symbols, symbols, steps, config.model.embedding)

    def forward(
        self,
        tokens: Tensor,
        state: Any = None,
        *,
        seed: int | Tensor | None = None,
        examples: int | Tensor | None = None,
        first_step: int = 0,
    ) -> Output:
        """Return the logits of the symbol that follows each of `tokens` [T, B].

        `seed`, `examples` and `first_step` have the same meaning as in the recurrent layers.
        """
        key = self.seed(seed)
        rows = example_ids(examples, tokens.shape[1], tokens.device)
        x = tokens  # without an embedding, the layer treats integer tokens as one-hot rows
        if self.embedding is not None:
            table = self.noisy(self.embedding.weight, _INPUT, key)
            # On a GPU the backward pass of F.embedding synchronises with the host. A CUDA graph
            # must not do that, so the rows are indexed instead.
            x = table[tokens] if table.is_cuda else F.embedding(tokens, table)
            x = self.drop(x, self.input_dropout, _INPUT, key, rows, first_step)
            x = self.drop_words(x, tokens, key, rows)
        elif self.training and self.input_dropout:
            symbols = torch.arange(self.softmax.out_features, device=tokens.device)
            x = (tokens[..., None] == symbols).to(self.softmax.weight.dtype)
            x = self.drop(x, self.input_dropout, _INPUT, key, rows, first_step)
        hidden, state = self.recurrent(x, state, seed=key, examples=rows, first_step=first_step)
        if self.output is not None:
            hidden = self.output(hidden)
        dropped = self.dropped(hidden, key, rows, first_step)
        return Output(self.logits(dropped, key), hidden, state, dropped)

    def drop_words(self, x: Tensor, tokens: Tensor, seed: Tensor | None, rows: Tensor) -> Tensor:
        """Drop whole symbols in training mode: a dropped symbol is zero in its whole sequence."""
        rate = self.variational.words
        if not self.training or not rate:
            return x
        every = x.new_ones(1, len(rows), self.softmax.out_features)
        kept = self.drop(every, rate, _WORDS, seed, rows, mask="sequence")
        return x * kept[0].gather(1, tokens.t()).t()[..., None]


class Classifier(RecurrentModel):
    """Reads an image one pixel per step and classifies it from the last hidden state.

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
        """Return the logits of images [T, B, 1], whose pixels are numbers from 0 to 1."""
        key = self.seed(seed)
        rows = example_ids(examples, pixels.shape[1], pixels.device)
        hidden, state = self.recurrent(
            pixels, state, seed=key, examples=rows, first_step=first_step
        )
        last = state[0] if isinstance(state, tuple) else state  # [layers, B, H]
        dropped = self.dropped(last[-1:], key, rows, first_step)
        return Output(self.logits(dropped, key)[0], hidden, state, dropped)


def noises(config: Config) -> list[Any]:
    """Return the noises inside the layers that have a rate other than zero.

    A static mask depends on the run's seed: another seed gives another mask.
    """
    at_eval = config.evaluation.at_eval
    made: list[Any] = []
    if config.model.system:  # a system has its own
        return made
    methods: list[tuple[Any, Any]] = [
        (zo.Zoneout, config.zoneout),
        (zo.RecurrentDropout, config.recurrent_dropout),
        (zo.StateDropout, config.state_dropout),
    ]

    def seed_of(settings: Any, number: int) -> dict[str, Any]:
        return {"seed": zo.fold(config.seed, number)} if settings.mask == "static" else {}

    for number, (kind, settings) in enumerate(methods):
        fields = vars(settings) | (inspired_rates(config) if kind is zo.Zoneout else {})
        made.append(kind(**fields, **seed_of(settings, number), at_eval=at_eval))
    variational = config.variational_dropout
    made.append(
        zo.VariationalDropout(
            input=variational.input,
            hidden=variational.hidden,
            tied=variational.tied,
            at_eval=at_eval,
        )
    )
    made.append(zo.WeightDrop(rate=config.weight_drop, at_eval=at_eval))
    made.append(zo.WeightNoise(std=config.weight_noise, at_eval=at_eval))
    made.append(zo.Swapout(**vars(config.swapout), **seed_of(config.swapout, 3), at_eval=at_eval))
    made.append(zo.FastDropout(**vars(config.fast_dropout), at_eval=at_eval))
    return [noise for noise in made if noise.rules()]


def inspired_rates(config: Config) -> dict[str, Any]:
    """Return the fields of zoneout whose rates are 1 − 1/period, of groups of units; or nothing."""
    zoneout, model = config.zoneout, config.model
    if zoneout.mask == "clock" or not zoneout.periods:
        return {}
    rates = 1 - 1 / zo.systems.module_periods(model.units[0], zoneout.periods)
    return {"periods": (), "hidden": rates} | ({"cell": rates} if model.cell == "lstm" else {})


def build(config: Config, symbols: int = 0) -> LanguageModel | Classifier:
    """Build the model of a config, with weights that are a function of `config.seed`.

    `symbols` is the size of a text's vocabulary.
    """
    # torch's initialisers draw from the global generator, so its state is restored afterwards.
    with alone, torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(int(zo.fold(config.seed, _INPUT)) % 2**63)
        model = _model(config, symbols)
        initialise(model, config)
    return model


class _Undrawn(TorchFunctionMode):
    """Skip the random initialisation of nn.Embedding on the meta device.

    The first such draw on the meta device takes seconds, because torch then imports sympy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (
            kwargs["tensor"]
            if func is nn.init.normal_ and "tensor" in kwargs
            else func(*args, **kwargs)
        )


def outline(config: Config, symbols: int = 0) -> LanguageModel | Classifier:
    """Build the model of a config on the meta device: names and shapes, but no weights."""
    check(config, symbols)
    with torch.device("meta"), _Undrawn():
        return _model(config, symbols)


def check(
    config: Config, symbols: int = 1, device: torch.device | None = None, copies: int = 1
) -> None:
    """Raise if a tensor of the model is too large, or if `copies` of it do not fit in memory."""
    room = memory_of(device or torch.device("cpu"))
    needed = 4 * copies * _size(config, symbols)
    if room is not None and needed > room:
        raise ValueError(
            f"model: expected one that fits in {room / 2**30:,.1f} GiB of memory, got one that "
            f"needs at least {needed / 2**30:,.1f} GiB; try a smaller --model.hidden, "
            "--model.layers or --model.embedding"
        )


def _size(config: Config, symbols: int) -> int:
    """Return the number of elements of all parameters and buffers of a model.

    Layers of one size are counted in models of two and of three layers: with one layer, a layer
    with noise over depth would warn.
    """

    def count(config: Config) -> int:
        with torch.device("meta"), _Undrawn():
            model = _model(config, symbols)
        return sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))

    model = config.model
    try:
        if model.sizes or model.system or model.output:
            return count(config)
        if model.layers <= 2:
            return count(config)
        two, three = (count(_with_layers(config, layers)) for layers in (2, 3))
        return two + (model.layers - 2) * (three - two)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ValueError(
            "model: expected sizes that a tensor can have; try a smaller --model.hidden or "
            "--model.embedding"
        ) from error


def _with_layers(config: Config, layers: int) -> Config:
    """Return the config with another number of layers, and a rate for each."""

    def first(rate: Any) -> Any:
        return (rate * layers)[:layers] if isinstance(rate, tuple) else rate

    zoneout, variational = config.zoneout, config.variational_dropout
    fields = {name: first(getattr(zoneout, name)) for name in ("cell", "hidden", "depth")}
    if zoneout.mask == "clock":
        fields["periods"] = first(zoneout.periods)
    inside = {name: first(getattr(variational, name)) for name in ("input", "hidden")}
    return replace(
        config,
        model=replace(config.model, layers=layers),
        zoneout=replace(zoneout, **fields),
        variational_dropout=replace(variational, **inside),
        weight_drop=first(config.weight_drop),
    )


def _model(config: Config, symbols: int) -> LanguageModel | Classifier:
    return LanguageModel(config, symbols) if config.task == "language" else Classifier(config)


@torch.no_grad()
def initialise(model: RecurrentModel, config: Config) -> None:
    """Initialise weights and biases as the config says.

    Initial states and the scales of norms keep the values of their constructors.
    """
    settings = config.model
    if settings.init == "uniform":
        zo.init.uniform_(model, settings.init_bound)
    elif settings.init != "torch":
        own = {id(p) for p in parameters_of_systems(model)}
        for name, parameter in model.named_parameters():
            # The matrix of a clockwork layer has its name before ".original".
            kind = name.removesuffix(".original").rpartition(".")[2]
            if id(parameter) in own:
                continue
            if kind.startswith("bias"):
                parameter.zero_()
            elif kind.startswith("weight"):
                _matrix_(parameter, settings.init, kind.startswith("weight_hh"), settings.cell)
    if settings.embedding_bound and model.embedding is not None:
        nn.init.uniform_(
            model.embedding.weight, -settings.embedding_bound, settings.embedding_bound
        )
        model.softmax.bias.zero_()
    for layer in layers_of(model.recurrent):
        for name, parameter in layer.named_parameters():
            if name.startswith("bias_hh") and settings.one_bias:
                parameter.zero_().requires_grad_(False)
            elif name.startswith("out_bias"):
                parameter.zero_()
            elif name.startswith("bias_ih") and layer.definition in LSTMS:
                gates = layer.hidden_size
                parameter[gates : 2 * gates] += settings.forget_bias


def _matrix_(weight: Tensor, init: str, recurrent: bool, cell: str) -> None:
    if init == "block-orthogonal":
        zo.init.block_orthogonal_(weight)
        return
    zo.init.orthogonal_(weight)
    if init == "identity" and recurrent:
        # As in the paper's classifier: the candidate (g) starts as the identity, and the other
        # gates together as one orthogonal matrix.
        side = weight.shape[1]
        others = torch.empty(len(weight) - side, side)
        if len(others):
            zo.init.orthogonal_(others)
        before = {"lstm": 2, "gru": 2}.get(cell, 0) * side  # the candidate is the third block
        weight.copy_(torch.cat([others[:before], torch.eye(side), others[before:]]))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_of(output: Output, targets: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Return the loss to minimise, and the mean negative log-likelihood in nats to report."""
    nats = F.cross_entropy(at_least_float32(output.logits).flatten(0, -2), targets.flatten())
    loss = nats
    if config.loss == "sum" and config.task == "language":
        loss = loss * len(targets)
    if config.activation_penalty or config.change_penalty:
        loss = loss + zo.activation_penalty(
            at_least_float32(output.hidden),
            config.activation_penalty,
            config.change_penalty,
            dropped=at_least_float32(output.dropped),
        )
    if config.norm_stabilizer:
        loss = loss + zo.norm_stabilizer(at_least_float32(output.hidden), config.norm_stabilizer)
    return loss, nats.detach()


def loss_scale(targets: Tensor, config: Config) -> float:
    """Return the loss scale of the backward pass, which keeps fp16 gradients from underflow.

    With this scale the derivative of one prediction is at most 1/4, however many predictions the
    loss averages. That is far from both ends of the fp16 range, even for a sum of a few thousand.
    """
    if config.precision != "fp16":
        return 1.0
    return targets.numel() / (
        4 * len(targets) if config.loss == "sum" and config.task == "language" else 4
    )


def at_least_float32(x: Tensor) -> Tensor:
    """Cast half precision to float32, because losses are never computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
