"""Where the rows of client states lie: on the device, in host memory, or in memory-mapped files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pfl.errors import ConfigError

Tier = Literal["device", "memory", "file"]
# Bytes of a state's first block and of its largest: every block is twice the one before.
SMALLEST, LARGEST = 1 << 20, 1 << 28
DEVICE_SHARE = 0.25  # of a GPU's free memory


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """Room for some rows, [n, width], all in one tier, of which it takes some bytes."""

    tier: Tier
    rows: Tensor
    nbytes: int


class Tiers:
    """Gives out blocks in the fastest tier that has room for them.

    Rows stay where they were first written: what takes part first lies on the device, then in host
    memory (pinned, where the device is a GPU), and what no longer fits there in memory-mapped
    files, which the system's page cache keeps in memory as far as there is some to spare.

    Args:
        device: Where the training happens; a GPU gives up to `DEVICE_SHARE` of what is free now.
        memory: Bytes that rows may take outside of files, on the device and in host memory
            together; None: what the device gives, and half of the host memory that is free now,
            of the machine and of the container or job.
        processes: How many share this machine's memory.
        sharing: How many of them share the device.
        directory: Of the files; None: the system's temporary folder (`TMPDIR`).

    Attributes:
        limit: Bytes, by tier that has a limit.
        used: Bytes given out, by tier.
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
        free = torch.cuda.mem_get_info(self.device)[0] if self._pinned else 0
        near = int(DEVICE_SHARE * free / sharing)
        if memory is None:
            far = _free_memory() // 2 // processes
        else:
            near = min(near, memory // processes)
            far = memory // processes - near
        self.limit: dict[Tier, int] = {"device": near, "memory": far}
        self.used: dict[Tier, int] = {"device": 0, "memory": 0, "file": 0}

    def block(
        self, number: int, width: int, dtype: torch.dtype, least: int, most: int, host: bool = False
    ) -> MemoryBlock:
        """Room for at least `least` and at most `most` more rows of a state.

        Args:
            number: How many blocks the state has.
            host: Not on the device.
        """
        row = width * dtype.itemsize
        wanted = max(least, min(most, min(SMALLEST << number, LARGEST) // row))
        for tier, limit in self.limit.items():
            left = limit - self.used[tier]
            if tier == "memory" and self._pinned and left > 0:
                left = 1 << (left.bit_length() - 1)  # PyTorch pins powers of two
            fit = left // row
            if fit < least or (host and tier == "device"):
                continue
            try:
                rows = self._empty(tier, min(wanted, fit), width, dtype)
            except RuntimeError:
                if not self._pinned:
                    raise
                self.limit[tier] = self.used[tier]  # others were faster to take it
            else:
                break
        else:
            tier, rows = "file", self._mapped(wanted, width, dtype)
        taken = rows.nbytes
        if tier == "memory" and self._pinned:
            taken = 1 << (taken - 1).bit_length()
        self.used[tier] += taken
        return MemoryBlock(tier, rows, taken)

    def free(self, block: MemoryBlock) -> None:
        """Count a block's bytes as free again; its memory goes with the block."""
        self.used[block.tier] -= block.nbytes

    def _empty(self, tier: Tier, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        if tier == "device":
            return torch.empty(rows, width, dtype=dtype, device=self.device)
        return torch.empty(rows, width, dtype=dtype, pin_memory=self._pinned)

    def _mapped(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        limit = sum(self.limit.values()) / 2**30
        what = f"loop.state_memory: what clients remember beyond {limit:.3g} GiB"
        return mapped(rows * width, dtype, what, self.directory).view(rows, width)


def mapped(size: int, dtype: torch.dtype, what: str, directory: str | None = None) -> Tensor:
    """A tensor [size] in a file without a name, which the system need not keep in memory.

    Args:
        what: It is, in words.
        directory: Of the file; None: the system's temporary folder (`TMPDIR`).

    Raises:
        ConfigError: There is no room.
    """
    folder, nbytes = directory or tempfile.gettempdir(), size * dtype.itemsize
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix="pfl-clients-")
        try:
            # Not only sized: a write into a hole kills the process where the disk is full.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            return torch.from_file(path, shared=True, size=size, dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(path)  # the map keeps it, and nothing is left by a process that is killed
    except OSError as error:
        raise ConfigError(
            f"{what} goes to files in {folder}, where {nbytes / 2**20:.0f} MiB more cannot be had "
            f"({error.strerror}); set TMPDIR to a folder with more room"
        ) from error


def _free_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take; what caches files counts as free.

    Args:
        root: Where `proc` and `sys` are.
    """
    return min([_free_on_machine(root / "proc/meminfo"), *_free_in_cgroups(root)])


def _free_on_machine(meminfo: Path) -> int:
    if available := _entry(meminfo, "MemAvailable:"):
        return 1024 * available
    # macOS does not say how much is free: count half of what there is.
    free = "SC_AVPHYS_PAGES" in os.sysconf_names
    pages = os.sysconf("SC_AVPHYS_PAGES") if free else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """What is left in each control group of this process (a container, a job) that has a limit."""
    top, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            group, limit, usage, cache = top, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            group, cache = top / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group /= path.lstrip("/")
        # A container may see itself at the top, under a path that only exists outside.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # there is no such file, or it says "max"
                used = int((folder / usage).read_text()) - _entry(folder / "memory.stat", cache)
                yield max(0, int((folder / limit).read_text()) - used)


def _entry(table: Path, name: str) -> int:
    """The number after a name; 0 where there is none."""
    lines = table.read_text().splitlines() if table.exists() else []
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), 0)
