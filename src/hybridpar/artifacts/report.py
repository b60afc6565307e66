"""One self-contained HTML page: every question with its findings, figures, tables and notebook, and every outcome."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridpar.artifacts.catalogue import QUESTIONS, Question
from hybridpar.artifacts.save import write_bytes

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem; }
nav ul { columns: 2; } figure { margin: 1.5rem 0; } figcaption, caption { color: #555; font-size: .85rem; }
figure img { max-width: 100%; width: 35rem; display: block; } caption { text-align: left; margin-bottom: .4rem; }
table.artifact { border-collapse: collapse; font-size: .8rem; } .scroll { overflow: auto; max-height: 32rem; }
table.artifact th, table.artifact td { padding: .15rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
table.artifact thead th { position: sticky; top: 0; background: #fff; border-bottom: 2px solid #888; }
.number { text-align: right; font-variant-numeric: tabular-nums; } .text { text-align: left; }
.source { color: #777; font-size: .75rem; } .missing { background: #f4f4f4; padding: .6rem; }
"""


class ReportError(RuntimeError):
    """The report cannot be built; the message names the file that is missing and what writes it."""


def build(figures_dir: Path, numbers_json: Path, notebooks_dir: Path, paper_pdf: Path, out_html: Path) -> None:
    """Write the report of one study.

    Figures and tables are inside the page; the executed notebooks (`<name>.html` under `notebooks_dir`) and the paper
    are linked relative to it.

    Raises:
        ReportError: a figure, table, or the numbers are missing.
    """
    numbers = json.loads(_read(numbers_json, "the numbers step"))
    body = "\n".join(_section(question, figures_dir, notebooks_dir, numbers, out_html.parent) for question in QUESTIONS)
    paper = html.escape(os.path.relpath(paper_pdf, out_html.parent))
    contents = "".join(
        f'<li><a href="#{question.notebook}">{html.escape(question.title)}</a></li>' for question in QUESTIONS
    )
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>hybridpar: {html.escape(numbers['study']['text'])}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        "<h1>How should a language model be split over devices?</h1>\n"
        f"{_sentences(('conditions', 'outcomes'), numbers)}"
        f'<nav><ul>{contents}<li><a href="{paper}">The paper (PDF)</a></li></ul></nav>\n{body}\n</body>\n</html>\n'
    )
    write_bytes(out_html, page.encode())


def _section(question: Question, figures_dir: Path, notebooks_dir: Path, numbers: Any, page_dir: Path) -> str:
    notebook = html.escape(os.path.relpath(notebooks_dir / f"{question.notebook}.html", page_dir))
    shown = "\n".join(_artifact(figures_dir, name, page_dir) for name in question.artifacts)
    return (
        f'<section id="{question.notebook}">\n<h2>{html.escape(question.title)}</h2>\n'
        f"{_sentences(question.findings, numbers)}{shown}\n"
        f'<p><a href="{notebook}">The notebook, executed</a></p>\n</section>'
    )


def _sentences(questions: Iterable[str], numbers: Any) -> str:
    keys = [
        f"finding-{question}-{n}" for question in questions for n in range(numbers[f"findings-{question}"]["value"])
    ]
    return "<ul>" + "".join(f"<li>{html.escape(numbers[key]['text'])}</li>" for key in keys) + "</ul>\n"


def _artifact(figures_dir: Path, name: str, page_dir: Path) -> str:
    sidecar = json.loads(_read(figures_dir / f"{name}.json", "the notebooks"))
    caption, title = html.escape(sidecar["caption"]), html.escape(sidecar["title"])
    if sidecar["kind"] == "missing":
        return f'<p class="missing"><strong>{title}.</strong> {caption}</p>'
    source = (
        f'<p class="source">From {len(sidecar["run_ids"])} runs, drawn at commit {sidecar["commit"] or "unknown"}. '
        f"{_links(figures_dir, name, page_dir)}</p>"
    )
    if sidecar["kind"] == "table":
        table = _read(figures_dir / f"{name}.html", "the notebooks")
        return f'<h3>{title}</h3>\n<div class="scroll">{table}</div>\n{source}'
    picture = base64.b64encode((figures_dir / f"{name}.png").read_bytes()).decode()
    return (
        f'<figure id="{name}">\n<img alt="{title}" src="data:image/png;base64,{picture}">\n'
        f"<figcaption><strong>{title}.</strong> {caption}</figcaption>\n</figure>\n{source}"
    )


def _links(figures_dir: Path, name: str, page_dir: Path) -> str:
    """The files of an artifact, for those who go on with them."""
    files = [path for suffix in ("pdf", "csv", "tex", "json") if (path := figures_dir / f"{name}.{suffix}").exists()]
    return " ".join(
        f'<a href="{html.escape(os.path.relpath(path, page_dir))}">{path.suffix[1:].upper()}</a>' for path in files
    )


def _read(path: Path, writer: str) -> str:
    if not path.exists():
        raise ReportError(f"{path} does not exist; {writer} writes it")
    return path.read_text(encoding="utf-8")
