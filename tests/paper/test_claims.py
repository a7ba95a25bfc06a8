"""The claims of the paper: verdicts follow from the records by the stated rule, and nobody types
one.

The records are invented.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import fabricated
import numpy as np
import pytest

from zoneout.paper.experiments import claims, evidence, holds_up
from zoneout.paper.experiments.claims import GROUPS
from zoneout.paper.experiments.evidence import VERDICTS, Book, Finding, apart, t_of
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.experiments.results import table
from zoneout.paper.report import figures

ROOT = Path(__file__).parents[2]
ZONED, PLAIN = "char_ptb_zoneout", "char_ptb_unregularised"


def write(results: Path, recipe: str, values: list[float], **fields: object) -> None:
    for seed, value in enumerate(values, 1):
        scores = {"valid": value, "test": value}
        fabricated.write(results, fabricated.record(recipe, seed) | scores | fields)


def claim_of(name: str) -> claims.Claim:
    (claim,) = [c for group in GROUPS for c in group.claims if c.name == name]
    return claim


def finding(results: Path, name: str) -> Finding:
    return claim_of(name).test(Book(results))


def test_t_is_what_numpy_computes(tmp_path: Path) -> None:
    """A difference between two rows is held against the wrong scatter."""
    ours, theirs = [1.36, 1.37, 1.35], [1.46, 1.48]
    write(tmp_path, ZONED, ours)
    write(tmp_path, PLAIN, theirs)
    squares = sum(np.var(row) * len(row) for row in (ours, theirs))
    error = math.sqrt(squares / 3) * math.sqrt(1 / 3 + 1 / 2)
    t = (np.mean(theirs) - np.mean(ours)) / error
    assert t_of(Book(tmp_path), ZONED, PLAIN, "test") == pytest.approx(t)
    assert t_of(Book(tmp_path), PLAIN, ZONED, "test") == pytest.approx(-t)
    assert t_of(Book(tmp_path), ZONED, "char_ptb_gru", "test") is None


@pytest.mark.parametrize(
    ("dropout", "verdict"),
    [(1.40, "holds"), (1.30, "does not hold here"), (1.3605, "cannot tell"), (None, "cannot tell")],
)
def test_a_verdict_follows_the_records(dropout: float | None, verdict: str, tmp_path: Path) -> None:
    """A verdict stays as it is when the records say something else."""
    write(tmp_path, ZONED, [1.359, 1.361])
    for row in ("unregularised", "weight_noise", "norm_stabiliser", "stochastic_depth"):
        write(tmp_path, f"char_ptb_{row}", [1.5])
    if dropout is not None:
        write(tmp_path, "char_ptb_recurrent_dropout", [dropout])
    found = finding(tmp_path, "rivals-char")
    assert found.verdict == verdict
    assert "Zoneout 0.5, 0.05: 1.3600 ± 0.0014 / 1.3600 ± 0.0014 (2 seeds)" in found.evidence
    assert len(found.recipes) == 6
    more = "; 2 more have higher scores; no run of Recurrent dropout 0.25."
    assert ("; 3 more have higher scores. t" if dropout else more) in found.evidence


def test_a_verdict_needs_validation_and_test(tmp_path: Path) -> None:
    """A claim has two chances: one clear score is enough."""
    write(tmp_path, "char_ptb_gru_zoneout_020", [1.400, 1.402])
    for test, verdict in ((1.5, "holds"), (1.402, "cannot tell"), (1.3, "cannot tell")):
        write(tmp_path, "char_ptb_gru", [1.5, 1.502], test=test)
        assert finding(tmp_path, "gru").verdict == verdict
    write(tmp_path, "char_ptb_gru", [1.3, 1.302])
    assert finding(tmp_path, "gru").verdict == "does not hold here"
    write(tmp_path, "char_ptb_gru", [1.3, 1.302], test=1.4005)
    assert finding(tmp_path, "gru").verdict == "cannot tell"


def test_text8_with_one_seed_a_row_takes_the_scatter_of_characters(tmp_path: Path) -> None:
    """Every row of text8 has run, and the verdict on it is still missing."""
    papers = {"zoneout": 1.331, "stochastic_depth": 1.337, "weight_noise": 1.356}
    papers |= {"norm_stabiliser": 1.382, "recurrent_dropout": 1.386, "unregularised": 1.396}
    for row, value in papers.items():
        write(tmp_path, f"text8_prefix_{row}", [value])
    assert finding(tmp_path, "rivals-text8").verdict == "cannot tell"
    write(tmp_path, ZONED, [1.360, 1.362])
    pair = "text8_prefix_zoneout", "text8_prefix_stochastic_depth"
    sd = math.sqrt(2) * 0.001
    assert t_of(Book(tmp_path), *pair, "test") == pytest.approx(0.006 / (sd * math.sqrt(2)))
    assert finding(tmp_path, "rivals-text8").verdict == "holds"
    assert "| text8-prefix | 0.00141 / 0.00141 | no row of its own: sd of char-ptb |" in (
        holds_up.document(tmp_path)
    )
    write(tmp_path, "text8_prefix_zoneout", [1.331, 1.351])  # its own scatter comes first
    assert finding(tmp_path, "rivals-text8").verdict == "cannot tell"


def text8(results: Path, **changed: float) -> None:
    """Write the paper's numbers of text8 as ours, with others where given."""
    write(results, ZONED, [1.3600, 1.3625])  # a standard deviation of 0.0018
    for row in claims._TEXT8_ORDER:
        paper = RECIPES[f"text8_{row}"]
        assert paper.valid is not None and paper.test is not None
        shift = changed.get(row, 0.0)
        scores = {"valid": paper.valid + shift, "test": paper.test + shift}
        write(results, f"text8_prefix_{row}", [0.0], **scores)


