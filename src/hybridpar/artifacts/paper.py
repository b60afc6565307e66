"""Build the paper: gather what was generated under `paper/generated`, then compile the Typst source.

The PDF is the same bytes for the same input: no date in it, and no font but those inside the compiler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridpar.artifacts import prose
from hybridpar.artifacts.catalogue import artifact_names
from hybridpar.artifacts.save import write_bytes


class PaperError(RuntimeError):
    """The paper cannot be built; the message says what is missing, literal or wrong."""


def build(paper_dir: Path, figures_dir: Path, numbers_json: Path, out_pdf: Path) -> None:
    """Check the prose, copy figures, tables and numbers under `paper_dir/generated`, and compile `main.typ`.

    Raises:
        PaperError: a result is typed by hand, a figure or table is missing, or Typst refuses the source.
    """
    faults = prose.check(sources(paper_dir))
    if faults:
        raise PaperError("\n".join(str(fault) for fault in faults))
    _gather(paper_dir / "generated", figures_dir, numbers_json)
    write_bytes(out_pdf, compiled(paper_dir))


def sources(paper_dir: Path) -> list[Path]:
    """The Typst files that people write, in order."""
    return sorted(path for path in paper_dir.rglob("*.typ") if "generated" not in path.parts)


def compiled(paper_dir: Path, **options: Any) -> Any:
    """The bytes that Typst makes of `main.typ` (a list of bytes for several PNG pages).

    Raises:
        PaperError: Typst refuses the source; its diagnostics are in the message.
    """
    import typst

    try:
        return typst.compile(paper_dir / "main.typ", root=paper_dir, ignore_system_fonts=True, **options)
    except typst.TypstError as error:
        raise PaperError(f"{paper_dir / 'main.typ'} does not compile: {error}") from None


def _gather(generated: Path, figures_dir: Path, numbers_json: Path) -> None:
    for name in artifact_names():
        sidecar = figures_dir / f"{name}.json"
        if not sidecar.exists():
            raise PaperError(f"{sidecar} does not exist; the notebooks write it")
        write_bytes(generated / "figures" / sidecar.name, sidecar.read_bytes())
        if json.loads(sidecar.read_text(encoding="utf-8"))["kind"] == "figure":
            write_bytes(generated / "figures" / f"{name}.pdf", (figures_dir / f"{name}.pdf").read_bytes())
    write_bytes(generated / "numbers.json", numbers_json.read_bytes())
