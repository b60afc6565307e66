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
    shell:
        "{HYBRIDPAR} tables {STUDY_FILE} --runs-dir {RUNS} --out {TABLES} > {log} 2>&1"
