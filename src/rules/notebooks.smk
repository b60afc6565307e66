"""Notebooks: executed over the tables, each saving its figures and tables."""

from hybridpar.artifacts.catalogue import QUESTIONS


def artifacts_code(*, but=()):
    """The modules that make artifacts, for a rule to be rebuilt when one it uses is newer."""
    return sorted(
        str(path)
        for path in Path("src/hybridpar/artifacts").glob("*.py")
        if path.stem not in but
    )


SAVED = {question.notebook: question.artifacts for question in QUESTIONS}


wildcard_constraints:
    notebook="|".join(SAVED),


for _notebook, _artifacts in SAVED.items():

    rule:
        name:
            f"notebook_{_notebook[:2]}"
        input:
            source=f"notebooks/{_notebook}.ipynb",
            tables=rules.tables.output,
            bench=rules.collectives.output,
            code=artifacts_code(but=("numbers", "paper", "prose", "report")),
        output:
            f"{EXECUTED}/{_notebook}.ipynb",
            f"{EXECUTED}/{_notebook}.html",
            # every artifact has its sidecar; its figure or table only where the study has such runs
            [f"{FIGURES}/{artifact}.json" for artifact in _artifacts],
        log:
            f"data/logs/{STUDY}/{_notebook}.log",
        conda:
            "../../envs/conda.yml"
        shell:
            "{HYBRIDPAR} notebook {input.source} --tables-dir {TABLES} --bench {input.bench}"
            " --figures-dir {FIGURES} --out {EXECUTED} > {log} 2>&1"
