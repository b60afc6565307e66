"""Execute a notebook with parameters, and make the result the same bytes whenever nothing changed.

Sources are ordinary .ipynb files without outputs, so that they open and run in JupyterLab as they are.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager

from hybridpar.artifacts.save import write_bytes

_KERNEL_ENVIRONMENT = {"MPLBACKEND": "agg", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "OMP_NUM_THREADS": "1"}


class LocalKernelManager(AsyncKernelManager):
    """Talks to its kernel over sockets in a folder of its own: no ports, so that notebooks run side by side."""

    transport = "ipc"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sockets = tempfile.TemporaryDirectory(prefix="hybridpar-kernel-")
        # Jupyter's default name lies in the working directory, where two kernels would take each other's sockets.
        self.ip = str(Path(self._sockets.name) / "ipc")


_KERNEL_START_S = 300  # a busy machine takes its time to import


class NotebookError(RuntimeError):
    """A cell failed; the message names notebook, cell and error in one sentence."""


def execute(source: Path, out_ipynb: Path, out_html: Path, parameters: Mapping[str, Any]) -> None:
    """Run `source` with `parameters`; write the normalised notebook and its HTML page.

    Parameters whose names end in `_dir` or `_path` are paths, given relative to the caller's working directory; the
    notebook gets them relative to its own folder, which is also its working directory (as in JupyterLab). Two
    checkouts in different places thus give the same bytes.

    Raises:
        NotebookError: a cell raised; the notebook as far as it came is kept beside `out_ipynb` as `*.failed.ipynb`.
    """
    from papermill import execute_notebook
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    failed = out_ipynb.with_suffix(".failed.ipynb")
    with tempfile.TemporaryDirectory() as folder, _kernel_environment():
        raw = Path(folder) / source.name
        try:
            execute_notebook(
                str(source),
                str(raw),
                parameters=_as_seen_from(source.parent, parameters),
                cwd=str(source.parent),
                kernel_name="python3",
                progress_bar=False,
                log_output=False,
                start_timeout=_KERNEL_START_S,
                kernel_manager_class="hybridpar.artifacts.notebook.LocalKernelManager",
            )
        except PapermillExecutionError as error:
            write_bytes(failed, raw.read_bytes())
            raise NotebookError(
                f"{source.name}: cell {error.cell_index} raised {error.ename}: {error.evalue} (see {failed})"
            ) from None
        except RuntimeError as error:
            raise NotebookError(f"{source.name}: its kernel could not be started: {error}") from None
        notebook = normalised(nbformat.read(raw, as_version=4))
    failed.unlink(missing_ok=True)
    write_bytes(out_ipynb, (nbformat.writes(notebook, indent=1) + "\n").encode())
    write_bytes(out_html, as_html(notebook, source.stem).encode())


def normalised(notebook: Any) -> Any:
    """The notebook without what differs between two equal runs: times, versions, random cell ids."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        tags = [tag for tag in cell.metadata.get("tags", []) if tag in ("parameters", "injected-parameters")]
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    return notebook


def as_html(notebook: Any, title: str) -> str:
    """One page with everything in it: no script is fetched when it is opened."""
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    logging.getLogger("traitlets").setLevel(logging.ERROR)
    exporter = HTMLExporter(config=Config({"HTMLExporter": {"embed_images": True}}))
    for remote in ("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url"):
        setattr(exporter, remote, "")
    page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    return str(page)


def _as_seen_from(folder: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: os.path.relpath(value, folder) if name.endswith(("_dir", "_path")) else value
        for name, value in parameters.items()
    }


@contextmanager
def _kernel_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _KERNEL_ENVIRONMENT}
    os.environ.update(_KERNEL_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
