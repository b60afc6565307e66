"""Closed forms beside the program: what theory says of a rank, and what the rank does."""

THEORY_CODE = sorted(
    str(path)
    for pattern in (
        *("theory/*.py", "trace/*.py", "parallel/*.py", "models/*.py", "comm/*.py"),
        *(
            "measure/memory.py",
            "check_theory.py",
            "theory_sweep.py",
            "infer.py",
            "parity_layouts.py",
            "mesh.py",
            "segments.py",
        ),
    )
    for path in Path("src/hybridpar").glob(pattern)
)


rule theory:
    """FLOPs, messages and memory of small layouts of every family, number by number."""
    input:
        THEORY_CODE,
    output:
        f"{TABLES}/theory.parquet",
    log:
        f"data/logs/{STUDY}/theory.log",
    conda:
        "../../envs/conda.yml"
    threads: workflow.cores
    params:
        # Snakemake remembers the values of params without their names: as numbers, they could be exchanged
        digest=str(THEORY),
        layouts=THEORY.layouts,
        random=THEORY.random,
        measured=THEORY.measured,
    # Exit code 3: a number deviates, and becomes a row of the paper like any other verdict; or a run could not be
    # compared, and nothing was written. What was compared is kept beside the output, for the next try.
    shell:
        "hybridpar check-theory --layouts {params.layouts} --random {params.random} --measured {params.measured}"
        " --jobs {threads} --out {output} > {log} 2>&1 || test $? -eq 3 -a -f {output}"
