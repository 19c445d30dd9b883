"""The parts that the reports of a study and of all studies share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from moe_rl import contrasts, figures, measures, stats, summary
from moe_rl.claims import Claim, Effect, Finding
from moe_rl.report._markdown import bullets, escape, image, interval, link, number, plural, span, table
from moe_rl.store import Study, shared_and_varied

HOW_TO_READ = (
    f"Numbers are means over seeds with 95 % t intervals; from {stats.BOOTSTRAP_RUNS} finished runs up, also "
    "interquartile means with 95 % bootstrap intervals. Differences are paired by seed: same prompts, same start, "
    f"same sampling stream. Below {stats.CLAIM_RUNS} seeds nothing is tested. p values are of the paired t test and "
    "of an exact test that flips signs (with 5 seeds it cannot come below .0625), both adjusted by Holm: over the "
    "tests that decide a claim, over those shown besides, over all pairs of arms of a study, over all pairs of an "
    "arm's settings. At one setting, all arms sample equally many completions; CPU seconds of training are those of "
    "sampling, the old pass and the updates, without measuring drift and evaluating. A verdict comes from the rule "
    "that is stated with it, applied by a program to the data of these runs, never by hand. It is about these "
    "models, tasks and budgets: small models trained from scratch, not the 30B models of the sources."
)


# -------------------------------------------------------------------------------------------------------- what was run
def budget_table(study: Study) -> str:
    """Per arm: settings, runs and how they ended, and what a run spent."""
    numbers = measures.run_numbers(study)
    counted = summary.summary_table(study)
    rows = []
    for arm in summary.arms_of(study):
        runs, counts = numbers[numbers["arm"] == arm], counted[counted["arm"] == arm]
        ends = {name: int(counts[name].sum()) for name in ("finished", "diverged", "failed", "unfinished", "missing")}
        told = ", ".join(f"{count} {name}" for name, count in ends.items() if count or name == "finished")
        spent = [span(runs[name]) for name in (*measures.BUDGETS, "cpu_s")]
        rows.append([escape(arm), len(counts), runs["seed"].nunique(), told, *spent])
    head = ["arm", "settings", "seeds", "runs", *(f"{told} a run" for told in measures.BUDGETS.values())]
    head.append("CPU seconds a run in all")
    return table(head, rows) + "\n" + equal_compute(numbers)


def equal_compute(numbers: pd.DataFrame) -> str:
    """What the runs share of their budgets, in a sentence."""
    done = numbers[numbers["state"] == "finished"]
    if done.empty:
        return "No run has finished.\n"
    queries = done["queries"].dropna().unique()
    if len(queries) == 1:
        return f"Every finished run sampled {number(queries[0], 7)} completions: equal queries.\n"
    return f"Finished runs sampled {span(queries)} completions: only those at one setting are equal in queries.\n"


def incidents_text(studies: Iterable[Study]) -> str:
    """Every run that did not finish, with its reason."""
    told = []
    for study in studies:
        reasons = {
            (run["arm"], run["knobs"], run["seed"]): run.get("reason")
            for run in study.runs.to_dict("records")
            if run["state"] != "finished"
        }
        told += [f"{escape(study.folder.name)}: {escape(line)}" for line in summary.incidents(study)]
        told += [
            f"{escape(study.folder.name)}: {escape(' '.join(map(str, key)))}: {escape(reason)}"
            for key, reason in reasons.items()
            if isinstance(reason, str) and reason
        ]
    return bullets(told) if told else "All runs finished.\n"


# --------------------------------------------------------------------------------------------------------- comparisons
def comparison_text(study: Study) -> str:
    """All pairs of arms, of settings of an arm that differ in a choice, and the null results in words."""
    parts = [
        _pairs(study, pairs)
        for pairs in (contrasts.comparison_table(study), contrasts.setting_table(study))
        if len(pairs)
    ]
    if not parts:
        return "No two arms share a setting and a seed.\n"
    nulls = null_results(study)
    return "\n".join(parts) + ("\nNull results:\n\n" + bullets(nulls) if nulls else "")


def _pairs(study: Study, pairs: pd.DataFrame) -> str:
    rows = []
    for row in pairs.to_dict("records"):
        difference = stats.Estimate(row["difference"], row["low"], row["high"], row["n"])
        tests = [number(row[name], 2) for name in ("p", "sign_flip_p")]
        told = [escape(contrasts.pair_label(study, row)), number(difference.value), interval(difference), row["n"]]
        rows.append([*told, *tests, escape(row["claim"])])
    return table(["final reward", "difference", "95 %", "n", "p (t, Holm)", "p (sign flips, Holm)", "claim"], rows)


def null_results(study: Study) -> list[str]:
    """Pairs of which no difference was shown, and how large one could have been seen."""
    pairs = pd.concat([contrasts.comparison_table(study), contrasts.setting_table(study)])
    return [
        f"{escape(contrasts.pair_label(study, row))}: {number(row['difference'])} (n = {row['n']}); differences below "
        f"about {number((row['high'] - row['low']) / 2, 2)} could not be seen"
        for row in pairs[pairs["claim"] == "no difference shown"].to_dict("records")
    ]


# -------------------------------------------------------------------------------------------------------------- claims
def claim_text(claim: Claim, found: Finding) -> str:
    """A claim, what it says, the rule, the verdict and the numbers."""
    parts = [
        f"### {claim.id}: {escape(claim.title)}\n",
        f"**{found.verdict}**: {escape(found.because)}.\n",
        f"*Claimed:* {escape(claim.said)} (Source: {escape(claim.source)}.)\n",
        *([f"*Contested:* {escape(claim.contested)}\n"] if claim.contested else []),
        f"*Measured:* {escape(claim.measure)}\n",
        f"*Rule:* {escape(claim.rule)}\n",
        *([effects_table(found.effects)] if found.effects else []),
        *([bullets(escape(note) for note in found.notes)] if found.notes else []),
    ]
    return "\n".join(parts) + "\n"


def effects_table(effects: Sequence[Effect]) -> str:
    rows = [
        [
            escape(effect.what),
            escape(effect.at) or "-",
            number(effect.estimate.value),
            interval(effect.estimate),
            effect.estimate.n,
            number(effect.p, 2),
            number(effect.sign_flip_p, 2),
        ]
        for effect in effects
    ]
    return table(["effect", "study, setting", "mean", "95 %", "n", "p (t, Holm)", "p (sign flips, Holm)"], rows)


# ------------------------------------------------------------------------------------------------- figures, provenance
def figure_text(study: Study, name: str, place: str = "") -> str:
    """A figure with its caption. place: from the report's folder to the study's, '' or ending in a slash."""
    if not (study.folder / "figures" / f"{name}.png").exists():
        return ""
    told = figures.caption(name)
    alt = f"{told} Study {study.folder.name}."
    return f"{image(alt, f'{place}figures/{name}.png')}\n\n*{escape(name)}: {escape(told)}*\n\n"


def settings_text(study: Study) -> str:
    """What all runs share, and what varies."""
    shared, varied = shared_and_varied(study.configs)
    names = sorted({name for settings in varied for name in settings} - {"seed"})
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for run, settings in zip(study.runs.to_dict("records"), varied, strict=True):
        seen.setdefault((run["arm"], run["knobs"]), settings)
    rows = [[escape(a), escape(k), *(escape(s.get(name, "-")) for name in names)] for (a, k), s in seen.items()]
    parts = ["What varies, besides the seed:\n", table(["arm", "setting", *map(escape, names)], rows)]
    parts += [
        "\nWhat every run shares:\n",
        table(["setting", "value"], [[escape(k), escape(v)] for k, v in shared.items()]),
    ]
    return "\n".join(parts)


def provenance_text(studies: Iterable[Study]) -> str:
    """Commits, machines and library versions of the runs, each with how many runs have it."""
    runs = pd.concat([study.runs for study in studies], ignore_index=True)
    versions = runs["versions"] if "versions" in runs else pd.Series(dtype=object)
    told = pd.DataFrame([v if isinstance(v, dict) else {} for v in versions])
    columns = {name: runs[name] for name in ("git_commit", "machine") if name in runs} | {n: told[n] for n in told}
    rows = [
        [escape(name.replace("_", " ")), "; ".join(f"{escape(v)} ({plural(n, 'run')})" for v, n in _tally(values))]
        for name, values in columns.items()
    ]
    return table(["what", "which"], rows)


def _tally(values: pd.Series[Any]) -> list[tuple[str, int]]:
    return [(str(value) or "unknown", int(n)) for value, n in values.dropna().value_counts().items()]


def data_text(study: Study) -> str:
    """Links to the files that the report was made from, relative to the study's folder."""
    files = (
        sorted(study.folder.glob("*.parquet")) + sorted(study.folder.glob("*.json")) + [study.folder / "summary.csv"]
    )
    told = [link(path.name, path.name) for path in files if path.exists()]
    for run in study.runs.to_dict("records"):
        place = f"{run['arm']}/{run['knobs']}/seed_{run['seed']}"
        if (study.folder / place / "config.yaml").exists():
            names = [name for name in RUN_FILES if (study.folder / place / name).exists()]
            links = ", ".join(link(name, f"{place}/{name}") for name in names)
            told.append(f"{escape(place)}: {links}")
    thinned = f"\nThis packed form leaves out rows: {escape(study.thinned)}.\n" if study.thinned else ""
    return bullets(told) + thinned


RUN_FILES = ("config.yaml", "run.json", "status.json", "steps.jsonl", "updates.jsonl", "drift.jsonl")
