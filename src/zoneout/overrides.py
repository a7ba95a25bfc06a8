"""Arguments that are no tensors but take over calls with `__torch_function__`, as torch's own functions let them.

Such an object gets the function and all its arguments: one that unwraps them, calls the function and wraps the results
works as it does with torch.nn. Tensors, subclasses too, are left to what is called with them inside.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.compiler import is_compiling


def overriding(*values: Any) -> list[Any]:
    """The values, and elements of tuples and lists, that are no tensors and have a `__torch_function__`."""
    found: list[Any] = []
    for value in values:
        if value is None or isinstance(value, Tensor) or is_compiling():  # a compiler has none of them
            continue
        if isinstance(value, (tuple, list)):
            found += [one for one in value if not isinstance(one, Tensor) and overriding(one)]
        elif hasattr(type(value), "__torch_function__") and not isinstance(value, fx.Proxy):  # gets its own sentence
            found.append(value)
    return found
