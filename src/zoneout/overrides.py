"""Support for arguments that are not tensors but define `__torch_function__`.

As with torch's functions, such an argument receives the call: the function and all its arguments. A
wrapper that unwraps its arguments, calls the function and wraps the results works as with torch.nn.
Tensors and their subclasses are not handled here: torch dispatches on them inside the function.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.compiler import is_compiling


def overriding(*values: Any) -> list[Any]:
    """Return the values that are not tensors and define `__torch_function__`.

    Elements of tuples and lists are included.
    """
    overriders: list[Any] = []
    for value in values:
        if value is None or isinstance(value, Tensor) or is_compiling():  # none occur in a compiler
            continue
        if isinstance(value, (tuple, list)):
            overriders += [one for one in value if not isinstance(one, Tensor) and overriding(one)]
        # An fx.Proxy is excluded: the layer raises an error for it that says what to do.
        elif hasattr(type(value), "__torch_function__") and not isinstance(value, fx.Proxy):
            overriders.append(value)
    return overriders
