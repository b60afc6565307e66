"""How notebooks show what the package makes: save the artifact, then display it with its caption."""

from __future__ import annotations

from pathlib import Path

from IPython.display import HTML, Image, Markdown, display

from hybridpar.artifacts.artifact import Artifact, FigureArtifact, TableArtifact
from hybridpar.artifacts.save import html_table, save


def show(artifact: Artifact, figures_dir: str | Path) -> None:
    """Save an artifact under `figures_dir` and display exactly the saved picture or table."""
    folder = Path(figures_dir)
    save(artifact, folder)
    match artifact:
        case FigureArtifact():
            display(Image(data=(folder / f"{artifact.name}.png").read_bytes(), width=560))
            display(Markdown(f"**{artifact.title}.** {artifact.caption}"))
        case TableArtifact():
            display(HTML(html_table(artifact)))
        case _:
            display(Markdown(f"**{artifact.title}.** {artifact.caption}"))


def say(*sentences: str) -> None:
    """Display computed sentences, one bullet each."""
    display(Markdown("\n".join(f"- {sentence}" for sentence in sentences)))
