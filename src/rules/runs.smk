"""Real jobs: the corpus, the batches of runs, the benchmark of collectives."""

from hybridpar.specs import SpecError
from hybridpar.study import batches, load_study

try:
    BATCHES = {batch.name: batch for batch in batches(load_study(Path(STUDY_FILE)), LARGEST_BATCH)}
except SpecError as error:
    raise WorkflowError("\n".join(error.faults))


wildcard_constraints:
    batch=r"(torch|deepspeed)-\d+",


def digest_of(runs):
    """A hash of the runs' whole specs: what reruns a batch is their content, never a file's time."""
    return hashlib.sha256("\n".join(run.canonical_json() for run in runs).encode()).hexdigest()


rule corpus:
    """The text to train on: fetched, checked, tokenised."""
    output:
        "data/corpus/shakespeare.bin",
        "data/corpus/shakespeare.json",
    log:
        "data/logs/corpus.log",
    conda:
        "../../envs/cpu.yml"
    shell:
        "{HYBRIDPAR} corpus shakespeare > {log} 2>&1"


rule batch:
    """Runs of one engine, one after the other, from one warm parent; finished ones are kept."""
    input:
        ancient(rules.corpus.output),
    output:
        f"data/batches/{STUDY}/{{batch}}.json",
    params:
        digest=lambda wildcards: digest_of(BATCHES[wildcards.batch].runs),
    log:
        f"data/logs/{STUDY}/{{batch}}.log",
    conda:
        "../../envs/cpu.yml"
    # all cores: two jobs side by side would disturb each other's times
    threads: workflow.cores
    shell:
        "{HYBRIDPAR} batch {STUDY_FILE} --only {wildcards.batch} --largest {LARGEST_BATCH} --out {output}"
        " 2>&1 | tee {log}"


rule collectives:
    """What a collective costs here, by operation, size and number of ranks."""
    output:
        "data/bench/collectives.parquet",
    log:
        "data/logs/collectives.log",
    conda:
        "../../envs/cpu.yml"
    threads: workflow.cores
    shell:
        "{HYBRIDPAR} collectives --out {output} 2>&1 | tee {log}"
