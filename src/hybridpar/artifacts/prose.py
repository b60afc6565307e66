"""The check that no result is typed by hand: numbers in the paper's prose and in notebooks must be generated.

What may hold digits is a short list of structure: names of methods and formats, references, equations' constants,
layout. Everything else with a digit in it, and words that state a ratio ("twice", "half"), is a fault.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One literal result: where it stands and what it says."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: literal result {self.text!r}; quote a generated number instead"


_NAMES = re.compile(
    r"""
      ZeRO-[0-3](?:/[0-3])* | Mamba-2 | 1F1B | FSDP2 | H[1-6]\b | E1[0-3]\b | E[1-9]\b
    | (?:fp|float|bf|int)(?:8|16|32|64) | [Ll]og2\b | UTF-8 | (?:Llama|LLaMA)[ -]?[23]
    | arXiv[: ]\d{4}\.\d{4,5} | \bMIT\b | (?:Table|Figure|Section|Equation)[ ~]\d+
    """,
    re.VERBOSE,
)
_TYPST_STRUCTURE = re.compile(
    r"""
      //[^\n]*                               # comments
    | `[^`]*`                                # names as code
    | "(?:[^"\\]|\\.)*"                      # keys and paths
    | <[\w:-]+> | @[\w:-]+                   # labels and references
    | \b\d+(?:\.\d+)?(?:pt|em|cm|mm|fr)\b    # lengths: no result has such a unit
    | \bwidth:\s*\d+%                        # shares of a column
    | \b(?:columns|level|spacing|depth|stroke|size|luma|gutter|rows|at|slice|header|x|y)\b[:(]\s*\(?[\d.,\s]+
    """,
    re.VERBOSE,
)
_MARKDOWN_STRUCTURE = re.compile(r"`[^`]*`|\]\([^)]*\)|^\s*\d+\.\s", re.MULTILINE)
_MATHS = re.compile(r"\$[^$]*\$")
_BARE_NUMBER = re.compile(r"\$\s*[-+~<>=approx\s]*\d[\d.,]*\s*(?:times|%|x|percent)?\s*\$")
_RESULT = re.compile(
    r"""
      [\w.,%×+-]*\d[\w.,%×+-]*
    | \b(?:twice|thrice|twofold|threefold|half|halves|halved|doubles?d?|tripled?|percent|per\ cent)\b
    | \b(?:two|three|four|five|six|seven|eight|nine|ten)\ times\b
    """,
    re.VERBOSE | re.IGNORECASE,
)


def check(paths: Iterable[Path]) -> list[Fault]:
    """All literal results in Typst files and notebooks, in order.

    Raises:
        ValueError: a file is neither `.typ` nor `.ipynb`.
    """
    return [fault for path in paths for fault in _check_file(path)]


def _check_file(path: Path) -> list[Fault]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".typ":
        return typst_faults(text, path.name)
    if path.suffix == ".ipynb":
        return notebook_faults(json.loads(text)["cells"], path.name)
    raise ValueError(f"{path} is neither Typst (.typ) nor a notebook (.ipynb)")


def typst_faults(text: str, path: str = "") -> list[Fault]:
    """Literal results in Typst source. Equations may hold whole-number constants, but not stand for one number."""
    without_maths = _masked(_TYPST_STRUCTURE, _masked(_MATHS, text))
    faults = list(_faults(without_maths, path))
    faults += [
        Fault(path, text.count("\n", 0, equation.start()) + 1, equation.group())
        for equation in _MATHS.finditer(_masked(_TYPST_STRUCTURE, text))
        if _BARE_NUMBER.fullmatch(equation.group()) or re.search(r"\d\.\d", equation.group())
    ]
    return sorted(faults, key=lambda fault: fault.line)


def notebook_faults(cells: Sequence[dict[str, object]], path: str = "") -> list[Fault]:
    """Literal results in a notebook: in the prose of markdown cells and in sentences typed into code cells."""
    return [
        fault
        for number, cell in enumerate(cells, start=1)
        for fault in _cell_faults(_source(cell), str(cell["cell_type"]), f"{path}[cell {number}]")
    ]


def _cell_faults(source: str, kind: str, where: str) -> Iterator[Fault]:
    if kind == "markdown":
        yield from _faults(_masked(_MATHS, _masked(_MARKDOWN_STRUCTURE, source)), where)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            for fault in _faults(node.value, where):
                yield Fault(where, node.lineno, fault.text)


def _source(cell: dict[str, object]) -> str:
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else str(source)


def _faults(text: str, path: str) -> Iterator[Fault]:
    for found in _RESULT.finditer(_masked(_NAMES, text)):
        yield Fault(path, text.count("\n", 0, found.start()) + 1, found.group())


def _masked(pattern: re.Pattern[str], text: str) -> str:
    """The text with every match blanked, line breaks kept so that line numbers stay."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
