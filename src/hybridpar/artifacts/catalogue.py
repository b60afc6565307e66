"""Which artifacts and findings answer which question: the one list that the notebooks, paper and report share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question of the study: its notebook, the artifacts it saves in order, and the findings that end it."""

    notebook: str
    title: str
    artifacts: tuple[str, ...]
    findings: tuple[str, ...]


QUESTIONS = (
    Question(
        "01-what-does-a-collective-cost",
        "What does a collective cost?",
        ("wire-bytes", "collective-time", "collective-fits"),
        ("collectives",),
    ),
    Question(
        "02-each-strategy-alone",
        "What does each strategy do alone?",
        (
            *("loss-parity", "single-throughput", "single-memory", "communication-share", "single-strategies"),
            *("schedule-memory", "schedules"),
        ),
        ("losses", "single", "schedules"),
    ),
    Question(
        "03-which-hybrid-wins",
        "Which hybrid wins?",
        ("best-strategy-map", "best-strategies", "hybrid-ranking", "hybrid-strategies", "infeasible"),
        ("hybrids",),
    ),
    Question(
        "04-transformer-vs-mamba",
        "Do Transformer and Mamba-2 want different strategies?",
        ("family-ranking", "family-rankings", "family-effects", "outcomes"),
        ("families", "outcomes"),
    ),
    Question(
        "05-where-does-memory-go",
        "Where does memory go?",
        ("memory-savings", "state-per-parameter"),
        ("memory",),
    ),
    Question(
        "06-what-does-serving-cost",
        "What does serving cost?",
        ("prefill-latency", "decode-latency", "cache-growth", "serving"),
        ("serving",),
    ),
    Question(
        "07-deepspeed-against-torch",
        "Does DeepSpeed train the same model, and as fast?",
        ("engines", "engine-ratios", "departures"),
        ("engines", "departures"),
    ),
    Question(
        "08-is-theory-true",
        "What does theory say, and is it true?",
        (
            *("theory-coverage", "theory-comparisons", "theory-deviations", "theory-uncovered"),
            *("schedule-memory-form", "block-forms"),
        ),
        ("theory",),
    ),
)


def artifact_names() -> tuple[str, ...]:
    """The names of all artifacts, in the order of the questions."""
    return tuple(name for question in QUESTIONS for name in question.artifacts)
