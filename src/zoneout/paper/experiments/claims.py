"""What of the paper holds up: its empirical claims, in groups that one figure shows.

A claim is a sentence of ours about what the paper found, and a test from `evidence.py` that turns
records into a verdict. Claims about the state of the art of 2016 are left out: no run can check
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .evidence import (
    RATES,
    TEST,
    VALID,
    Test,
    as_printed,
    beats,
    better,
    further,
    in_order,
    lower_by_as_much,
    trains,
    trains_lower,
    unstable,
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words."""

    name: str
    sentence: str
    where: str  # in the paper
    test: Test


@dataclass(frozen=True)
class Group:
    """Claims that one figure shows."""

    name: str
    title: str
    figure: str  # of report.figures
    claims: tuple[Claim, ...]


_RIVALS = (
    "unregularised",
    "weight_noise",
    "norm_stabiliser",
    "stochastic_depth",
    "recurrent_dropout",
)
_TEXT8_ORDER = (  # the best first
    "zoneout",
    "stochastic_depth",
    "weight_noise",
    "norm_stabiliser",
    "recurrent_dropout",
    "unregularised",
)
_ARMS = (
    "cells_005", "cells_025", "cells_050", "states_005", "states_025", "states_050",
    "both_005_005", "both_025_005", "both_050_050",
)  # fmt: skip


def _char(*rows: str) -> tuple[str, ...]:
    return tuple(f"char_ptb_{row}" for row in rows)


