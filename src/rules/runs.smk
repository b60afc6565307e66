"""Real jobs: the corpus, the batches of runs, the benchmark of collectives."""

from hybridpar.launch.folder import RunFolder
from hybridpar.specs import SpecError
from hybridpar.study import LARGEST_BATCH, batches, digest, load_study

LARGEST = int(config.get("largest_batch", LARGEST_BATCH))
RUNS = "data/runs"

try:
    BATCHES = {
        batch.name: batch for batch in batches(load_study(Path(STUDY_FILE)), LARGEST)
    }
except SpecError as error:
    raise WorkflowError("\n".join(error.faults))


def stamp_of(batch):
    """What says that all runs of a batch have a result."""
    return f"data/batches/{STUDY}/{batch}.json"


# A stamp whose results are gone is no longer true; without it the batch goes through its runs again.
for _name, _batch in BATCHES.items():
    if Path(stamp_of(_name)).exists() and not all(
        RunFolder(Path(RUNS, run.run_id)).result(run.run_id) for run in _batch.runs
    ):
        Path(stamp_of(_name)).unlink()


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
        "{HYBRIDPAR} corpus shakespeare > {log} 2>&1"


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
    shell:
        "{HYBRIDPAR} batch {STUDY_FILE} --runs-dir {RUNS} --only {wildcards.batch} --largest {LARGEST} --out {output}"
        " 2>&1 | tee {log}"


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
        "{HYBRIDPAR} collectives --out {output} 2>&1 | tee {log}"
