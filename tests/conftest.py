"""What holds for every test: which of them can run here, and on how many threads."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from backends import EVERY, Backend
from emulator import emulated  # noqa: F401 (a fixture)
from repeated import recorded_and_repeated

from zoneout.ops import plan


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several test processes one thread, since they share the cores, and one folder
    of built kernels.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ and "ZONEOUT_EMULATED" not in os.environ:
        kernels = tempfile.TemporaryDirectory(prefix="zoneout-emulated-")
        os.environ["ZONEOUT_EMULATED"] = kernels.name
        config.add_cleanup(kernels.cleanup)
        config.add_cleanup(lambda: os.environ.pop("ZONEOUT_EMULATED", None))
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
    if torch.cuda.is_available():  # float32 means float32, unless a test says otherwise
        torch.backends.cudnn.allow_tf32 = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `gpu` where there is no GPU."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws from torch's own generator is the same whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plan of one test reach the next.

    With ZONEOUT_CHECK_PLANS=1, every pass of every test is recorded, repeated by its plan on copies
    of its tensors, and compared to the bit.
    """
    plan.forget()
    if os.environ.get("ZONEOUT_CHECK_PLANS") == "1":
        monkeypatch.setattr(plan, "_first_calls", recorded_and_repeated)
        monkeypatch.setattr(plan, "DEVICES", {"cpu", "cuda"})


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill what torch.empty hands out with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=EVERY)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend, and the device it runs on."""
    return request.param
