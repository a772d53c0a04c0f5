"""Memory for the rows of client states: on the device, in host memory or in memory-mapped files."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pfl.errors import ConfigError
from pfl.machine import free_memory

Tier = Literal["device", "memory", "file"]
# Bytes of a state's first block and of its largest block; block sizes double.
SMALLEST = 1 << 20
LARGEST = 1 << 28
DEVICE_SHARE = 0.25  # of a GPU's free memory


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """Memory for some rows, [n, width], in one tier, and the number of bytes that it takes."""

    tier: Tier
    rows: Tensor
    nbytes: int


class Tiers:
    """Allocates blocks in the fastest tier that has room for them.

    Rows stay where they were first written. The first rows lie on the device, the next in host
    memory (pinned, if the device is a GPU), and the rest in memory-mapped files, which the system's
    page cache keeps in memory as far as there is room.

    Args:
        device: The training device; rows take up to `DEVICE_SHARE` of a GPU's free memory.
        memory: Bytes that rows may take on the device and in host memory together; None: the
            device's share, and half of the free host memory of the machine, container or job.
        processes: Number of processes that share this machine's memory.
        sharing: Number of processes that share the device.
        directory: The folder of the files; None: the system's temporary folder (`TMPDIR`).

    Attributes:
        limit: The largest number of bytes of each tier that has a limit.
        used: The bytes that are allocated in each tier.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        memory: int | None = None,
        processes: int = 1,
        sharing: int = 1,
        directory: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.directory = directory
        self._pinned = self.device.type == "cuda"
        free = 0
        if self._pinned:
            free = torch.cuda.mem_get_info(self.device)[0]
        device_limit = int(DEVICE_SHARE * free / sharing)
        if memory is None:
            host_limit = free_memory() // 2 // processes
        else:
            device_limit = min(device_limit, memory // processes)
            host_limit = memory // processes - device_limit
        self.limit: dict[Tier, int] = {"device": device_limit, "memory": host_limit}
        self.used: dict[Tier, int] = {"device": 0, "memory": 0, "file": 0}

    def block(
        self,
        number: int,
        width: int,
        dtype: torch.dtype,
        min_rows: int,
        max_rows: int,
        host: bool = False,
    ) -> MemoryBlock:
        """Returns memory for `min_rows` to `max_rows` more rows [width] of a state.

        Args:
            number: How many blocks the state has already.
            host: True: not on the device.
        """
        row = width * dtype.itemsize
        rows_to_have = max(min_rows, min(max_rows, min(SMALLEST << number, LARGEST) // row))
        for tier, limit in self.limit.items():
            left = limit - self.used[tier]
            if tier == "memory" and self._pinned and left > 0:
                left = 1 << (left.bit_length() - 1)  # PyTorch pins powers of two
            fit = left // row
            if fit < min_rows or (host and tier == "device"):
                continue
            try:
                rows = self._empty(tier, min(rows_to_have, fit), width, dtype)
            except RuntimeError:
                if not self._pinned:
                    raise
                self.limit[tier] = self.used[tier]  # another process has taken the rest
            else:
                break
        else:
            gib = sum(self.limit.values()) / 2**30
            what = f"loop.state_memory: what clients remember beyond {gib:.3g} GiB"
            rows = mapped(rows_to_have * width, dtype, what, self.directory)
            tier = "file"
            rows = rows.view(rows_to_have, width)
        taken = rows.nbytes
        if tier == "memory" and self._pinned:
            taken = 1 << (taken - 1).bit_length()
        self.used[tier] += taken
        return MemoryBlock(tier, rows, taken)

    def free(self, block: MemoryBlock) -> None:
        """Counts a block's bytes as free again; the memory itself is freed with the block."""
        self.used[block.tier] -= block.nbytes

    def _empty(self, tier: Tier, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        if tier == "device":
            return torch.empty(rows, width, dtype=dtype, device=self.device)
        return torch.empty(rows, width, dtype=dtype, pin_memory=self._pinned)


def mapped(size: int, dtype: torch.dtype, what: str, directory: str | None = None) -> Tensor:
    """Returns a tensor [size] in a file without a name, which need not stay in memory.

    The file lies in `directory`, or the system's temporary folder (`TMPDIR`).

    Raises:
        ConfigError: The folder has no room for `what` the tensor holds.
    """
    folder = directory or tempfile.gettempdir()
    nbytes = size * dtype.itemsize
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix="pfl-clients-")
        try:
            # Blocks of the disk are allocated: if a file has only a size and the disk is
            # full, a write kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            os.truncate(handle, nbytes)
            pages = mmap.mmap(handle, nbytes)
            if hasattr(pages, "madvise"):  # else the system reads megabytes around every row
                pages.madvise(mmap.MADV_RANDOM)
            return torch.frombuffer(pages, dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(path)  # the map keeps the file; a killed process leaves no file
    except OSError as error:
        raise ConfigError(
            f"{what} goes to files in {folder}, where {nbytes / 2**20:.0f} MiB more cannot be had "
            f"({error.strerror}); set TMPDIR to a folder with more room"
        ) from error
