"""Which study: its batches, and what its stages are made with."""

from hybridpar.launch.folder import RunFolder
from hybridpar.specs import SpecError
from hybridpar.study import LARGEST_BATCH, batches, digest, load_study

LARGEST = int(config.get("largest_batch", LARGEST_BATCH))

try:
    _study = load_study(Path(STUDY_FILE))
except SpecError as error:
    raise WorkflowError("\n".join(error.faults))
BATCHES = {batch.name: batch for batch in batches(_study, LARGEST)}
THEORY = _study.theory


def stamp_of(batch):
    """What says that all runs of a batch have a result."""
    return f"data/batches/{STUDY}/{batch}.json"


# A stamp whose results are gone is no longer true; without it the batch goes through its runs again.
for _name, _batch in BATCHES.items():
    if Path(stamp_of(_name)).exists() and not all(
        RunFolder(Path("data/runs", run.run_id)).result(run.run_id)
        for run in _batch.runs
    ):
        Path(stamp_of(_name)).unlink()


def folder_of(files):
    """The folder that all `files` of one kind lie in."""
    return str(Path(files[0]).parent)


def artifacts_code(*, but=()):
    """The modules that make artifacts, for a rule to be rebuilt when one it uses is newer."""
    return sorted(
        str(path)
        for path in Path("src/hybridpar/artifacts").glob("*.py")
        if path.stem not in but
    )