GROUPS = (
    Group(
        "char-ptb",
        "Characters of Penn Treebank",
        "scores-char-ptb",
        (
            Claim(
                "numbers-char",
                "An LSTM with zoneout has 1.362 bits in validation and 1.252 in the test.",
                "Table 1",
                as_printed("char_ptb_zoneout"),
            ),
            Claim(
                "rivals-char",
                "Zoneout is better than no noise and than its four rivals.",
                "Table 1",
                beats("char_ptb_zoneout", *_char(*_RIVALS)),
            ),
            Claim(
                "rivals-numbers-char",
                "The rivals are as far behind as the paper's table says.",
                "Table 1",
                as_printed(*_char(*_RIVALS)),
            ),
            Claim(
                "cells-alone",
                "Zoneout on cells alone, at 0.5, is better than the best recurrent dropout.",
                "section 4.1",
                beats("char_ptb_zoneout_cells_050", "char_ptb_recurrent_dropout", on=RATES),
            ),
            Claim(
                "states-alone",
                "Zoneout on states alone, at 0.05, is better than the best recurrent dropout.",
                "section 4.1",
                beats("char_ptb_zoneout_states_005", "char_ptb_recurrent_dropout", on=RATES),
            ),
            Claim(
                "best-rates",
                "Cells 0.5 together with states 0.05 are the best rates.",
                "section 4.1",
                beats("char_ptb_zoneout", *_char(*(f"zoneout_{arm}" for arm in _ARMS)), on=RATES),
            ),
            Claim(
                "low-states-high-cells",
                "Low rates are best on states, and rates around 0.5 work well on cells.",
                "section 4.1",
                better(
                    ("char_ptb_zoneout_states_005", "char_ptb_zoneout_states_025"),
                    ("char_ptb_zoneout_states_005", "char_ptb_zoneout_states_050"),
                    ("char_ptb_zoneout_cells_050", "char_ptb_zoneout_cells_005"),
                    on=RATES,
                ),
            ),
            Claim(
                "shared-mask",
                "One mask for cells and states is worse than separate masks.",
                "section 4.1",
                beats("char_ptb_zoneout", "char_ptb_zoneout_shared"),
            ),
            Claim(
                "unstable",
                "Residual connections between the steps lead to instability.",
                "section 2.3",
                unstable("char_ptb_residual", "char_ptb_unregularised"),
            ),
            Claim(
                "schedules",
                "Different update rates or schedules for different units bring no gain.",
                "section 2.4",
                better(
                    ("char_ptb_zoneout", "char_ptb_clockwork_rates"),
                    ("char_ptb_zoneout_3_layers", "char_ptb_hierarchical_rnn"),
                ),
            ),
        ),
    ),
    Group(
        "training-time",
        "Other cells, and the length of training",
        "training-time",
        (
            Claim(
                "small-rates",
                "Small rates (0.05, 0.1) improve LSTM, GRU and tanh-RNN alike.",
                "section 4.1",
                better(
                    ("char_ptb_zoneout_both_005_005", "char_ptb_unregularised"),
                    ("char_ptb_gru_zoneout", "char_ptb_gru"),
                    ("char_ptb_rnn_zoneout", "char_ptb_rnn"),
                    ("char_ptb_rnn_zoneout_005", "char_ptb_rnn"),
                ),
            ),
            Claim(
                "gru",
                "A GRU with zoneout is better than without.",
                "section 4.1",
                beats("char_ptb_gru_zoneout_020", "char_ptb_gru"),
            ),
            Claim(
                "rnn",
                "A tanh-RNN with zoneout is better than without.",
                "section 4.1",
                beats("char_ptb_rnn_zoneout", "char_ptb_rnn"),
            ),
            Claim(
                "numbers-cells",
                "Zoneout takes a GRU from 1.53 to 1.41 bits, and a tanh-RNN from 1.67 to 1.52.",
                "section 4.1",
                as_printed(*_char("gru", "gru_zoneout_020", "rnn", "rnn_zoneout")),
            ),
            Claim(
                "shorter-lstm",
                "Zoneout shortens the training of LSTMs.",
                "section 4.1",
                trains("char_ptb_zoneout", "char_ptb_unregularised", faster=True),
            ),
            Claim(
                "longer-gru",
                "Zoneout lengthens the training of GRUs.",
                "section 4.1",
                trains("char_ptb_gru_zoneout_020", "char_ptb_gru", faster=False),
            ),
            Claim(
                "longer-rnn",
                "Zoneout lengthens the training of tanh-RNNs.",
                "section 4.1",
                trains("char_ptb_rnn_zoneout", "char_ptb_rnn", faster=False),
            ),
        ),
    ),
    Group(
        "word-ptb",
        "Words of Penn Treebank",
        "scores-word-ptb",
        (
            Claim(
                "on-top-words",
                "Zoneout added to dropout between the layers lowers the perplexity.",
                "section 4.1",
                beats("word_ptb_zoneout", "word_ptb_nr_dropout"),
            ),
            Claim(
                "numbers-words",
                "The perplexities are 81.4 and 77.4 with zoneout, and 82.2 and 78.4 without.",
                "Table 1",
                as_printed("word_ptb_zoneout", "word_ptb_nr_dropout"),
            ),
            Claim(
                "dropout-words",
                "Zoneout is better than recurrent dropout.",
                "Table 1",
                beats("word_ptb_zoneout", "word_ptb_recurrent_dropout"),
            ),
            Claim(
                "alone-words",
                "Zoneout as the only regularisation of the large model is not competitive.",
                "section 4.1",
                beats("word_ptb_nr_dropout", "word_ptb_zoneout_only"),
            ),
            Claim(
                "variational-words",
                "Variational dropout is better than zoneout.",
                "Table 1",
                beats("word_ptb_variational", "word_ptb_zoneout"),
            ),
        ),
    ),
    Group(
        "text8",
        "text8, on its first 74 million characters",
        "scores-text8-prefix",
        (
            Claim(
                "rivals-text8",
                "Zoneout is better than no noise and than its four rivals.",
                "Table 1",
                beats("text8_prefix_zoneout", *(f"text8_prefix_{row}" for row in _RIVALS)),
            ),
            Claim(
                "order-text8",
                "The methods stand in the order of the paper's table.",
                "Table 1",
                in_order(*((f"text8_prefix_{row}", f"text8_{row}") for row in _TEXT8_ORDER)),
            ),
            Claim(
                "gain-text8",
                "Zoneout is below no noise by 0.065 bits in validation and 0.072 in the test.",
                "Table 1",
                lower_by_as_much(
                    ("text8_prefix_zoneout", "text8_zoneout"),
                    ("text8_prefix_unregularised", "text8_unregularised"),
                ),
            ),
        ),
    ),
    Group(
        "pmnist",
        "Permuted sequential MNIST",
        "scores-pmnist",
        (
            Claim(
                "unregularised-images",
                "Zoneout is better than no noise.",
                "Table 2",
                beats("pmnist_zoneout", "pmnist_unregularised"),
            ),
            Claim(
                "dropout-images",
                "Zoneout is better than recurrent dropout.",
                "Table 2",
                beats("pmnist_zoneout", "pmnist_recurrent_dropout"),
            ),
            Claim(
                "batch-norm-images",
                "Recurrent batch norm is better than all three.",
                "Table 2",
                beats(
                    "pmnist_batch_norm",
                    "pmnist_zoneout",
                    "pmnist_recurrent_dropout",
                    "pmnist_unregularised",
                    on=TEST,  # by other statistics, the validation cannot be compared
                ),
            ),
            Claim(
                "on-top-images",
                "Zoneout makes recurrent batch norm better.",
                "Table 2",
                beats("pmnist_batch_norm_zoneout", "pmnist_batch_norm"),
            ),
            Claim(
                "numbers-images",
                "The errors are 0.063 and 0.069 with zoneout, 0.045 and 0.041 with both.",
                "Table 2",
                as_printed("pmnist_zoneout", "pmnist_batch_norm_zoneout"),
            ),
        ),
    ),
    Group(
        "gradients",
        "Gradients and identity connections",
        "reach",
        (
            Claim(
                "cells-reach",
                "Gradients of cells reach further back with zoneout than with dropout or no noise.",
                "Figure 6",
                further("cell"),
            ),
            Claim(
                "states-reach",
                "So do gradients of hidden states.",
                "section 4.4",
                further("hidden"),
            ),
            Claim(
                "static-valid",
                "Static identity connections are worse than no noise in validation.",
                "Figure 7",
                beats("char_ptb_unregularised", "char_ptb_static", on=VALID),
            ),
            Claim(
                "static-noise",
                "Static identity connections are worse than zoneout: the noise is needed.",
                "Figure 7",
                beats("char_ptb_zoneout", "char_ptb_static", on=VALID),
            ),
            Claim(
                "static-train",
                "Static identity connections have a lower training loss than zoneout.",
                "Figure 7",
                trains_lower("char_ptb_static", "char_ptb_zoneout"),
            ),
            Claim(
                "static-train-plain",
                "Static identity connections have a higher training loss than no noise.",
                "Figure 7",
                trains_lower("char_ptb_unregularised", "char_ptb_static"),
            ),
        ),
    ),
    Group(
        "across",
        "Across tasks",
        "gains",
        (
            Claim(
                "reliable",
                "Low rates on states (0.05 to 0.2) reliably improve existing models.",
                "conclusion",
                better(
                    ("char_ptb_zoneout_states_005", "char_ptb_unregularised"),
                    ("char_ptb_gru_zoneout", "char_ptb_gru"),
                    ("char_ptb_gru_zoneout_020", "char_ptb_gru"),
                    ("char_ptb_rnn_zoneout", "char_ptb_rnn"),
                    ("text8_prefix_zoneout", "text8_prefix_unregularised"),
                    ("pmnist_zoneout", "pmnist_unregularised"),
                    ("pmnist_batch_norm_zoneout", "pmnist_batch_norm"),
                ),
            ),
            Claim(
                "combines",
                "Zoneout works on top of other regularisers: dropout between layers, batch norm.",
                "conclusion",
                better(
                    ("word_ptb_zoneout", "word_ptb_nr_dropout"),
                    ("pmnist_batch_norm_zoneout", "pmnist_batch_norm"),
                ),
            ),
        ),
    ),
)
