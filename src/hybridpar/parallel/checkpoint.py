"""Checkpoints that any layout writes and any layout reads, by torch.distributed.checkpoint.

A checkpoint is a folder `step-<N>`: what was trained (`checkpoint.json`), and every tensor by its name in the
one-device model, in the boxes in which ranks held it. A rank that reads asks for its own boxes, however they were cut
when written. The folder is written under another name and renamed when it is whole, so a kill at any moment leaves the
last whole one.

Nothing is unpickled but an index of shapes, and that by a reader that knows no other classes.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from hybridpar.checkpoints import PREFIX, UNFINISHED, CheckpointError, PastStep, steps_done, sync, write_about
from hybridpar.comm.metered import meter
from hybridpar.comm.process_group import ProcessMesh
from hybridpar.specs import RunSpec


@dataclass(frozen=True)
class Shard:
    """A box of a dense tensor that this rank holds. The methods with underscores are what torch.distributed.checkpoint
    asks of things that are a part of a tensor."""

    tensor: Tensor
    offset: tuple[int, ...]
    shape: torch.Size

    def size(self) -> torch.Size:
        """Of the dense tensor."""
        return self.shape

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), self.shape)
        return [WriteItem(MetadataIndex(name, torch.Size(self.offset)), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The base replaces what it does not know by None, on its search for tensors without memory; ours have theirs.
        self.original_state_dict, self.state_dict = state_dict, dict(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def save(
    folder: Path,
    run: RunSpec,
    mesh: ProcessMesh,
    shards: Mapping[str, Shard],
    step: int,
    past: Sequence[PastStep],
) -> Path:
    """Write the state after `step` optimizer steps. Collective.

    Args:
        folder: of all checkpoints of this run; every rank sees it.
        run: what is trained.
        mesh: of the run.
        shards: what this rank holds, by dense name; replicas are written once.
        step: number of steps done.
        past: those of them that this run took.

    Returns:
        The checkpoint, which is whole and on disk.
    """
    final = folder / f"{PREFIX}{step}"
    unfinished = folder / f"{PREFIX}{step}{UNFINISHED}"
    with meter().paused():
        if mesh.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        save_state(dict(shards), storage_writer=FileSystemWriter(unfinished), planner=_SavePlanner())
        if mesh.rank == 0:
            write_about(unfinished, run, step, past)
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            sync(folder)
        dist.barrier()
    return final


def load(checkpoint: Path, run: RunSpec, shards: Mapping[str, Shard]) -> int:
    """Read this rank's boxes into `shards`, in place. Collective.

    Returns:
        Number of optimizer steps done when it was written.

    Raises:
        CheckpointError: it is not a whole checkpoint, or one of another model.
    """
    step = steps_done(checkpoint, run)
    try:
        with meter().paused():
            load_state(dict(shards), storage_reader=_Reader(checkpoint), planner=_LoadPlanner())
    except CheckpointException as error:
        causes = sorted({_first_line(str(cause)) for cause in _causes(error)})
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {'; '.join(causes)}") from None
    return step


def _causes(error: CheckpointException) -> list[BaseException]:
    return [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "(no message)"


class _Reader(FileSystemReader):
    """Reads tensors with weights_only, as its base does, and the index without running anything that lies in it."""

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.path} cannot be read: {error.strerror}") from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"the index of checkpoint {self.path} is damaged or not ours: {error}") from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"the index of checkpoint {self.path} is damaged or not ours: no index of tensors")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


_INDEX_CLASSES = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.storage": set[str](),
    "builtins": {"set"},
    "pathlib": {"PosixPath"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes that describe shapes and places, and dtypes; everything else is refused."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")
