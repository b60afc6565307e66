"""Notebooks: executed over the tables, each saving its figures and tables."""

from hybridpar.artifacts.catalogue import QUESTIONS

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
            bench=[*rules.collectives.output, *rules.departures.output],
            theory=rules.theory.output,
            code=artifacts_code(but=("numbers", "paper", "prose", "report")),
        output:
            executed=[
                f"{EXECUTED}/{_notebook}.ipynb",
                f"{EXECUTED}/{_notebook}.html",
            ],
            # every artifact has its sidecar; its figure or table only where the study has such runs
            saved=[f"{FIGURES}/{artifact}.json" for artifact in _artifacts],
        log:
            f"data/logs/{STUDY}/{_notebook}.log",
        conda:
            "../../envs/conda.yml"
        params:
            tables=lambda wildcards, input, output: folder_of(input.tables),
            bench=lambda wildcards, input, output: folder_of(input.bench),
            figures=lambda wildcards, input, output: folder_of(output.saved),
            executed=lambda wildcards, input, output: folder_of(output.executed),
        shell:
            "hybridpar notebook {input.source} --tables-dir {params.tables} --bench-dir {params.bench}"
            " --figures-dir {params.figures} --out {params.executed} > {log} 2>&1"