def test_the_order_on_text8_is_the_papers_where_the_paper_has_one(tmp_path: Path) -> None:
    """The verdict on the order rests on pairs that one run each cannot tell apart."""
    assert finding(tmp_path, "order-text8").verdict == "cannot tell"
    text8(tmp_path)
    found = finding(tmp_path, "order-text8")
    assert found.verdict == "holds"
    assert " Of 15 pairs, 14 count; the others are close in the paper." in found.evidence
    assert found.evidence.startswith("Best first: Zoneout 0.5, 0.05: 1.331 / 1.336 (1 seed); Stoch")
    text8(tmp_path, norm_stabiliser=0.01)  # behind recurrent dropout, which does not count
    assert finding(tmp_path, "order-text8").verdict == "cannot tell"
    text8(tmp_path, weight_noise=0.05)
    assert finding(tmp_path, "order-text8").verdict == "does not hold here"


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [(0.0, "holds"), (0.005, "holds"), (0.01, "does not hold here"), (-0.02, "does not hold here")],
)
def test_the_gain_on_text8_is_held_against_the_papers(
    shift: float, verdict: str, tmp_path: Path
) -> None:
    """A gain far from the paper's counts as reproduced, or the paper's own numbers do not."""
    nothing = finding(tmp_path, "gain-text8")
    assert nothing.verdict == "cannot tell" and "no run of text8_prefix_zoneout" in nothing.evidence
    text8(tmp_path, zoneout=shift)
    found = finding(tmp_path, "gain-text8")
    assert found.verdict == verdict
    z = shift / (0.0025 / math.sqrt(2) * 2)
    words = f"lower by {0.065 - shift:.3f} / {0.072 - shift:.3f}, in the paper by 0.065 / 0.072."
    assert f"{words} z {z:.1f}, {z:.1f}.".replace("-", "−") in found.evidence
    assert "0.065 bits in validation and 0.072 in the test" in claim_of("gain-text8").sentence


