"""What the tests of the paper's floor share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from command_line import elsewhere, trained, zoneout  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second one, and lose much where other tests run
    beside them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
