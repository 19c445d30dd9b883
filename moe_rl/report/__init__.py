"""Reports: from results on disk to findings, as markdown and as one HTML file that opens without a network. No torch.

results/<study>/report.md|html    one study     results/report.md|html    all of them, claim by claim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_rl import claims, figures, summary
from moe_rl.claims import Claim, Finding
from moe_rl.printing import summary_rows
from moe_rl.report._html import page
from moe_rl.report._markdown import bullets, escape, link, plural, slug, table
from moe_rl.report._parts import (
    HOW_TO_READ,
    budget_table,
    claim_text,
    comparison_text,
    data_text,
    figure_text,
    incidents_text,
    null_results,
    provenance_text,
    settings_text,
)
from moe_rl.store import StoreError, Study, is_packed, run_folders

__all__ = ["is_study", "page", "report_results", "report_study"]


def is_study(folder: Path) -> bool:
    """Whether a folder holds the runs of a study, packed or not; else it may hold studies."""
    return is_packed(folder) or bool(run_folders(folder))


def report_study(folder: Path, formats: Sequence[str] = ("png",)) -> tuple[Study, list[Path]]:
    """Draw a study's figures and write its report.md and report.html; returns the study and all paths.

    Errors: StoreError for a folder without runs.
    """
    study, paths = figures.draw_all(folder, formats=[*formats, *({"png"} - set(formats))])
    return study, [*paths, *_write(study.folder, study_markdown(study))]


def report_results(results: Path, formats: Sequence[str] = ("png",)) -> Iterator[Path]:
    """Report every study below a folder, then all claims over all of them; yields each path once it is written.

    Errors: StoreError when there is none.
    """
    folders = sorted(path for path in results.iterdir() if path.is_dir() and is_study(path)) if results.is_dir() else []
    if not folders:
        raise StoreError(f"no study below {results}; give results/<study>, or a folder that holds studies")
    studies = {}
    for folder in folders:
        studies[folder.name], paths = report_study(folder, formats)
        yield from paths
    yield from _write(results, results_markdown(studies))


def _write(folder: Path, markdown: str) -> list[Path]:
    paths = [folder / "report.md", folder / "report.html"]
    for path, text in zip(paths, (markdown, page(markdown, folder)), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


# ----------------------------------------------------------------------------------------------------------- one study
def study_markdown(study: Study) -> str:
    """The report of one study."""
    name = study.folder.name
    judged = [claims.judge(one, {name: study}) for one in claims.names()]
    read = [(claim, found) for claim, found in judged if name in claim.studies]
    drawn = [text for one in figures.names() if (text := figure_text(study, one))]
    rows = summary_rows(summary.summary_table(study))
    parts = [
        f"# Study {escape(name)}\n",
        f"{HOW_TO_READ}\n",
        f"## What was run\n\n{budget_table(study)}",
        "## What came out\n\n" + table(rows[0], [[escape(cell) for cell in row] for row in rows[1:]]),
        f"## Arms compared\n\n{comparison_text(study)}",
        *(
            ["## Claims\n\nJudged on this study alone.\n", *(claim_text(*one) for one in read)]
            if read
            else ["## Claims\n\nNo claim is judged on this study.\n"]
        ),
        "## Figures\n\n" + ("".join(drawn) or "There is nothing to draw.\n"),
        f"## Runs that did not finish\n\n{incidents_text([study])}",
        f"## Settings\n\n{settings_text(study)}",
        f"## Code, machine, versions\n\n{provenance_text([study])}",
        f"## Data\n\n{data_text(study)}",
    ]
    return "\n".join(parts)


# --------------------------------------------------------------------------------------------------------- all studies
def results_markdown(studies: dict[str, Study]) -> str:
    """The report over all studies, claim by claim."""
    judged = claims.judge_all(studies)
    others = sorted(set(studies) - {name for claim, _ in judged for name in claim.studies})
    absent = sorted({name for claim, _ in judged for name in claim.studies} - set(studies))
    nulls = [f"{escape(name)}: {told}" for name, one in studies.items() for told in null_results(one)]
    overview = [
        [link(title, f"#{slug(title)}"), f"**{found.verdict}**", escape(found.because)]
        for claim, found in judged
        for title in [f"{claim.id}: {claim.title}"]
    ]
    numbers = {verdict: sum(found.verdict == verdict for _, found in judged) for verdict in claims.VERDICTS}
    counts = ", ".join(f"{number} {verdict}" for verdict, number in numbers.items() if number)
    listed = [f"{link(name, f'{name}/report.html')}: {plural(len(one.runs), 'run')}" for name, one in studies.items()]
    listed += [f"{name}: has not been run" for name in absent]
    parts = [
        "# The claims, tested\n",
        f"{len(judged)} claims: {counts}. {HOW_TO_READ}\n",
        "## Verdicts\n\n" + table(["claim", "verdict", "why"], overview),
        "## Claim by claim\n",
        *(_claim_with_runs(claim, found, studies) for claim, found in judged),
        *(["## Studies that no claim reads\n"] if others else []),
        *(f"### {escape(name)}\n\n{comparison_text(studies[name])}" for name in others),
        "## Null results\n\n" + (bullets(nulls) or "No pair of arms was tested without a difference being shown.\n"),
        f"## Runs that did not finish\n\n{incidents_text(studies.values())}",
        f"## Studies\n\n{bullets(listed)}",
        f"## Code, machine, versions\n\n{provenance_text(studies.values())}",
    ]  # fmt: skip
    return "\n".join(parts)


def _claim_with_runs(claim: Claim, found: Finding, studies: dict[str, Study]) -> str:
    text = claim_text(claim, found)
    for name in claim.studies:
        if name in studies:
            text += f"\n*Run in study {link(name, f'{name}/report.html')}:*\n\n{budget_table(studies[name])}\n"
            text += "".join(figure_text(studies[name], one, f"{name}/") for one in claim.figures)
    return text