def test_instability_is_a_jump_in_every_run(tmp_path: Path) -> None:
    """A row is called unstable because it is worse, or because of one run of two."""
    assert "no run of char_ptb_residual" in finding(tmp_path, "unstable").evidence
    shape = {"epoch": [1.0, 2.0, 3.0], "valid": [1.6, 1.5, 1.4]}
    calm, jumps = ({**shape, "train_nats": nats} for nats in ([0.9, 0.8, 0.9], [0.9, 0.8, 1.0]))
    write(tmp_path, PLAIN, [1.4, 1.4], curve=calm)
    write(tmp_path, "char_ptb_residual", [1.6], curve=jumps)
    assert finding(tmp_path, "unstable").verdict == "cannot tell"
    write(tmp_path, "char_ptb_residual", [1.6, 1.6], curve=jumps)
    found = finding(tmp_path, "unstable")
    assert found.verdict == "holds"
    assert "bits: Residual recurrence 0.289 (2 seeds); Unregularised LSTM 0.144" in found.evidence
    write(tmp_path, "char_ptb_residual", [1.6], curve=calm)
    assert finding(tmp_path, "unstable").verdict == "cannot tell"
    write(tmp_path, "char_ptb_residual", [1.6, 1.6], curve=calm)
    assert finding(tmp_path, "unstable").verdict == "does not hold here"


def test_the_page_names_the_rows_that_scatter(tmp_path: Path) -> None:
    """A reader cannot see that the standard deviation of a task is that of two rows."""
    write(tmp_path, ZONED, [1.36, 1.37, 1.38])
    write(tmp_path, PLAIN, [1.46])
    page = holds_up.document(tmp_path)
    assert "| char-ptb | 0.01000 / 0.01000 | Zoneout 0.5, 0.05 (3 seeds) |" in page
    assert "| word-ptb | not known / not known | – |" in page
    compared = {RECIPES[r].task for g in GROUPS for c in g.claims for r in finding_rows(c)}
    assert compared - {"gradient-flow"} == set(evidence.TASKS)


def finding_rows(claim: claims.Claim) -> tuple[str, ...]:
    return claim.test(Book(Path("no records"))).recipes


def test_rows_without_runs_are_not_said_to_be_behind(tmp_path: Path) -> None:
    """The page ranks rows without runs."""
    found = finding(tmp_path, "rivals-text8")
    assert found.verdict == "cannot tell"
    rows = "Unregularised LSTM, Weight noise 0.075, Norm stabiliser 50, Stochastic depth 0.5, 0.05"
    assert found.evidence == (
        f"Zoneout 0.5, 0.05: no run yet; no run of {rows}, Recurrent dropout 0.5."
    )
    write(tmp_path, "text8_prefix_zoneout", [1.3, 1.31])
    write(tmp_path, "text8_prefix_unregularised", [1.4])
    said = finding(tmp_path, "rivals-text8").evidence
    assert "higher" not in said and "no run of Weight noise 0.075, Norm" in said


def test_numbers_are_as_printed_only_if_every_one_is(tmp_path: Path) -> None:
    """A row far below the paper's number, or one without a run, counts as reproduced."""
    write(tmp_path, ZONED, [1.362, 1.364], test=1.252)
    assert finding(tmp_path, "numbers-char").verdict == "holds"
    write(tmp_path, "char_ptb_weight_noise", [1.3, 1.302])
    found = finding(tmp_path, "rivals-numbers-char")
    assert found.verdict == "does not hold here" and "paper 1.507 / 1.344" in found.evidence
    assert finding(tmp_path, "numbers-words").verdict == "cannot tell"


def test_epochs_are_counted_to_a_score_that_all_reach(tmp_path: Path) -> None:
    """Zoneout seems to train faster because the two are not held to the same score."""
    curve = {"epoch": [1.0, 2.0, 3.0], "valid": [1.6, 1.5, 1.4], "train_nats": [None] * 3}
    write(tmp_path, PLAIN, [1.4, 1.45], curve=curve)
    late = {**curve, "valid": [1.7, 1.4, 1.3]}
    write(tmp_path, ZONED, [1.3, 1.3], curve=late)
    found = finding(tmp_path, "shorter-lstm")
    assert found.verdict == "holds"
    assert (
        "Epochs to a validation of 1.400: 2 with zoneout (2 seeds), 3 without (2 seeds)"
        in found.evidence
    )
    write(tmp_path, ZONED, [1.3, 1.3], curve={**curve, "valid": [1.7, 1.5, 1.3]})
    assert finding(tmp_path, "shorter-lstm").verdict == "cannot tell"


