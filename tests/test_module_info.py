"""PyTorch's own inputs for RNN, LSTM, GRU and their cells, through the checks that PyTorch makes on
every module.

The inputs are the `ModuleInfo` entries of the installed torch; the checks are those of its
test_modules.py that a CPU can make. What differs, and is meant to:

* errors of a call: ours are ValueErrors that name the argument (`FORWARD_ERROR` in `test_errors`);
* TorchScript: `torch.jit.script` is refused with a sentence (`test_script`).
"""

import copy
import io
import itertools
import pickle
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

import zoneout as zo

pytest.importorskip("expecttest")  # which torch's entries need
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

NAMES = ("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell")
NOISES = {"plain": None, "zoneout": zo.Zoneout(hidden=0.4)}
close = torch.testing.assert_close


@cache
def module_infos() -> dict[str, Any]:
    """torch's entries by name, without what importing them does to the rest of the process."""
    script = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    calls = [kind.__call__ for kind in script]
    from torch.testing._internal.common_modules import module_db

    for kind, call in zip(script, calls):
        kind.__call__ = call  # type: ignore[method-assign]
    torch.backends.__allow_nonbracketed_mutation_flag = True  # type: ignore[attr-defined]
    infos = {info.name.removeprefix("nn."): info for info in module_db}
    return {name: infos[name] for name in NAMES}


class Case(NamedTuple):
    """One way to make and call a module."""

    args: tuple[Any, ...]  # of the constructor
    options: dict[str, Any]
    inputs: tuple[Any, ...]
    reference: Any  # a function of the module and the inputs: what torch holds the output to


@cache
def every_case(name: str) -> list[Case]:
    """torch's cases, in float64, packed ones included."""
    info, found = module_infos()[name], []
    given = info.module_inputs_func(
        info,
        device="cpu",
        dtype=torch.float64,
        requires_grad=False,
        training=True,
        with_packed_sequence=True,
    )
    for case in given:
        made, call = case.constructor_input, case.forward_input
        assert not call.kwargs
        found.append(Case(made.args, made.kwargs, call.args, case.reference_fn))
    return found


def cases(name: str) -> list[Case]:
    """A part of them in which every option, with and without a state, is still there."""
    return every_case(name)[:: 1 if name.endswith("Cell") else 5]


def make(name: str, case: Case, noise: Any = None, **options: Any) -> Any:
    options = {"dtype": torch.float64, **options}
    return getattr(zo, name)(*case.args, **case.options, noise=noise, **options)


def call(module: nn.Module, inputs: Any) -> list[Tensor]:
    """All tensors of what a call gives. What is drawn is the same every time."""
    torch.manual_seed(3)
    return leaves(module(*inputs))


