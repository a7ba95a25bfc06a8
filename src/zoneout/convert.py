"""Add noise to an existing model (`convert`) and remove it again (`revert`).

Both functions replace recurrent modules. The replacement, called the twin, gets everything of the
old module: the same Parameter objects, the hooks and their handles, the training mode, and all
other attributes. Optimizers, tied weights and DDP therefore stay valid.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.nn.utils import parametrize

from .definition import Definition
from .fits import restrict
from .layers import GRU, LSTM, RNN, Recurrent
from .noise import Noise
from .noise_checks import as_noises
from .recurrent import RecurrentModule
from .step_cells import GRUCell, LSTMCell, RecurrentCell, RNNCell
from .subclasses import BACK, TWINS, base_of, obstacle, rebased, statement, users_class
from .wrap import ZoneoutCell

NAMES = {theirs.__name__ for theirs in TWINS}

Report = Callable[[str], None]
Model = TypeVar("Model", bound=nn.Module)


class Plan(NamedTuple):
    """The planned change of one recurrent module."""

    twin: nn.Module | None  # the replacement; None keeps the module as it is
    said: str  # the sentence for the report
    noise: Any = None  # the noise of the twin
    whole: bool = True  # False if a part of the noise is dropped


_log = logging.getLogger("zoneout")


@overload
def convert(
    model: nn.LSTM, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> LSTM: ...
@overload
def convert(
    model: nn.GRU, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> GRU: ...
@overload
def convert(
    model: nn.RNN, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> RNN: ...
@overload
def convert(
    model: nn.LSTMCell, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> LSTMCell: ...
@overload
def convert(
    model: nn.GRUCell, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> GRUCell: ...
@overload
def convert(
    model: nn.RNNCell, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> RNNCell: ...
@overload
def convert(
    model: Model, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> Model: ...
def convert(
    model: nn.Module, noise: Noise | Iterable[Noise] | None, *, report: Report | None = None
) -> nn.Module:
    """Replace every recurrent module of `torch.nn` in `model` by its zoneout counterpart, in place.

    This covers `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells. Weights, hooks, training mode, dtype
    and device are kept. A module that is registered twice stays one module. Modules of zoneout that
    are already in the model only get the new noise.

    Args:
        model: the model to change.
        noise: a noise, a list of noises, or None.
        report: a function that is called with one sentence for each recurrent module, for example
            `print`. Without it, changes are logged (logger "zoneout", level INFO), and a warning
            says what could not be done.

    Returns:
        The model. If `model` is itself a recurrent module, it cannot change in place: use the
        returned module.

    Noise that does not apply to a module, such as a cell rate in a GRU, is dropped there. A
    replaced cell does not get noise that needs a seed or a step, because the model does not pass
    them.

    A user's subclass that only adds methods becomes the same class with zoneout's layer as its
    base. For other subclasses the report says what to write. These modules are left alone:
    parametrized, pruned, scripted, quantized or patched ones, and a cell inside a `ZoneoutCell`.

    If an error is raised, the model is unchanged.

    >>> import torch, zoneout as zo
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.GRU(8, 16))
    >>> model = zo.convert(model, zo.Zoneout(cell=0.1, hidden=0.1), report=print)
    1: GRU replaced, with Zoneout(hidden=0.1); dropped Zoneout's cell (a GRU has no cell)
    """
    noises = as_noises(noise)
    _check_model(model)
    wrapped = {m.cell for m in model.modules() if isinstance(m, ZoneoutCell)}

    def plan(name: str, module: nn.Module) -> Plan | None:
        if not _is_recurrent(module):
            return None
        if module in wrapped:
            return Plan(None, "left alone, the ZoneoutCell around it has rates of its own")
        if isinstance(module, RecurrentModule):
            return _with_new_noise(module, noises)
        if why := _why_not(module, name) or _patched(module):
            return Plan(None, why)
        return _replacement(module, noises)

    if not any(_is_recurrent(module) for module in model.modules()):
        said = "the model: there is no LSTM, GRU or RNN in it, and nothing was replaced"
        report(said) if report is not None else warnings.warn(said, stacklevel=2)
    return _replace(model, plan, report)


class Fitting(NamedTuple):
    """The part of a noise that applies to a module."""

    noise: Any
    said: str  # this noise in the report
    missing: str  # what was dropped, in the report
    whole: bool  # nothing was dropped


def _fitting(
    noises: tuple[Noise, ...], cell: Definition, torch_name: str, one_step: bool, told: bool
) -> Fitting | Plan:
    """Return the part of the noises that applies to a module, or a plan to leave it alone.

    The arguments are those of `misfits`.
    """
    fitting, dropped = restrict(noises, cell, torch_name, one_step, told)
    missing = f"; dropped {', '.join(dropped)}" if dropped else ""
    if dropped and not fitting:
        return Plan(None, f"left alone, no part of the noise applies{missing}")
    noise = fitting[0] if len(fitting) == 1 else fitting or None
    said = ", ".join(str(one) for one in fitting) or "no noise"
    return Fitting(noise, said, missing, not dropped)


def _with_new_noise(module: RecurrentModule, noises: tuple[Noise, ...]) -> Plan:
    """Return the plan for a module of zoneout, of which only the noise changes."""
    fit = _fitting(noises, module.definition, module.torch_name, module.one_step, told=True)
    if isinstance(fit, Plan):
        return fit
    module.check_noise(fit.noise)
    said = f"is already a zoneout module, now with {fit.said}{fit.missing}"
    return Plan(module, said, fit.noise, fit.whole)


def _replacement(module: nn.Module, noises: tuple[Noise, ...]) -> Plan:
    """Return the plan for a module of torch that can be replaced, if nothing is in the way."""
    cls: Any = rebased(type(module))
    fit = _fitting(noises, cls.family, cls.kind.upper(), cls.one_step, told=False)
    if isinstance(fit, Plan):
        return fit
    base: Any = base_of(cls)
    twin = base(**_arguments(module), device="meta", noise=fit.noise)
    if attribute := _in_the_way(module, twin):
        why = f"left alone, its {attribute!r} would replace an attribute of zoneout's layers"
        return Plan(None, why)
    if any(getattr(module, name).shape != weight.shape for name, weight in twin.named_parameters()):
        sizes = f"the shapes of an nn.{base.__name__} of its sizes"
        return Plan(None, f"left alone, its weights do not have {sizes}")
    by = "" if cls is base else f" by the same class on zo.{base.__name__}"
    said = f"replaced{by}, with {fit.said}{fit.missing}"
    return Plan(_of_class(cls, twin), said, fit.noise, fit.whole)


@overload
def revert(model: LSTM, *, report: Report | None = None) -> nn.LSTM: ...
@overload
def revert(model: GRU, *, report: Report | None = None) -> nn.GRU: ...
@overload
def revert(model: RNN, *, report: Report | None = None) -> nn.RNN: ...
@overload
def revert(model: LSTMCell, *, report: Report | None = None) -> nn.LSTMCell: ...
@overload
def revert(model: GRUCell, *, report: Report | None = None) -> nn.GRUCell: ...
@overload
def revert(model: RNNCell, *, report: Report | None = None) -> nn.RNNCell: ...
@overload
def revert(model: Model, *, report: Report | None = None) -> Model: ...
def revert(model: nn.Module, *, report: Report | None = None) -> nn.Module:
    """Replace the zoneout modules in `model` by those of `torch.nn`, in place: undo `convert`.

    Weights, hooks, training mode, dtype and device are kept; the noise is removed. A layer with a
    norm or a learned initial state has no equivalent in `torch.nn` and is left alone.

    Args:
        model: the model to change.
        report: as in `convert`.

    Returns:
        The model, or its replacement if `model` is itself a recurrent module.

    >>> import torch, zoneout as zo
    >>> zo.revert(zo.convert(torch.nn.GRU(8, 16), zo.Zoneout(hidden=0.1)))
    GRU(8, 16)
    """
    _check_model(model)

    def plan(name: str, module: nn.Module) -> Plan | None:
        if not isinstance(module, RecurrentModule):
            return None
        if isinstance(module, (Recurrent, RecurrentCell)):
            return Plan(None, f"left alone, torch.nn has no layer of the cell {module.cell_name!r}")
        cls = BACK.get(type(module)) or users_class(type(module))
        if cls is None:
            changed = _changed(module)
            return Plan(
                None,
                changed or f"left alone, {type(module).__name__} is a subclass of a zoneout layer",
            )
        if why := _patched(module):
            return Plan(None, why)
        if module.norm is not None or module.learn_initial_state:
            return Plan(
                None,
                "left alone, torch.nn has no norm inside the step and no learned initial state",
            )
        base: Any = base_of(cls)
        twin = base(**_arguments(module), device="meta")
        return Plan(
            _of_class(cls, twin), f"replaced by {'torch.nn' if cls is base else cls.__module__}'s"
        )

    return _replace(model, plan, report)


# --- which modules are replaced -------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    """Raise if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")


def _is_recurrent(module: nn.Module) -> bool:
    """Return True for recurrent layers and cells, including scripted and quantized ones."""
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase, RecurrentModule)):
        return True
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name in NAMES
    return type(module).__name__ in NAMES and type(module).__module__.startswith("torch.ao.nn")


def _changed(module: nn.Module) -> str | None:
    """Return why a module is left alone that torch has scripted, quantized or otherwise changed."""
    if isinstance(module, torch.jit.ScriptModule):
        return "left alone, it is scripted; convert the model before scripting it"
    if type(module).__module__.startswith("torch.ao.nn"):
        return "left alone, it is quantized"
    if parametrize.is_parametrized(module):
        return "left alone, it is parametrized; convert the model before parametrizing it"
    return _SHARDED if _is_sharded(module) else None


def _why_not(module: nn.Module, name: str) -> str | None:
    """Return why a torch.nn module, or a user's subclass of one, cannot be replaced, or None.

    Where the user can change the code instead, the sentence says what to write.
    """
    if type(module) in TWINS:
        return None
    if why := _changed(module):
        return why
    if (problem := obstacle(type(module))) is None:
        return None
    if problem.remedy == "base":
        old, new = statement(type(module))
        remedy = f"; write these two lines, the second in place of  {old}  and convert again:\n"
        return f"left alone, {problem.why}{remedy}    import zoneout as zo\n    {new}"
    if problem.remedy == "layer":
        return f"left alone, {problem.why}; {_plain_layer(module, name)}"
    return f"left alone, {problem.why}"


def _plain_layer(module: nn.Module, name: str) -> str:
    """Return the two lines of code that replace a module of a user's class by a zoneout layer."""
    base: Any = base_of(type(module))
    ours = TWINS[base]
    defaults = inspect.signature(ours).parameters
    arguments = _arguments(module) | (
        {"dropout": module.dropout} if isinstance(module, nn.RNNBase) else {}
    )
    shown = [
        f"{key}={value!r}" for key, value in arguments.items() if value != defaults[key].default
    ]
    like = "weight_ih_l0" if isinstance(module, nn.RNNBase) else "weight_ih"
    more = (
        module.state_dict().keys() - base(**_arguments(module), device="meta").state_dict().keys()
    )
    find, put = (
        (f"model.get_submodule({name!r})", f"model.set_submodule({name!r}, new)")
        if name
        else ("model", "model = new")
    )
    return (
        f"for a plain zo.{ours.__name__} in its place, without its methods, write these two lines "
        "and convert again:\n"
        f"    old = {find}; new = "
        f"zo.{ours.__name__}({', '.join(shown)}).to(old.{like}).train(old.training)\n"
        f"    new.load_state_dict(old.state_dict(){', strict=False' if more else ''}); {put}"
    )


def _patched(module: nn.Module) -> str | None:
    """Return why a module of a replaceable class still cannot be replaced, or None."""
    names = getattr(module, "_flat_weights_names", None)
    if names is None:
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])]
    if any(type(module._parameters.get(name)) is not nn.Parameter for name in names):
        return (
            "left alone, a weight is not a plain parameter (weight norm, pruning or sharding); "
            "convert first"
        )
    if "forward" in module.__dict__:
        return "left alone, its forward was replaced"
    if module._compiled_call_impl is not None:
        return _COMPILED
    return None


_COMPILED = "left alone, it is compiled; convert the model before compiling it"
_SHARDED = (
    "left alone, the model is sharded, and FSDP refers to its modules; convert the model before "
    "sharding it"
)


def _is_sharded(module: nn.Module) -> bool:
    """Return True if FSDP has sharded a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing can be sharded
    return fsdp is not None and isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))


# --- twins ----------------------------------------------------------------------------------------


def _arguments(module: Any) -> dict[str, Any]:
    """Return the constructor arguments of a module, without `dropout`, device and dtype."""
    names = ["input_size", "hidden_size", "bias"]
    if isinstance(module, nn.RNNBase):
        names += ["num_layers", "batch_first", "bidirectional"]
        if isinstance(module, (nn.LSTM, LSTM)):
            names.append("proj_size")
    if isinstance(module, (nn.RNN, nn.RNNCell, RNN, RNNCell)):
        names.append("nonlinearity")
    return {name: getattr(module, name) for name in names}


def _own(module: nn.Module) -> set[str]:
    """Return the names of the attributes that a user has added to a module.

    These are the attributes that a newly built module of the base class does not have.
    """
    base: Any = base_of(type(module))
    fresh = base(**_arguments(module), device="meta")
    parts = ("_parameters", "_buffers", "_modules")
    added = module.__dict__.keys() - fresh.__dict__.keys()
    if isinstance(module, RecurrentModule):
        added.discard("recompute")
    return added.union(
        *(getattr(module, part).keys() - getattr(fresh, part).keys() for part in parts)
    )


def _of_class(cls: type[nn.Module], module: nn.Module) -> nn.Module:
    """Return the module as an instance of `cls`, without calling the constructor of `cls`.

    That constructor may take any arguments, and it has already run for the module that is replaced.
    """
    instance = object.__new__(cls)
    instance.__dict__.update(module.__dict__)
    return instance


def _in_the_way(module: nn.Module, twin: nn.Module) -> str | None:
    """Return the name of an attribute that the user added and that the twin's class also uses."""
    return next((name for name in sorted(_own(module)) if hasattr(twin, name)), None)


def _take_over(twin: Any, module: nn.Module, noise: Any) -> None:
    """Move everything that the module has to its twin."""
    added = _own(module)
    for name, value in module.__dict__.items():
        if (
            "_hooks" in name
            or name in ("training", "dropout", "_is_full_backward_hook")
            or name in added
        ):
            twin.__dict__[name] = value  # the same hook dicts, so that handles still remove hooks
        if "_hooks" in name and isinstance(value, dict):
            for hook in value.values():
                if isinstance(getattr(hook, "module", None), weakref.ref):
                    hook.module = weakref.ref(twin)  # this kind of hook receives its module
    twin._parameters.update(module._parameters)
    twin._modules.update(module._modules)
    twin._buffers.update(module._buffers)
    twin._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    if isinstance(module, nn.RNNBase):
        # torch cannot swap a parameter that has weak references. The old module runs without them.
        module._flat_weight_refs = [None] * len(module._flat_weights_names)
    if isinstance(twin, nn.RNNBase):
        twin._init_flat_weights()
    if isinstance(twin, RecurrentModule):
        twin.noise = noise


# --- replacement ----------------------------------------------------------------------------------


def _replace(
    model: nn.Module, plan: Callable[[str, nn.Module], Plan | None], report: Report | None
) -> nn.Module:
    """Plan the change of every module, then replace the modules by their twins.

    All plans are made before the first change, so an error leaves the model unchanged.
    """
    plans: dict[nn.Module, Plan] = {}
    names: dict[nn.Module, str] = {}
    compiled = {m._orig_mod for m in model.modules() if hasattr(m, "_orig_mod")}
    sharded = any(map(_is_sharded, model.modules()))
    for name, module in model.named_modules():
        try:
            planned = plan(name, module)
        except ValueError as error:
            where = f"in {name!r}" if name else "in the model"
            raise ValueError(
                f"{error} ({where}, a {type(module).__name__}; nothing was replaced)"
            ) from None
        if planned is not None:
            stays = planned.twin is None or planned.twin is module
            why = (
                None
                if stays
                else _COMPILED
                if module in compiled
                else _SHARDED
                if sharded
                else None
            )
            plans[module] = planned if why is None else Plan(None, why)
            names[module] = name

    said = [(f"{names[m] or 'the model'}: {_name_of(m)} {p.said}", p) for m, p in plans.items()]
    for sentence, planned in said:  # before any change: a warning filter may raise an error here
        if report is None and (planned.twin is None or not planned.whole):
            warnings.warn(sentence, stacklevel=3)

    twins: dict[nn.Module, nn.Module] = {}
    for module, (twin, _, noise, _) in plans.items():
        if isinstance(module, RecurrentModule) and twin is module:
            module.noise = noise
        elif twin is not None:
            _take_over(twin, module, noise)
            twins[module] = twin
    for parent in [*model.modules(), *twins.values()]:
        _put_in_place(parent, twins)

    for sentence, planned in said:
        if report is not None:
            report(sentence)
        elif planned.twin is not None:
            _log.info(sentence)
    return twins.get(model, model)


def _put_in_place(parent: nn.Module, twins: dict[nn.Module, nn.Module]) -> None:
    """Replace the modules by their twins in all attributes of the parent.

    This covers registered submodules, plain attributes, and containers nested in them.
    """
    seen: set[int] = set()

    def put(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return twins.get(value, value)
        if (
            isinstance(value, MethodType)
            and isinstance(value.__self__, nn.Module)
            and value.__self__ in twins
        ):
            return getattr(twins[value.__self__], value.__name__)
        if isinstance(value, (tuple, frozenset)):
            new = [*map(put, value)]
            if all(one is other for one, other in zip(new, value)):
                return value
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        if isinstance(value, partial):
            parts = (value.func, *value.args, *value.keywords.values())
            func, *rest = map(put, parts)
            if all(one is other for one, other in zip((func, *rest), parts)):
                return value
            count = len(value.args)
            return type(value)(func, *rest[:count], **dict(zip(value.keywords, rest[count:])))
        if isinstance(value, (list, deque, dict, set)) and id(value) not in seen:
            seen.add(id(value))
            for key, old in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (new := put(old)) is old:
                    continue
                if isinstance(value, set):
                    value.remove(old)
                    value.add(new)
                else:
                    value[key] = new
        return value

    for name, value in list(parent.__dict__.items()):
        if (new := put(value)) is not value:
            parent.__dict__[name] = new


def _name_of(module: nn.Module) -> str:
    """Return the class name of a module; for a scripted module, the name of the original class."""
    return (
        module.original_name
        if isinstance(module, torch.jit.ScriptModule)
        else type(module).__name__
    )
