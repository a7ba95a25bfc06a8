"""The report: that its numbers are those of the records, that it stands alone, and that anybody can
read it.

The records, measurements and runs here are invented.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import fabricated
import pytest
from fabricated import Page

from zoneout.paper.cli import main
from zoneout.paper.disk import RunError, write_record
from zoneout.paper.experiments.recipes import QUOTED, RECIPES
from zoneout.paper.experiments.results import no_run
from zoneout.paper.report import html, past, sweep_page
from zoneout.paper.report.figures import FIGURES
from zoneout.paper.report.pages import paper_page, runs_page
from zoneout.paper.training import exit_codes
from zoneout.paper.training.measures import spread
from zoneout.paper.training.runs import read_config

SPEED = """\
group,layer,what,against,shape,dtype,ours,theirs,ratio,low,high,goal,error,backend,device,threads,torch,python,date
train,LSTM,zoneout,torch.nn,char-PTB,float32,416.3,478.4,0.8702,0.85,0.89,1,1e-07,cpu,A <CPU>,2,2.0,3.11,2020-01-02
train,GRU,zoneout,torch.nn,small,float32,20,10,2.0,1.9,2.1,1,1e-07,cpu,A <CPU>,2,2.0,3.11,2020-01-02
gpu graph,LSTM,zoneout,cuDNN,char-PTB,bf16,1.1,2.2,0.5,0.4,0.6,1,1e-03,cuda,A GPU,1,2.0,3.11,2020-01-02
memory,LSTM,"zoneout, peak MiB",torch.nn,small,float32,3,4,0.75,0.7,0.8,1,0,cpu,A <CPU>,2,2.0,3.11,2020-01-02
"""


def cells(text: str, row: str) -> list[str]:
    """The cells of the first row with this heading, without their tags."""
    line = next(
        line
        for line in re.findall(r"<tr>.*?</tr>", text)
        if line.startswith(f'<tr><th scope="row">{row}<')
    )
    return [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", line)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    fabricated.everything(folder)
    return folder


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speed") / "results.csv"
    path.write_text(SPEED)
    return path


@pytest.fixture(scope="module")
def full(results: Path, speed: Path) -> str:
    return paper_page(results, speed)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    plain = fabricated.run_folder(folder, "plain", best=1.9)
    zoned = fabricated.run_folder(
        folder, "<i>zoned", best=1.7, **{"zoneout.cell": 0.5, "optimizer.betas": [0.8, 0.99]}
    )
    images = fabricated.run_folder(
        folder, "images", best=0.1, measure="error", **{"data.name": "mnist"}
    )
    write_record(plain / "gradients.json", fabricated.flow("x"))
    return runs_page([plain, zoned, images])


@pytest.fixture(params=["paper", "runs", "nothing", "demo", "sweep", "sweep of nothing"])
def every(request: pytest.FixtureRequest, full: str, mine: str, tmp_path: Path) -> str:
    """Each kind of page that there is."""
    make: dict[str, Callable[[], str]] = {
        "paper": lambda: full,
        "runs": lambda: mine,
        "nothing": lambda: paper_page(tmp_path / "none", tmp_path / "none.csv"),
        "demo": lambda: fabricated.demo_page(tmp_path),
        "sweep": lambda: fabricated.sweep_page(tmp_path),
        "sweep of nothing": lambda: sweep_page.page([], "no runs"),
    }
    return make[request.param]()


# --- what it says ---------------------------------------------------------------------------------


def test_a_row_has_the_papers_number_ours_and_the_difference(tmp_path: Path) -> None:
    """A number stands in the wrong row or column, or is of one seed where there are three."""
    for seed, shift in ((1, 0.0), (2, 0.002), (3, 0.004)):
        fabricated.write(tmp_path, fabricated.record("char_ptb_zoneout", seed, shift=shift))
    fabricated.write(tmp_path, fabricated.record("char_ptb_recurrent_dropout", shift=0.1))
    text = paper_page(tmp_path, tmp_path / "none.csv")
    found = cells(text, "Zoneout 0.5, 0.05")  # the first table with this row is that of characters
    assert found[:3] == ["1.362", "1.3640 ± 0.0020", "+0.002"]
    assert found[3:6] == ["1.252", "1.2540 ± 0.0020", "+0.002"]
    # The sd of the row, 0.002, is also the pooled one, and the other row has a single seed.
    assert found[6:] == ["0.9, 0.9", "yes", "1–3", "3", "3.0"]
    worse = cells(text, "Recurrent dropout 0.25")
    assert worse[1:3] == ["1.496", "+0.100"] and worse[6:8] == ["35.4, 35.4", "no"]
    assert "Made from 4 records of 2 recipes" in text.replace("\n", " ")


def test_rows_that_were_not_run_are_there(tmp_path: Path) -> None:
    """A table without a row looks as if the paper did not have it."""
    text = paper_page(tmp_path / "none", tmp_path / "none.csv")
    for recipe in RECIPES.values():
        assert f'id="make-{recipe.name}"' in text and f"zoneout reproduce {recipe.name}" in text
        if recipe.task != "gradient-flow":
            assert f'<a href="#make-{recipe.name}">{no_run(recipe)}</a>' in text
    for quoted in QUOTED:
        assert quoted.row in text and (quoted.recipe in RECIPES or quoted.why in text)
    assert "is not there" in text  # the measurements


def test_columns_of_dashes_are_left_out(tmp_path: Path) -> None:
    """A reader looks for numbers in columns that have none."""
    fabricated.write(tmp_path, fabricated.record("pmnist_permuted_zoneout"))
    text = paper_page(tmp_path, tmp_path / "none.csv")
    head = text.partition('id="pmnist-permuted-caption"')[2].partition("</thead>")[0]
    headings = re.findall(r"<th [^>]*>(.*?)</th>", head)
    assert headings == ["Model", "Validation, ours", "Test, ours", "Seeds", "Epoch", "Minutes"]
    assert cells(text, "Zoneout 0.15, shared mask")[:2] == ["0.063", "0.069"]  # of pmnist, not run


def test_a_caption_begins_with_what_was_found(full: str) -> None:
    """A reader has to find out what a figure shows."""
    (found,) = re.findall(r'<figure id="figure-methods">.*?</figure>', full, re.S)
    (first, *_) = re.findall(r"<figcaption><p><strong>(.*?)</strong>", found)
    assert first.startswith("Zoneout 0.5, 0.05 (3 seeds) 1.3") and "is the lowest" in first


def test_a_system_is_compared_with_a_model_of_its_size(tmp_path: Path) -> None:
    """A system stands without the model that it should beat, or with the difference reversed."""
    assert all(r.against in RECIPES for r in RECIPES.values() if r.against)
    fabricated.write(tmp_path, fabricated.record("char_ptb_hm_lstm"))
    without = paper_page(tmp_path, tmp_path / "none.csv")
    fabricated.write(tmp_path, fabricated.record("char_ptb_stacked_layer_norm", shift=0.01))
    text = paper_page(tmp_path, tmp_path / "none.csv").replace("\n", " ")
    sentence = (
        "Best validation within 4 epochs: 3-layer HM-LSTM + layer norm 1.240 (1 seed), 3-layer LSTM "
        "+ layer norm 1.300 (1 seed). The difference is −0.060."
    )
    assert sentence not in without and sentence in text


def test_a_system_is_compared_after_equal_training(tmp_path: Path) -> None:
    """A system seems to lose because its row of comparison had more epochs."""
    short = fabricated.record("char_ptb_surprisal_zoneout")
    fabricated.write(tmp_path, short | {"epochs": 2.0, "test": 1.31})
    for seed, shift in ((1, 0.0), (2, 0.02)):
        fabricated.write(tmp_path, fabricated.record("char_ptb_zoneout", seed, shift=shift))
    text = paper_page(tmp_path, tmp_path / "none.csv").replace("\n", " ")
    # The second epoch of an invented curve is at 1.1 of the best, which comes at the third.
    gain = 1.1 * (1.362 - 1.372)
    assert (
        f"Best validation within 2 epochs: Surprisal-driven zoneout {1.1 * 1.362:.3f} (1 seed), "
        f"Zoneout 0.5, 0.05 {1.1 * 1.372:.3f} (2 seeds). The difference is −{-gain:.3f}. "
        "In the test, after 2 and 4 epochs, by other protocols: 1.310 and 1.262."
    ) in text


def test_systems_are_validated_like_what_they_are_compared_with() -> None:
    """Two validations are compared that cut the text in different ways."""
    pairs = [(r.make(), RECIPES[r.against].make()) for r in RECIPES.values() if r.against]
    assert len(pairs) > 8
    for one, other in pairs:
        assert (one.evaluation.valid, one.data) == (other.evaluation.valid, other.data)


def test_a_system_that_is_tested_in_chunks_is_compared_in_chunks(tmp_path: Path) -> None:
    """A model seems to be worse by what the protocols differ."""
    fabricated.write(tmp_path, fabricated.record("char_ptb_residual") | {"test": 1.5})
    other = fabricated.record("char_ptb_zoneout")
    other["scores"] = [s | {"bits": 1.3} for s in other["scores"] if s["part"] == "test"]
    other["scores"].insert(0, other["scores"][0] | {"protocol": "one sequence", "bits": 1.2})
    fabricated.write(tmp_path, other | {"test": 1.2})
    text = paper_page(tmp_path, tmp_path / "none.csv").replace("\n", " ")
    assert "In the test, after 4 and 4 epochs: 1.356 and 1.300." in text


def test_past_the_paper_begins_with_its_answer(tmp_path: Path) -> None:
    """The answer is missing, is of other arms, or counts the seeds that chose the rates."""
    nothing = paper_page(tmp_path, tmp_path / "none.csv")
    assert "Whether zoneout helps on top of AWD-LSTM is not measured yet for word-level" in nothing
    for seed, shift in ((1, 0.0), (2, 1.0)):
        fabricated.write(tmp_path, fabricated.record("word_ptb_awd", seed, shift=shift))
        noisy = fabricated.record("word_ptb_awd_zoneout", seed, shift=shift - 3.0)
        fabricated.write(tmp_path, noisy)
    for seed, valid, test in ((11, 1.25, 2.0), (12, 1.75, 3.0), (101, 8.0, 8.0)):
        path = tmp_path / "elnino_lstm" / f"seed-{seed}.json"
        path.parent.mkdir(exist_ok=True)
        record = {"arm": "elnino_lstm", "seed": seed, "valid": valid, "test": test, "command": "x"}
        path.write_text(json.dumps(record))
    text = paper_page(tmp_path, tmp_path / "none.csv")
    answer = (
        "On word-level Penn Treebank, zoneout at 0.25, 0.025 on top of AWD-LSTM lowers the test score: "
        "56.30 ± 0.71 with it (2 seeds), 59.30 ± 0.71 without (2 seeds), a difference of −3.00."
    )
    assert answer in text.replace("\n", " ") and "which favours weak ones" in text
    assert "which favours weak ones" not in nothing
    for whether in (
        "in place of DropConnect in AWD-LSTM is not measured yet for word",
        "on top of AWD-LSTM is not measured yet for character",
    ):
        assert whether in text
    assert "1.500 ± 0.354" in text and "2, to choose" not in text and "1, to choose rates" in text


def scored(*tests: float) -> list[dict[str, object]]:
    return [{"seed": seed, "test": test} for seed, test in enumerate(tests, 1)]


@pytest.mark.parametrize(
    ("plain", "noisy", "said"),
    [
        ([58.7, 58.9], [58.65, 58.93], "makes no difference in the test that two seeds can show"),
        ([58.7, 58.9], [58.5, 58.65], "lowers the test score"),
        ([58.7, 58.9], [58.95, 59.5], "raises the test score"),
        ([58.7, 58.9], [50.0], "not measured yet"),
        ([58.7, 58.9, 40.0], [58.5, 58.65], "lowers the test score"),  # seed 3 is not in the plan
    ],
)
def test_words_differ_if_both_seeds_are_on_one_side(
    plain: list[float], noisy: list[float], said: str
) -> None:
    """The page answers by another rule than the plan, which was written before the runs."""
    own = {"word_ptb_awd": scored(*plain), "word_ptb_awd_zoneout": scored(*noisy)}
    assert said in past.sentence("word_ptb_awd", "word_ptb_awd_zoneout", past.ON_TOP, own)


@pytest.mark.parametrize(
    ("arm", "plain", "noisy", "said"),
    [
        ("char_ptb_awd_zoneout", [1.175], [1.1749], "makes no difference in the test above 0.005"),
        ("char_ptb_awd_zoneout", [1.175], [1.17], "makes no difference in the test above 0.005"),
        ("char_ptb_awd_zoneout", [1.175], [1.1699], "lowers the test score"),
        ("char_ptb_awd_zoneout", [1.175], [1.181], "raises the test score"),
        ("word_ptb_awd_zoneout_only", [58.0, 60.0], [58.5], "no difference in the test above 1%"),
        ("word_ptb_awd_zoneout_only", [58.0, 60.0], [58.3], "lowers the test score"),
        ("word_ptb_awd_zoneout_only", [58.0], [58.3], "not measured yet"),
    ],
)
def test_one_seed_differs_by_the_plans_least_difference(
    arm: str, plain: list[float], noisy: list[float], said: str
) -> None:
    """A difference of a rounding error is called a gain."""
    (published, how), *_ = [(first, how) for first, name, how in past.ARMS if name == arm]
    own = {published: scored(*plain), arm: scored(*noisy)}
    assert said in past.sentence(published, arm, how, own)


def test_every_figure_is_there_with_what_it_lacks(full: str, tmp_path: Path) -> None:
    """A figure is left out, or does not say which results it waits for."""
    nothing = paper_page(tmp_path / "none", tmp_path / "none.csv")
    for text, lacking in ((full, False), (nothing, True)):
        for name, plan in FIGURES.items():
            (found,) = re.findall(rf'<figure id="figure-{name}">.*?</figure>', text, re.S)
            assert plan.title in found and ("No results yet of" in found) == lacking
            kind = "flow" if name == "gradient-flow" else "make"
            assert all(f'href="#{kind}-{arm}"' in found for arm in plan.arms)


def as_typed(page: str) -> str:
    """A page without what keeps options in one piece."""
    return re.sub("</?span>", "", page)


def test_numbers_lead_to_the_commands_that_made_them(full: str) -> None:
    """Nobody can find out where a number comes from."""
    places = dict(
        re.findall(r'<dt id="(make-[^"]*)">.*?</dt>\n(.*?)(?=\n<dt|</dl>)', as_typed(full), re.S)
    )
    for recipe in RECIPES.values():
        command = f"zoneout reproduce {recipe.name} --first-seed 1 --precision fp32"
        assert command in places[f"make-{recipe.name}"]
    assert places["make-char_ptb_zoneout"].count("<dd>") == 3
    assert "zoneout gradients gradient_flow_zoneout --seed 1" in as_typed(full)


def test_a_record_with_other_settings_is_named_and_left_out(tmp_path: Path) -> None:
    """A trial run stands in the table as if it were the recipe."""
    fabricated.write(tmp_path, fabricated.record("char_ptb_zoneout", epochs=2))
    text = paper_page(tmp_path, tmp_path / "none.csv")
    assert "char_ptb_zoneout, seed 1" in text
    assert cells(text, "Zoneout 0.5, 0.05") == ["1.362", "1.252", "no run yet"]


def test_spread_has_a_digit_more_than_the_paper() -> None:
    """A mean over seeds cannot be judged by what is shown of it, or one seed is shown to more
    than the paper is.
    """
    assert spread([81.44, 81.60], "perplexity") == "81.52 ± 0.11"
    assert spread([1.36249], "bits") == "1.362"


def test_speed_is_read_from_the_measurements(full: str) -> None:
    """A ratio is of another layer, or a goal that was missed is shown as met."""
    assert cells(full, "GRU, small") == [
        "zoneout",
        "float32",
        "20",
        "10",
        "torch.nn",
        "2.00",
        "1",
        "no",
    ]
    assert cells(full, "LSTM, char-PTB") == [
        "zoneout",
        "float32",
        "416",
        "478",
        "torch.nn",
        "0.87",
        "1",
        "yes",
    ]
    assert "A &lt;CPU&gt;: a training step" in full and "python benchmarks/gpu.py" in full
    assert "1 of 1 within their goal" in full  # memory, folded


@pytest.mark.parametrize(
    "text", ["group,layer\ntrain,LSTM\n", SPEED.replace("0.8702", "fast"), "\0"]
)
def test_measurements_that_cannot_be_read_are_a_sentence(text: str, tmp_path: Path) -> None:
    """A damaged table of measurements shows as a traceback, or as nothing."""
    path = tmp_path / "results.csv"
    path.write_text(text)
    if text == "\0":
        assert "<h2" in paper_page(tmp_path / "none", path)  # no lines: nothing to show
        return
    with pytest.raises(RunError, match="not a table of measurements"):
        paper_page(tmp_path / "none", path)


def test_runs_are_compared_with_each_other(mine: str) -> None:
    """A run's numbers stand beside another's name, or what differs between them is not shown."""
    rows = [re.sub(r"<[^>]*>", "|", line) for line in re.findall(r"<tr>.*?</tr>", mine)]
    (plain,) = [row for row in rows if "plain|" in row and "1.9000" in row]
    assert [cell for cell in plain.split("|") if cell][1:] == [
        "1.9000",
        "+0.2000",
        "2",
        "1.7100",
        "3",
        "1,234",
        "1:15",
        "finished",
    ]
    (rate,) = [row for row in rows if "--zoneout.cell" in row]
    assert [cell for cell in rate.split("|") if cell] == ["--zoneout.cell", "0.0", "0.5", "0.0"]
    assert mine.count("<figure") == 3  # two measures, and the gradients of one run
    mine = as_typed(mine)
    assert "--optimizer.betas 0.8 0.99" in mine and "--zoneout.cell 0.5" in mine


def test_the_command_of_a_run_makes_it_again(tmp_path: Path) -> None:
    """The command that a page shows is refused, or makes another run."""
    settings = {"data.name": "my text.txt", "model.one_bias": True, "batches.offset": False}
    folder = fabricated.run_folder(
        tmp_path, "a run", best=1.5, **settings, **{"optimizer.betas": [0.5, 0.9]}
    )
    (shown,) = [
        text for _, text in Page(runs_page([folder])).all("code") if "zoneout train" in text
    ]
    command = main.parse("train", shlex.split(shown)[2:])
    assert command.out == folder and command.config == read_config(folder)


def test_one_run_is_a_page_too(tmp_path: Path) -> None:
    """A single run, or one that has only begun, cannot be shown."""
    folder = fabricated.run_folder(tmp_path, "begun", best=1.5)
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").write_text("")
    text = runs_page([folder])
    assert "not finished" in text and "<figure" not in text and "Options in which" not in text


# --- that it is a good page -----------------------------------------------------------------------


def test_all_pages_have_one_look(every: str) -> None:
    """A page has a style sheet of its own, and lacks what the others have (the dark, say)."""
    assert fabricated.shared_look(every)


def test_one_place_makes_pages() -> None:
    """Some page has a skeleton of its own, which no test above has seen."""
    sources = Path(html.__file__).parents[1].rglob("*.py")
    assert [path.name for path in sources if "<html lang" in path.read_text(encoding="utf-8")] == [
        "html.py"
    ]


def test_it_needs_nothing_else(every: str) -> None:
    """The page loads something, or runs a script: offline it is another page."""
    read = Page(every)
    assert not read.all("script") and not read.all("iframe") and not read.all("img")
    targets = [
        a.get(k)
        for _, a, _ in read.found
        for k in ("href", "src", "xlink:href", "data")
        if a.get(k)
    ]
    assert targets and all(str(target).startswith(("#", "data:")) for target in targets)
    assert "@import" not in every and not re.search(r"url\((?!#)", every)


def test_every_link_leads_somewhere(every: str) -> None:
    """A link to a command goes nowhere, or two places have one name."""
    read = Page(every)
    ids = [a["id"] for _, a, _ in read.found if "id" in a]
    assert len(ids) == len(set(ids))
    links = {
        str(a[k])[1:]
        for _, a, _ in read.found
        for k in ("href", "xlink:href")
        if str(a.get(k)).startswith("#")
    }
    assert links <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", every)) <= set(ids)
    labels = {a["aria-labelledby"] for _, a, _ in read.found if "aria-labelledby" in a}
    assert labels <= set(ids)


def test_it_can_be_read_aloud_and_by_keyboard(every: str) -> None:
    """A screen reader meets a table without headings or a picture without a name; a keyboard
    cannot scroll.
    """
    read = Page(every)
    assert all(len(read.all(name)) == 1 for name in ("h1", "main", "nav", "header", "footer"))
    (skip, *_) = [a for a, _ in read.all("a")]
    assert skip["href"] == "#main"
    levels = [int(name[1]) for name, _, _ in read.found if re.fullmatch(r"h[1-6]", name)]
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert all(a.get("scope") in ("col", "row", "colgroup") for a, _ in read.all("th"))
    assert len(read.all("caption")) == len(read.all("table")) and all(
        text.strip() for _, text in read.all("caption")
    )
    regions = [a for a, _ in read.all("div") if a.get("class") == "scroll"]
    assert len(regions) == len(read.all("table"))
    assert all(a["tabindex"] == "0" and a["role"] == "region" for a in regions)
    pictures = [a for a, _ in read.all("svg")]
    assert all(a.get("role") == "img" for a in pictures)
    assert len(re.findall(r"<svg[^>]*>\s*<title>[^<]+</title>\s*<desc>[^<]+</desc>", every)) == len(
        pictures
    )
    assert len(read.all("figcaption")) == len(read.all("figure")) == len(pictures)
    assert 'lang="en"' in every and "width=device-width" in every


def test_rows_are_as_long_as_their_head(every: str) -> None:
    """The cells of a row stand under the wrong headings."""
    for found in re.findall(r"<table>.*?</table>", every, re.S):
        head, body = found.split("<tbody>")
        first, *second = re.findall(r"<tr>(.*?)</tr>", head)
        spans = [int(span) for span in re.findall(r'colspan="(\d+)"', first)]
        width = first.count("<th") - len(spans) + sum(spans)
        assert not second or second[0].count("<th") == sum(spans)
        for row in re.findall(r"<tr>(.*?)</tr>", body):
            assert row.count("<td") + row.count("<th") == width


def test_it_has_contrast_in_light_and_dark() -> None:
    """A text cannot be told from its ground."""
    for style in html.STYLE.split("@media (prefers-color-scheme: dark)"):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", style))
        for ground in ("paper", "wash"):
            assert all(
                fabricated.contrast(colours[text], colours[ground]) >= 4.5
                for text in ("ink", "soft", "link")
            )


def test_whatever_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    """A name or a record puts its own HTML into the page."""
    bad = "<script>alert(1)</script>&\"'"
    record = fabricated.record("char_ptb_zoneout")
    record |= {"command": bad, "device": bad, "date": bad}
    record["versions"]["torch"] = bad
    fabricated.write(tmp_path / "res", record)
    path = tmp_path / "speed.csv"
    path.write_text(
        SPEED.replace("A GPU", '"<script>alert(2)</script>"').replace("gpu graph", "<script>x")
    )
    text = paper_page(tmp_path / "res", path)
    folder = fabricated.run_folder(tmp_path, 'a "<script>&b', best=1.0, **{"data.name": bad})
    other = fabricated.run_folder(tmp_path, "<svg onload=x>", best=2.0)
    for shown in (text, runs_page([folder, other])):
        read = Page(shown)
        assert not read.all("script") and not any("onload" in a for _, a, _ in read.found)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;" in text


def test_the_same_records_give_the_same_page(full: str, results: Path, speed: Path) -> None:
    """A page that is made again differs, so that nobody sees what has changed."""
    assert paper_page(results, speed) == full


# --- the command ----------------------------------------------------------------------------------


def test_the_command(
    results: Path, speed: Path, full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes another page, or to another place."""
    out = tmp_path / "new" / "report.html"
    assert (
        main.main(
            ["report", "--results", str(results), "--benchmarks", str(speed), "--out", str(out)]
        )
        == 0
    )
    assert out.read_text(encoding="utf-8") == full and str(out) in capsys.readouterr().out
    folder = fabricated.run_folder(tmp_path, "run", best=1.5)
    assert main.main(["report", str(folder), "--out", str(out)]) == 0
    assert "1.5000" in out.read_text(encoding="utf-8")
    assert (
        main.main(["report", str(tmp_path / "nothing"), "--out", str(out)]) == exit_codes.WRONG_USE
    )
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert (
        main.main(["report", str(folder), "--out", str(tmp_path / "file" / "report.html")])
        == exit_codes.FAILED
    )
    assert "is not a folder" in capsys.readouterr().err
    text = tmp_path / "my.txt"
    text.write_text("a year's work")
    assert main.main(["report", str(folder), "--out", str(text)]) == exit_codes.WRONG_USE
    assert "--out: expected a name that ends in .html, got" in capsys.readouterr().err
    assert text.read_text() == "a year's work", "a text was written over"
