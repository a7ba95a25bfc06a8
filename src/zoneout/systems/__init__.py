"""Systems that the paper compares with, or proposes, built from the layers of this package.

`AdaptiveLSTM` and `clockwork` run in the fused loops. The others exchange values between layers
inside a step, or predict inside the loop; they loop over their steps in torch calls.
"""

from .adaptive import AdaptiveLSTM
from .clockwork import clockwork, module_periods
from .hm_lstm import HMLSTM
from .hyper_lstm import HyperLSTM
from .surprisal import SurprisalLSTM

__all__ = [
    "HMLSTM",
    "AdaptiveLSTM",
    "HyperLSTM",
    "SurprisalLSTM",
    "clockwork",
    "module_periods",
]
