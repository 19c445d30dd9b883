"""A report opens from disk alone, tells every claim and every run, and takes no name at its word."""

import json
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from synthetic import make_study

from moe_rl import claims, figures, report, store
from moe_rl.measures import run_numbers
from moe_rl.report._markdown import escape, number, slug, span, table
from moe_rl.store import read_study
from moe_rl.store.files import seal

SCRIPT = Path(__file__).parents[1] / "experiments" / "make_report.py"
SMALL = {"steps": 4, "updates": 2, "layers": 2, "top_k": 2, "experts": 8}
NASTY = "<img src=x onerror=alert(1)>"
REASON = "[click](javascript:alert(1)) | <b>out</b> of **memory** &lt;"
LOADS = {"src", "srcset", "data", "action", "poster", "background", "style"}


class Page(HTMLParser):
    """What a report's HTML holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br", "hr", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three studies, one of them packed, one with a nasty name; their reports are written."""
    folder = tmp_path_factory.mktemp("results")
    whole = make_study(
        folder, "side_by_side", seeds=range(5), missing=[("gspo", 1)], diverged=[("grpo", 2)], **SMALL
    )  # fmt: skip
    numbers = run_numbers(read_study(whole))
    store.pack(read_study(whole), folder / "drift_per_update", numbers)
    make_study(folder, "playground", arms=["gspo", NASTY], seeds=[0], failed=[(NASTY, 0)], **SMALL)
    run = folder / "playground" / NASTY / "default" / "seed_0"
    (run / "status.json").write_text(json.dumps(seal({**store.read_status(run), "reason": REASON})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "names", lambda: ["clip_fraction", "reward"])  # the others have tests of their own
        list(report.report_results(folder))
    return folder


@pytest.fixture(scope="module", params=["", "side_by_side", "drift_per_update", "playground"])
def written(results, request):
    """(folder, Page) of a report."""
    folder = results / request.param
    return folder, Page((folder / "report.html").read_text())


def test_the_html_is_well_formed_and_readable_on_a_phone(written):
    _, page = written
    assert page.open == []
    assert len(page.all("h1")) == 1
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert all("wide" in attributes["class"] for attributes in page.all("div"))
    assert len(page.all("div")) == len(page.all("table")) > 2


def test_nothing_is_loaded_from_anywhere(written):
    folder, page = written
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"} == set()
    assert page.all("img")
    for attributes in page.all("img"):
        assert attributes["src"].startswith("data:image/png;base64,iVBOR")
        assert len(attributes["alt"]) > 20
    for tag, attributes in page.tags:
        assert tag == "img" or not LOADS & attributes.keys(), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    style = (folder / "report.html").read_text().partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_links_lead_somewhere(written):
    folder, page = written
    anchors = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    targets = [attributes["href"] for attributes in page.all("a")]
    assert len(targets) > 5
    for target in targets:
        if target.startswith("#"):
            assert unquote(target[1:]) in anchors
        else:
            assert (folder / unquote(target)).exists(), target


def test_every_claim_is_told_with_its_rule_and_verdict(results):
    page = Page((results / "report.html").read_text())
    judged = claims.judge_all({name: read_study(results / name) for name in ("side_by_side", "drift_per_update")})
    for claim, found in judged:
        for text in (f"{claim.id}: {claim.title}", claim.said, claim.source, claim.measure, claim.rule, found.verdict):
            assert " ".join(text.split()) in page.words
        assert found.because in page.words
    verdicts = {attributes.get("class") for attributes in page.all("strong")}
    assert verdicts <= {"yes", "no", "open"}
    assert len(page.all("strong")) == 2 * len(judged)
    assert all(claim.contested in page.words for claim, _ in judged if claim.contested)


def test_what_was_run_and_how_it_ended_is_told(results):
    for folder in (results, results / "side_by_side", results / "drift_per_update"):
        words = Page((folder / "report.html").read_text()).words
        assert "gspo seed 1 is missing" in words
        assert "grpo seed 2 diverged at step 2" in words
        assert "loss is nan at step 2 update 2" in words
        assert "4 finished, 1 diverged" in words
        assert "Every finished run sampled 1024 completions: equal queries." in words
        assert "has not been run" in words or folder != results
    words = Page((results / "side_by_side" / "report.html").read_text()).words
    assert "test (14 runs)" in words
    assert "grpo minus gspo" in words


def test_the_settings_that_vary_and_those_that_are_shared_are_told(tmp_path, monkeypatch):
    make_study(tmp_path, "s", arms=["gspo"], knobs=[{"optim.lr": 1e-4}, {"optim.lr": 4e-4}], seeds=[0], **SMALL)
    monkeypatch.setattr(figures, "names", list)
    report.report_study(tmp_path / "s")
    text = (tmp_path / "s" / "report.md").read_text()
    assert "| gspo | optim.lr=0.0001 | 0.0001 |" in text
    assert "| updates | 2 |" in text
    assert "(gspo/optim.lr=0.0004/seed_0/config.yaml)" in text


def test_a_packed_study_gives_the_same_findings(results):
    whole, packed = (read_study(results / name) for name in ("side_by_side", "drift_per_update"))
    for name in claims.names():
        (_, one), (_, other) = (claims.judge(name, {"side_by_side": study}) for study in (whole, packed))
        assert one.verdict == other.verdict
        assert one.because.replace("side_by_side", "drift_per_update") == other.because
        assert [effect.estimate.n for effect in one.effects] == [effect.estimate.n for effect in other.effects]
    sections = [
        re.search(r"## What came out\n(.*?)## Claims", (results / name / "report.md").read_text(), re.S).group(1)
        for name in ("side_by_side", "drift_per_update")
    ]
    assert sections[0] == sections[1]


def test_names_are_shown_and_never_obeyed(results):
    page = Page((results / "playground" / "report.html").read_text())
    assert NASTY in page.words
    assert REASON in page.words
    assert page.all("b") == []
    assert not any("javascript" in (attributes.get("href") or "") for attributes in page.all("a"))


def test_html_in_markdown_is_text(tmp_path):
    page = Page(report.page("# t\n\n<script>alert(1)</script> and <b>bold</b>\n", tmp_path))
    assert "<script>alert(1)</script> and <b>bold</b>" in page.words
    assert page.all("script") == page.all("b") == []


@pytest.mark.parametrize(
    "text",
    [
        NASTY,
        REASON,
        "a|b",
        "_x_ *y* `z`",
        "# title",
        "- item",
        "1. first",
        "~~gone~~",
        "a\nb",
        "\\",
        "grpo_routing_replay",
    ],
)
def test_escaped_text_says_itself(text):
    html = MarkdownIt("commonmark").enable("table").enable("strikethrough").render(escape(text))
    page = Page(html)
    assert page.words == " ".join(text.split())
    assert [tag for tag, _ in page.tags] == ["p"]


def test_tables_have_as_many_cells_in_every_row():
    html = MarkdownIt("commonmark").enable("table").render(table(["a", "b"], [[escape("x|y"), 1], ["", 2]]))
    assert len(Page(html).all("td")) == 4


def test_numbers_are_short_and_anchors_plain():
    assert [number(x) for x in (float("nan"), 3.0, 0.12345, 1e-5, 123456.0)] == ["-", "3", "0.123", "1e-05", "123456"]
    assert span([256, 256.0, float("nan")]) == "256"
    assert span([1.5, 2.25]) == "1.5\u00a0to\u00a02.25"
    assert slug("C1: About ten percent, or so") == "c1-about-ten-percent-or-so"


def make_report(monkeypatch, *arguments):
    """The exit code of the script, run here."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_the_script_takes_studies_and_results_folders(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "names", list)
    study = make_study(tmp_path, "s", arms=["gspo"], seeds=[0], **SMALL)
    assert make_report(monkeypatch, study, tmp_path) == 0
    of_study = [str(study / name) for name in ("report.md", "report.html")]
    of_all = [str(tmp_path / name) for name in ("report.md", "report.html")]
    assert capsys.readouterr().out.split() == [*of_study, *of_study, *of_all]
    assert make_report(monkeypatch, tmp_path / "nothing") == 2
    assert capsys.readouterr().err.startswith(f"error: no study below {tmp_path / 'nothing'}")
