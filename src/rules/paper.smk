"""Numbers, paper and report."""

PAPER_SOURCES = sorted(
    str(path)
    for pattern in ("*.typ", "sections/*.typ", "*.bib")
    for path in Path("paper").glob(pattern)
)
ALL_SAVED = [
    f"{FIGURES}/{artifact}.json"
    for artifacts in SAVED.values()
    for artifact in artifacts
]


rule numbers:
    """Every number that the paper quotes, with its runs."""
    input:
        tables=rules.tables.output,
        bench=[*rules.collectives.output, *rules.departures.output],
        theory=rules.theory.output,
        code=artifacts_code(
            but=(
                "figures",
                "notebook",
                "paper",
                "prose",
                "report",
                "show",
                "style",
                "tables",
            )
        ),
    output:
        numbers=f"data/tables/{STUDY}/numbers.json",
        macros=f"data/tables/{STUDY}/macros.tex",
    log:
        f"data/logs/{STUDY}/numbers.log",
    conda:
        "../../envs/conda.yml"
    params:
        tables=lambda wildcards, input, output: folder_of(input.tables),
        bench=lambda wildcards, input, output: folder_of(input.bench),
    shell:
        "hybridpar numbers --tables-dir {params.tables} --bench-dir {params.bench} --out {output.numbers} > {log} 2>&1"


rule paper:
    """Fails when a result is typed by hand."""
    input:
        saved=ALL_SAVED,
        numbers=rules.numbers.output.numbers,
        sources=PAPER_SOURCES,
        code=[f"src/hybridpar/artifacts/{module}.py" for module in ("paper", "prose")],
    output:
        "paper/paper.pdf",
    log:
        f"data/logs/{STUDY}/paper.log",
    conda:
        "../../envs/conda.yml"
    params:
        figures=lambda wildcards, input, output: folder_of(input.saved),
    shell:
        "hybridpar paper --figures-dir {params.figures} --numbers {input.numbers} --out {output} > {log} 2>&1"


rule report:
    """One page with everything."""
    input:
        saved=ALL_SAVED,
        numbers=rules.numbers.output.numbers,
        notebooks=expand(f"{EXECUTED}/{{notebook}}.html", notebook=list(SAVED)),
        paper=rules.paper.output,
        code="src/hybridpar/artifacts/report.py",
    output:
        "report.html",
    log:
        f"data/logs/{STUDY}/report.log",
    conda:
        "../../envs/conda.yml"
    params:
        figures=lambda wildcards, input, output: folder_of(input.saved),
        executed=lambda wildcards, input, output: folder_of(input.notebooks),
    shell:
        "hybridpar report --figures-dir {params.figures} --numbers {input.numbers} --notebooks-dir {params.executed}"
        " --paper {input.paper} --out {output} > {log} 2>&1"