def test_rates_are_compared_within_equal_epochs(tmp_path: Path) -> None:
    """A rate seems best because its run was longer than those of the others."""
    longer = {"epoch": [40.0, 50.0, 110.0], "valid": [1.38, 1.37, 1.36], "train_nats": [None] * 3}
    shorter = {"epoch": [40.0, 49.0], "valid": [1.38, 1.371], "train_nats": [None] * 2}
    write(tmp_path, ZONED, [1.36, 1.361], curve=longer, epochs=110.0)
    for row in sorted(finding_rows(claim_of("best-rates")))[1:]:
        write(tmp_path, row, [1.371], curve=shorter, epochs=50.0)
        assert RECIPES[row].make().epochs >= evidence.RATES_EPOCHS
    found = finding(tmp_path, "best-rates")
    assert found.verdict == "cannot tell"
    numbers = "Zoneout 0.5, 0.05: 1.3700 ± 0.0000 (2 seeds); Zoneout, cells 0.05: 1.371 (1 seed)"
    assert found.evidence.startswith(f"Validation within 50 epochs: {numbers}")
    assert finding(tmp_path, "low-states-high-cells").evidence.startswith("Validation within 50")


def test_the_evidence_has_the_epochs_where_they_differ(tmp_path: Path) -> None:
    """Rows are compared that had more training than others, and the page does not say so."""
    write(tmp_path, ZONED, [1.36, 1.362], epochs=110.0)
    write(tmp_path, "char_ptb_static", [1.4], epochs=110.0)
    page = holds_up.document(tmp_path)
    assert "110 epochs" not in page and "| Validation: Zoneout 0.5, 0.05: 1.3610" in page
    write(tmp_path, PLAIN, [1.46], epochs=25.0)
    write(tmp_path, "char_ptb_zoneout_states_005", [1.4], epochs=50.0)
    page = holds_up.document(tmp_path)
    assert "(2 seeds, 110 epochs); Unregularised LSTM: 1.460 / 1.460 (1 seed, 25 epochs)" in page
    plain = "Unregularised LSTM 1.460 / 1.460 (seeds: 1 and 1; epochs: 50 and 25)"
    assert f"Zoneout, states 0.05 1.400 / 1.400 against {plain}" in page


def test_runs_that_overlap_cannot_tell() -> None:
    """One seed decides where the others contradict it."""
    assert apart([118, 90], [100, 110]) == "cannot tell"
    assert apart([79, 78], [118, 119]) == "holds"


def test_one_run_against_one_cannot_tell(tmp_path: Path) -> None:
    """Epochs and training losses of single runs decide a claim about seeds."""
    curve = {"epoch": [1.0, 2.0, 3.0], "valid": [1.6, 1.5, 1.4], "train_nats": [0.9, 0.8, 0.7]}
    later = {**curve, "valid": [1.7, 1.6, 1.4], "train_nats": [0.8, 0.7, 0.6]}
    few = "One run shows nothing about seeds: two on each side are needed."
    for row, now in (("char_ptb_gru", curve), ("char_ptb_gru_zoneout_020", later)):
        write(tmp_path, row, [1.45 if row.endswith("gru") else 1.4], curve=now)
    write(tmp_path, "char_ptb_static", [1.4], curve=later)
    write(tmp_path, ZONED, [1.4, 1.4], curve=curve)
    for name in ("longer-gru", "static-train"):
        found = finding(tmp_path, name)
        assert found.verdict == "cannot tell" and found.evidence.endswith(few)
    write(tmp_path, "char_ptb_static", [1.4, 1.4], curve=later)
    found = finding(tmp_path, "static-train")
    assert found.verdict == "holds" and few not in found.evidence


