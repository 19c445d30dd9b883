"""A markdown report as one HTML file that opens from disk: pictures inside, a table of contents, nothing loaded."""

from __future__ import annotations

import base64
import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from moe_rl.claims import NOT_RUN, NOT_SUPPORTED, NOT_TESTABLE, SUPPORTED
from moe_rl.report._markdown import slug

CLASSES = {SUPPORTED: "yes", NOT_SUPPORTED: "no", NOT_TESTABLE: "open", NOT_RUN: "open"}
STYLE = """
:root { color-scheme: light; }
body { font: 1rem/1.55 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 60rem;
  padding: 1rem; overflow-wrap: break-word; }
h1, h2, h3 { line-height: 1.25; }
h2 { border-top: 1px solid #ccc; padding-top: 1rem; margin-top: 2.5rem; }
img { max-width: min(100%, 50rem); height: auto; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; }
nav { background: #f7f7f7; padding: .5rem 1rem; border-radius: .3rem; }
nav ul { padding-left: 1.2rem; margin: .3rem 0; }
a { color: #004488; }
.yes, .no, .open { padding: .1rem .45rem; border-radius: .3rem; white-space: nowrap; }
.yes { background: #d5ecd4; } .no { background: #f5d3d3; } .open { background: #e6e6e6; }
@media (max-width: 40rem) { .yes, .no, .open { white-space: normal; } td, th { padding: .3rem .4rem; } }
@media print { nav { display: none; } }
"""


def page(markdown: str, folder: Path) -> str:
    """The HTML of a report. folder: where it will lie, from which its pictures are read."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("table_open", _open_table)
    parser.add_render_rule("table_close", _close_table)
    tokens = parser.parse(markdown)
    headings = _number_headings(tokens)
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                child.attrSet("src", data_uri(folder / unquote(str(child.attrGet("src")))))
        _mark_verdicts(token.children or [])
    title = next((text for level, text, _ in headings if level == 1), "report")
    body = parser.renderer.render(tokens, parser.options, {})
    first, end, rest = body.partition("</h1>")
    body = f"{first}{end}{_contents(headings)}{rest}" if end else f"{_contents(headings)}{body}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        "</body>\n</html>\n"
    )


def data_uri(path: Path) -> str:
    """A png as data URI."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _number_headings(tokens: Sequence[Token]) -> list[tuple[int, str, str]]:
    """Give every heading an id; returns (level, text, id) of each."""
    found: list[tuple[int, str, str]] = []
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            stem, taken = slug(text), {anchor for _, _, anchor in found}
            names = (f"{stem}-{n}" if n else stem for n in range(len(found) + 1))
            anchor = next(name for name in names if name not in taken)
            opening.attrSet("id", anchor)
            found.append((int(opening.tag[1:]), text, anchor))
    return found


def _contents(headings: Sequence[tuple[int, str, str]]) -> str:
    """Links to the headings of the second level, and under each those of the third."""
    chapters: list[list[str]] = []
    for level, text, anchor in headings:
        entry = f'<a href="#{html.escape(anchor)}">{html.escape(text)}</a>'
        if level == 2:
            chapters.append([entry])
        elif level == 3 and chapters:
            chapters[-1].append(entry)
    items = [
        f"<li>{entry}{'<ul>' + ''.join(f'<li>{one}</li>' for one in below) + '</ul>' if below else ''}</li>"
        for entry, *below in chapters
    ]
    return '<nav aria-label="Contents">\n<ul>\n' + "\n".join(items) + "\n</ul>\n</nav>\n"


def _mark_verdicts(children: Sequence[Token]) -> None:
    """Colour the verdicts, which stand in bold."""
    for strong, text in itertools.pairwise(children):
        if strong.type == "strong_open" and text.content in CLASSES:
            strong.attrSet("class", CLASSES[text.content])


def _open_table(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    """Wide tables scroll by themselves on a narrow screen."""
    return '<div class="wide" tabindex="0"><table>\n'


def _close_table(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    return "</table></div>\n"
