"""Run folders -> tidy tables."""

RESULTS_CODE = sorted(str(path) for path in Path("src/hybridpar/results").glob("*.py"))


rule tables:
    """One row a run, rank, step, collective and memory category; fails when a run of the study has no result."""
    input:
        [stamp_of(batch) for batch in BATCHES],
        RESULTS_CODE,
    output:
        expand(
            f"{TABLES}/{{table}}.parquet",
            table=["runs", "ranks", "steps", "collectives", "memory"],
        ),
    log:
        f"data/logs/{STUDY}/tables.log",
    conda:
        "../../envs/conda.yml"
    params:
        digest=digest(run for batch in BATCHES.values() for run in batch.runs),
        study=STUDY_FILE,
        tables=lambda wildcards, input, output: folder_of(output),
    shell:
        "hybridpar tables {params.study} --runs-dir data/runs --out {params.tables} > {log} 2>&1"
