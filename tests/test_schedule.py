"""Rates that change during training."""

import pytest
import torch
from torch import nn

import zoneout as zo


def ramp(update: int) -> float:
    return update / 4


def test_every_rate_follows_the_factor():
    """A rate of some noise, cell or wrapper stays where it was, or grows twice."""
    per_unit = torch.tensor([0.1, 0.2, 0.4, 0.8])
    model = nn.ModuleDict(
        {
            "lstm": zo.LSTM(3, 4, noise=[zo.Zoneout(cell=0.5), zo.WeightDrop(rate=0.2)]),
            "layers": zo.GRU(4, 4, 2, noise=zo.Zoneout(hidden=[0.2, per_unit])),
            "cell": zo.GRUCell(4, 4, noise=zo.StateDropout(hidden=0.4, mask="static", seed=3)),
            "wrapped": zo.ZoneoutCell(nn.LSTMCell(4, 4), rates=(0.2, 0.4)),
            "plain": zo.RNN(4, 4),
        }
    )
    schedule = zo.RateSchedule(model, ramp)
    assert model["lstm"].noise == (zo.Zoneout(), zo.WeightDrop(rate=0.0))
    schedule.step()
    schedule.step()
    assert model["lstm"].noise == (zo.Zoneout(cell=0.25), zo.WeightDrop(rate=0.1))
    assert model["layers"].noise == zo.Zoneout(hidden=[0.1, per_unit / 2])
    assert model["cell"].noise == zo.StateDropout(hidden=0.2, mask="static", seed=3)
    assert list(model["wrapped"].rates) == [0.1, 0.2]
    assert model["plain"].noise is None
    schedule.step()
    schedule.step()
    assert model["layers"].noise == zo.Zoneout(hidden=[0.2, per_unit])


def test_states_of_a_users_cell():
    """Rates in `states` are left out of the schedule."""
    noise = zo.Zoneout(states={"c": 0.5})
    layer = zo.LSTM(3, 4, noise=noise)
    schedule = zo.RateSchedule(layer, ramp)
    schedule.step()
    assert layer.noise == zo.Zoneout(states={"c": 0.125})


def test_the_masks_are_those_of_the_scaled_rate():
    """The layer shows the new rate and draws with the old one."""
    x, layer = torch.randn(5, 2, 3), zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.8, hidden=0.4))
    schedule = zo.RateSchedule(layer, ramp)
    full = layer(x, seed=7, rates={"cell": 0.8, "hidden": 0.4})[0]
    schedule.step()
    half = layer(x, seed=7)[0]
    layer.noise = zo.Zoneout(cell=0.2, hidden=0.1)
    assert torch.equal(half, layer(x, seed=7)[0]) and not torch.equal(half, full)


def test_resumes():
    """A resumed run begins its warm-up again."""
    first, second = (zo.GRU(3, 4, noise=zo.Zoneout(hidden=0.4)) for _ in range(2))
    schedule = zo.RateSchedule(first, ramp)
    for _ in range(3):
        schedule.step()
    resumed = zo.RateSchedule(second, ramp)
    resumed.load_state_dict(schedule.state_dict())
    assert second.noise == first.noise == zo.Zoneout(hidden=0.4 * 0.75)


def test_errors():
    """A schedule that changes nothing, or a rate above 1, goes unnoticed."""
    with pytest.raises(ValueError, match="model: expected a layer with noise"):
        zo.RateSchedule(nn.LSTM(3, 4), ramp)
    layer = zo.GRU(3, 4, noise=zo.Zoneout(hidden=0.4))
    with pytest.raises(ValueError, match="factor: expected a number of at least 0, got -1"):
        zo.RateSchedule(layer, lambda update: -1.0)
    with pytest.raises(ValueError, match="hidden"):
        zo.RateSchedule(layer, lambda update: 3.0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["layer", "wrapped cell"])
def test_a_rate_above_one_changes_nothing(wrapped):
    """A refused update leaves some layers with new rates and others with old ones."""
    last = zo.ZoneoutCell(nn.GRUCell(3, 3), rates=0.6) if wrapped else None
    last = last or zo.GRU(3, 3, noise=zo.Zoneout(hidden=0.6))
    model = nn.ModuleList([zo.LSTM(3, 3, noise=zo.Zoneout(cell=0.2)), last])
    schedule = zo.RateSchedule(model, lambda n: 1.0 + n)
    before = [repr(one) for one in model]
    with pytest.raises(ValueError, match="between 0 and 1"):
        schedule.step()
    assert [repr(one) for one in model] == before and schedule.updates == 0
