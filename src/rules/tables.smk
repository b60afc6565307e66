"""Run folders -> tidy tables."""

RESULTS_CODE = sorted(str(path) for path in Path("src/hybridpar/results").glob("*.py"))


rule tables:
    """One row a run, step, collective and memory category; fails when a run of the study has no result."""
    input:
        expand(f"data/batches/{STUDY}/{{batch}}.json", batch=list(BATCHES)),
        RESULTS_CODE,
    output:
        expand(f"{TABLES}/{{table}}.parquet", table=["runs", "steps", "collectives", "memory"]),
    params:
        digest=digest_of(run for batch in BATCHES.values() for run in batch.runs),
    log:
        f"data/logs/{STUDY}/tables.log",
    conda:
        "../../envs/cpu.yml"
    shell:
        "{HYBRIDPAR} tables {STUDY_FILE} --out {TABLES} > {log} 2>&1"
