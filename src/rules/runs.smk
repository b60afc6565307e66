"""Real jobs: the corpus, the batches of runs, the benchmark of collectives."""


wildcard_constraints:
    batch="|".join(BATCHES),


rule corpus:
    """The text to train on: fetched, checked, tokenised."""
    output:
        "data/corpus/shakespeare.bin",
        "data/corpus/shakespeare.json",
    log:
        "data/logs/corpus.log",
    conda:
        "../../envs/conda.yml"
    shell:
        "hybridpar corpus shakespeare > {log} 2>&1"


rule batch:
    """Runs of one engine and one number of ranks, one after the other, from one warm parent; finished ones are kept."""
    input:
        ancient(rules.corpus.output),
    output:
        stamp_of("{batch}"),
    log:
        f"data/logs/{STUDY}/{{batch}}.log",
    conda:
        "../../envs/conda.yml"
    # all cores: two jobs side by side would disturb each other's times
    threads: workflow.cores
    params:
        # what reruns a batch is what its runs are, never a file's time
        digest=lambda wildcards: BATCHES[wildcards.batch].digest,
        study=STUDY_FILE,
        largest=LARGEST,
    shell:
        "hybridpar batch {params.study} --runs-dir data/runs --only {wildcards.batch} --largest {params.largest}"
        " --out {output} 2>&1 | tee {log}"


rule collectives:
    """What a collective costs here, by operation, size and number of ranks."""
    output:
        "data/bench/collectives.parquet",
    log:
        "data/logs/collectives.log",
    conda:
        "../../envs/conda.yml"
    threads: workflow.cores
    shell:
        "hybridpar collectives --out {output} 2>&1 | tee {log}"


rule departures:
    """Settings with which DeepSpeed trains another model than one device, each beside the one that is right."""
    output:
        "data/bench/departures.json",
    log:
        "data/logs/departures.log",
    conda:
        "../../envs/conda.yml"
    threads: workflow.cores
    shell:
        "hybridpar departures --out {output} 2>&1 | tee {log}"