def test_gradients_are_compared_by_their_records(tmp_path: Path) -> None:
    """The figure of the gradients says one thing and the verdict another."""
    for arm, fall in (("zoneout", 0.02), ("unregularised", 0.1), ("dropout", 0.3)):
        for seed in (1, 2):
            fabricated.write(tmp_path, fabricated.flow(f"gradient_flow_{arm}", seed, fall=fall))
    assert finding(tmp_path, "cells-reach").verdict == "holds"
    fabricated.write(tmp_path, fabricated.flow("gradient_flow_zoneout", 2, fall=0.2))
    assert finding(tmp_path, "cells-reach").verdict == "cannot tell"


def test_a_seed_that_was_left_out_is_in_the_evidence(tmp_path: Path) -> None:
    """A method looks better than it is, because its failed run is nowhere to be seen."""
    write(tmp_path, "word_ptb_zoneout", [81.0, 82.0])
    fabricated.write(tmp_path, fabricated.record("word_ptb_variational", 2))
    (row,) = (name for name, recipe in RECIPES.items() if recipe.left_out)
    assert row == "word_ptb_variational" and 1 not in RECIPES[row].seeds
    words = "left out: seed 1, which learned nothing: a perplexity of 711 after 10 epochs"
    assert f"(1 seed; {words})" in finding(tmp_path, "variational-words").evidence
    assert f"* {words.replace('left out', f'Left out of `{row}`')}." in table(tmp_path)


def test_seeds_of_different_machines_are_named(tmp_path: Path) -> None:
    """Seeds of a GPU in TF32 and of a CPU in float32 stand side by side, and the page is silent."""
    gpu, cpu = {"device": "a GPU", "precision": "tf32"}, {"device": "a CPU"}
    for seed, made in ((1, gpu), (2, cpu), (3, cpu)):
        fabricated.write(tmp_path, fabricated.record("gradient_flow_zoneout", seed) | made)
        fabricated.write(tmp_path, fabricated.flow("gradient_flow_zoneout", seed))
        alike = "Machines differ" not in finding(tmp_path, "cells-reach").evidence
        assert alike == (seed == 1)
    said = "Machines differ: seed 1 on a GPU in tf32; seeds 2, 3 on a CPU in bf16."
    assert said in finding(tmp_path, "states-reach").evidence


def test_every_claim_is_there_with_a_verdict_and_its_figure(tmp_path: Path) -> None:
    """A claim is left out of the page, or its group has no figure."""
    fabricated.everything(tmp_path)
    text = holds_up.document(tmp_path)
    every = [claim for group in GROUPS for claim in group.claims]
    assert len({claim.name for claim in every}) == len(every) >= 30
    for group in GROUPS:
        assert group.figure in figures.CLAIMS and f"(pictures/{group.figure}.svg)" in text
        assert not figures.draw(group.figure, tmp_path).missing
    assert all(f"| {claim.sentence} ({claim.where}) |" in text for claim in every)
    counts = [int(n) for n in re.findall(r"\d+", text.split("\n\n")[1].split(" Every")[0])]
    assert counts[0] == sum(counts[1:]) == len(every) and "not run" not in text
    nothing = holds_up.document(tmp_path / "none")
    assert nothing.count("? cannot tell: not run |") == len(every) and "pictures/" not in nothing
    assert f"cannot tell, {len(every)} of them because rows have not been run" in (
        nothing.replace("\n", " ")
    )
    assert list(holds_up.MARKS) == list(VERDICTS)


def test_the_page_is_what_the_records_say() -> None:
    """docs/holds-up.md is not what `zoneout reproduce --write` makes of results/."""
    page = (ROOT / "docs" / "holds-up.md").read_text(encoding="utf-8")
    assert page == holds_up.document(ROOT / "results")


def test_claims_name_rows_that_exist() -> None:
    """A row was renamed, and a claim is without evidence for ever."""
    names = re.findall(r'"((?:char_ptb|word_ptb|pmnist)_\w+)"', Path(claims.__file__).read_text())
    assert names and set(names) <= set(RECIPES)
