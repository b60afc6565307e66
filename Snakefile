"""From a study file to tables, notebooks, figures, report and paper: one DAG.

    snakemake --workflow-profile envs/profiles/local [--config study=NAME]

The study is data/studies/NAME.yaml (default `study`; `smoke` is the short one). Runs are executed in batches, each by one
launcher that imports torch once and forks the ranks of every run; a batch goes through with finished runs, so a
changed cell reruns alone. What reruns what: the *content* of a batch's run specs reruns it; tables, notebooks,
figures, report and paper are rebuilt when what they read is newer, so prose, plots and docs rerun no job.
"""

import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.0")

# The rules call the `hybridpar` of the environment that Snakemake itself runs in, unless another folder is named. By
# PATH and not by parameter: a checkout that moves is no other study.
shell.prefix(f"export PATH={config.get('bin', f'{sys.prefix}/bin')}:$PATH; ")

STUDY = config.get("study", "study")
STUDY_FILE = f"data/studies/{STUDY}.yaml"
TABLES = f"data/tables/{STUDY}"
FIGURES = f"figures/{STUDY}"
EXECUTED = f"notebooks/executed/{STUDY}"


include: "src/rules/study.smk"
include: "src/rules/runs.smk"
include: "src/rules/tables.smk"
include: "src/rules/theory.smk"
include: "src/rules/notebooks.smk"
include: "src/rules/paper.smk"


localrules:
    all,


rule all:
    """Everything of one study."""
    default_target: True
    input:
        # named though tables need them: what nobody asks for is not made again when it is lost
        [stamp_of(batch) for batch in BATCHES],
        rules.tables.output,
        "report.html",
        "paper/paper.pdf",