def leaves(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (
        values
        if isinstance(values, (tuple, list)) and not isinstance(values, PackedSequence)
        else [values]
    ):
        if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
            found += leaves(value)
        else:
            found.append(value.data if isinstance(value, PackedSequence) else value)
    return found


def fresh(case: Case, change: Any = Tensor.clone) -> Any:
    """The inputs anew, those of the caller as leaves of a graph."""

    def one(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=change(value.data).detach().requires_grad_())
        if isinstance(value, tuple):
            return tuple(map(one, value))
        return change(value).detach().requires_grad_()

    return tuple(map(one, case.inputs))


def gradients(module: nn.Module, outputs: list[Tensor], inputs: Any) -> tuple[Tensor, ...]:
    """Those of the sum of squares, of the inputs and the parameters."""
    return torch.autograd.grad(
        sum(v.square().sum() for v in outputs), [*leaves(inputs), *module.parameters()]
    )


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(params=NOISES.values(), ids=NOISES)
def noise(request):
    return request.param


# --- what a module gives --------------------------------------------------------------------------


def test_forward(name, noise):
    """The output or a gradient is not what torch holds its own modules to, or not torch's own."""
    for case, training in itertools.product(every_case(name), (True, False)):
        module, inputs = make(name, case, noise).train(training), fresh(case)
        outputs = call(module, inputs)
        if not isinstance(
            case.inputs[0], PackedSequence
        ):  # torch's references are for unbatched input
            torch.manual_seed(3)
            close(outputs, leaves(case.reference(module, *case.inputs)))
        if noise is None:
            theirs = getattr(nn, name)(*case.args, **case.options, dtype=torch.float64)
            theirs.load_state_dict(module.state_dict())
            want = call(theirs, inputs)
            close(outputs, want)
            close(gradients(module, outputs, inputs), gradients(theirs, want, inputs))


def test_train_and_eval_modes_differ(name):
    """Without noise the mode makes a difference, or with it none; nothing is said about it in
    `training`.
    """
    for case in cases(name):
        for noise in NOISES.values():
            module = make(name, case, noise)
            before = call(module, case.inputs)
            module.eval()
            assert not module.training
            same = all(map(torch.equal, before, call(module, case.inputs)))
            assert same == (noise is None)


def test_non_contiguous_tensors(name, noise):
    """Inputs or parameters that lie apart in memory are read as if they did not."""

    def apart(value: Tensor) -> Tensor:
        return torch.stack((value, torch.full_like(value, torch.nan)), dim=-1)[..., 0]

    for case in cases(name):
        module = make(name, case, noise)
        found = []
        for change_inputs, change_parameters in itertools.product((Tensor.clone, apart), repeat=2):
            inputs = fresh(case, change_inputs)
            for parameter in module.parameters():
                parameter.data = change_parameters(parameter.data)
            outputs = call(module, inputs)
            found.append((outputs, gradients(module, outputs, inputs)))
        assert not apart(torch.ones(2)).is_contiguous()
        for other in found[1:]:
            close(other, found[0])


# --- derivatives ----------------------------------------------------------------------------------


def differentiated(module: nn.Module, case: Case) -> tuple[Any, list[Tensor]]:
    """The module as a function of tensors, inputs and parameters, for torch's checks of
    derivatives.
    """
    names = [name for name, _ in module.named_parameters()]
    count = len(leaves(case.inputs))

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = iter(tensors[:count])

        def one(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return value._replace(data=next(values))
            return tuple(map(one, value)) if isinstance(value, tuple) else next(values)

        inputs = tuple(map(one, case.inputs))
        torch.manual_seed(3)
        return tuple(
            leaves(torch.func.functional_call(module, dict(zip(names, tensors[count:])), inputs))
        )

    return function, [*leaves(fresh(case)), *module.parameters()]


def test_grad(name):
    """A derivative, of an input or a parameter, is not that of the output."""
    for case in cases(name):
        function, tensors = differentiated(make(name, case, NOISES["zoneout"]), case)
        assert gradcheck(function, tensors, fast_mode=True)


def test_second_derivative(name):
    """A second derivative of the reference, or of the fused backend, is wrong."""
    case = every_case(name)[1]  # with a state
    for backend in ("reference", "cpu"):
        module = make(name, case, NOISES["zoneout"], backend=backend)
        function, tensors = differentiated(module, case)
        assert gradgradcheck(function, tensors, fast_mode=True)


# --- where and in which type a module is ----------------------------------------------------------


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factory_keywords(name, noise, dtype):
    """A parameter or buffer is made on another device, or in another type, than asked for."""
    for case in cases(name):
        module = make(name, case, noise, device="meta", dtype=dtype)
        assert {(v.device.type, v.dtype) for v in tensors_of(module)} == {("meta", dtype)}
        with torch.device("meta"):
            module = make(name, case, noise, dtype=dtype)
        assert {(v.device.type, v.dtype) for v in tensors_of(module)} == {("meta", dtype)}


def test_to(name, noise):
    """`.to` leaves something behind, makes other parameters of them, or the module does not run
    any more.
    """
    for case, swap in itertools.product(cases(name), (False, True)):
        module = make(name, case, noise).eval()
        want, before = (
            [v.detach() for v in call(module, case.inputs)],
            list(map(id, module.parameters())),
        )
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            module.to(torch.float32)
            assert {v.dtype for v in tensors_of(module)} == {torch.float32}
            inputs = tree_map_only(
                Tensor, lambda v: v.float() if v.is_floating_point() else v, case.inputs
            )
            close([v.double() for v in call(module, inputs)], want, rtol=1e-4, atol=1e-5)
            module.to(torch.float64).to(memory_format=torch.channels_last)
            close(call(module, case.inputs), want, rtol=1e-4, atol=1e-5)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert list(map(id, module.parameters())) == before


def test_to_empty(name, noise):
    """A module that was made on no device gets none, or is not what it was once its weights have
    been loaded.
    """
    for case in cases(name):
        module = make(name, case, noise)
        empty = make(name, case, noise, device="meta").to_empty(device="cpu")
        assert {v.device.type for v in tensors_of(empty)} == {"cpu"}
        empty.load_state_dict(module.state_dict())
        for mode in (True, False):
            close(call(empty.train(mode), case.inputs), call(module.train(mode), case.inputs))


# --- copies ---------------------------------------------------------------------------------------


def test_pickle_and_copies(name, noise):
    """A module that was pickled, copied or saved gives something else."""
    for case in cases(name):
        module = make(name, case, noise)
        want = call(module, case.inputs)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (
            pickle.loads(pickle.dumps(module)),
            copy.deepcopy(module),
            torch.load(file, weights_only=False),
        ):
            close(call(other, case.inputs), want)
            assert repr(other) == repr(module)


def test_state_dict(name, noise):
    """A checkpoint does not go from one module to another, or has other entries than torch's."""
    for case, assign in itertools.product(cases(name), (False, True)):
        module, other = (make(name, case, noise) for _ in range(2))
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert list(saved) == list(getattr(nn, name)(*case.args, **case.options).state_dict())
        assert other.load_state_dict(saved, assign=assign) == ([], [])
        close(call(other, case.inputs), call(module, case.inputs))


# --- errors ---------------------------------------------------------------------------------------


def test_errors(name):
    """What torch refuses is taken. In a call our error is a ValueError, with words of its own."""
    info = module_infos()[name]
    kinds = {"device": "cpu", "dtype": torch.float64, "requires_grad": False, "training": True}
    for wrong in info.module_error_inputs_func(info, **kinds):
        made, called = (
            wrong.module_error_input.constructor_input,
            wrong.module_error_input.forward_input,
        )
        if wrong.error_on.name == "CONSTRUCTION_ERROR":
            with pytest.raises(wrong.error_type, match=wrong.error_regex):
                getattr(zo, name)(*made.args, **made.kwargs)
        else:
            module = getattr(zo, name)(*made.args, **{"dtype": torch.float64, **made.kwargs})
            with pytest.raises(ValueError, match=r"^(input|hx|hx\[\d\]): expected .*, got "):
                module(*called.args, **called.kwargs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_script(name):
    """TorchScript ends in an error that does not say what there is in its place."""
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.script(make(name, cases(name)[0]))
