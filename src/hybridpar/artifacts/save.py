"""Write artifacts: PDF + PNG for a figure; CSV, booktabs TeX and HTML for a table; one JSON sidecar for each.

The same artifact gives the same bytes: no dates, no random ids, fixed fonts. Files appear whole or not at all.
"""

from __future__ import annotations

import html
import io
import json
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hybridpar.artifacts.artifact import Artifact, FigureArtifact, Missing, TableArtifact

_SUFFIXES = (".pdf", ".png", ".csv", ".tex", ".html")
_TEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "ρ": r"$\rho$",
    "−": "$-$",
    "²": r"$^2$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "…": r"\ldots{}",
    "“": "``",
    "”": "''",
    "∞": r"$\infty$",
}


def save(artifact: Artifact, folder: Path) -> Path:
    """Write an artifact under its name and return the sidecar's path.

    Files of an earlier version that the artifact no longer has (it has become missing) are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = _contents(artifact)
    for suffix in _SUFFIXES:
        if suffix not in written:
            (folder / f"{artifact.name}{suffix}").unlink(missing_ok=True)
    for suffix, content in written.items():
        write_bytes(folder / f"{artifact.name}{suffix}", content)
    sidecar = folder / f"{artifact.name}.json"
    write_bytes(sidecar, (json.dumps(sidecar_of(artifact), indent=1, ensure_ascii=False) + "\n").encode())
    return sidecar


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_bytes(content)
    draft.replace(path)


def sidecar_of(artifact: Artifact) -> dict[str, Any]:
    """What stands beside the files: caption, runs, tier, testbed, commit, environment and, for tables, the cells."""
    head = {"name": artifact.name, "title": artifact.title, "caption": artifact.caption}
    made_by = {"commit": commit(), "environment": environment()}
    if isinstance(artifact, Missing):
        return {**head, "kind": "missing", "run_ids": [], "tier": None, "testbed": None, **made_by}
    source = artifact.provenance
    common = {"run_ids": list(source.run_ids), "tier": source.tier, "testbed": source.testbed, **made_by}
    if isinstance(artifact, FigureArtifact):
        return {**head, "kind": "figure", **common}
    return {
        **head,
        "kind": "table",
        **common,
        "headings": [column.heading for column in artifact.columns],
        "numeric": [column.numeric for column in artifact.columns],
        "rows": artifact.cells(),
    }


def _contents(artifact: Artifact) -> dict[str, bytes]:
    match artifact:
        case FigureArtifact():
            return {".pdf": _drawn(artifact, "pdf"), ".png": _drawn(artifact, "png")}
        case TableArtifact():
            csv = artifact.frame[[column.key for column in artifact.columns]].to_csv(index=False, lineterminator="\n")
            return {".csv": csv.encode(), ".tex": tex_table(artifact).encode(), ".html": html_table(artifact).encode()}
        case Missing():
            return {}


def _drawn(artifact: FigureArtifact, file_format: str) -> bytes:
    stamps: dict[str, Any] = (
        {"CreationDate": None, "Creator": "hybridpar", "Producer": "matplotlib", "Title": artifact.title}
        if file_format == "pdf"
        else {"Software": "hybridpar"}
    )
    buffer = io.BytesIO()
    artifact.figure.savefig(buffer, format=file_format, metadata=stamps)
    return buffer.getvalue()


def tex_table(artifact: TableArtifact) -> str:
    """A booktabs table that needs only `\\usepackage{booktabs}`."""
    alignment = "".join("r" if column.numeric else "l" for column in artifact.columns)
    head = " & ".join(tex_text(column.heading) for column in artifact.columns)
    body = "\n".join(" & ".join(tex_text(cell) for cell in row) + r" \\" for row in artifact.cells())
    return (
        "\\begin{table}\n\\centering\n"
        f"\\caption{{{tex_text(artifact.caption)}}}\n\\label{{tab:{artifact.name}}}\n"
        f"\\begin{{tabular}}{{{alignment}}}\n\\toprule\n{head} \\\\\n\\midrule\n{body}\n\\bottomrule\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def html_table(artifact: TableArtifact) -> str:
    """A plain HTML table with a caption; no script, no style of its own."""
    classes = ["number" if column.numeric else "text" for column in artifact.columns]
    head = "".join(
        f'<th class="{kind}">{html.escape(column.heading)}</th>'
        for kind, column in zip(classes, artifact.columns, strict=True)
    )
    rows = "\n".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{html.escape(cell)}</td>' for kind, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in artifact.cells()
    )
    return (
        f'<table class="artifact" id="{artifact.name}">\n<caption>{html.escape(artifact.caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n"
    )


def tex_text(text: str) -> str:
    """Escape text for LaTeX (pdfLaTeX included: the signs outside ASCII that artifacts use are spelled)."""
    return "".join(_TEX_SPECIAL.get(character, character) for character in text)


@cache
def commit() -> str | None:
    """The commit of the source tree that draws, or None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@cache
def environment() -> dict[str, str]:
    """Versions of what draws; the environment of the runs themselves is in their own folders."""
    drawing = ("matplotlib", "seaborn", "numpy", "pandas")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in drawing}}
