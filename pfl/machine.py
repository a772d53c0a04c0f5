"""What this process may use of the machine: cores and memory, by affinity and control groups.

Where runs take place beside each other, each is told how many share the machine and the GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pfl.errors import ConfigError

UNKNOWN_MEMORY = 4 << 30  # bytes that count as free where the system does not report them
RUNS_HERE = "PFL_RUNS_HERE"  # in the environment: how many runs share this machine
RUNS_ON_CARD = "PFL_RUNS_ON_CARD"  # how many share the GPU of this process
_ROOT = Path("/")  # the folder that has `proc` and `sys`


def free_cores(root: Path = _ROOT) -> int:
    """Returns the number of cores that this process may use, at least 1.

    They are those of its affinity (as `taskset` and SLURM set it), and no more than the quotas of
    its control groups (as containers have them), rounded down.
    """
    if hasattr(os, "sched_getaffinity"):  # Linux only
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def free_memory(root: Path = _ROOT) -> int:
    """Returns the bytes of host memory that this process may still take, file caches included."""
    return min([_free_on_machine(root / "proc/meminfo"), *_free_in_cgroups(root)])


def peak_memory() -> int | None:
    """Returns the most bytes of host memory that this process has had; None on Windows."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    if sys.platform == "darwin":
        unit = 1
    else:
        unit = 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def refuse_windows(what: str) -> None:
    """Refuses, on Windows, what was written for Linux's processes, sockets and rights of files."""
    if sys.platform == "win32":
        raise ConfigError(
            f"{what} cannot run on Windows; use Linux, or the Windows Subsystem for Linux"
        )


def runs_here() -> int:
    """Returns how many runs of an experiment share this machine, at least 1."""
    return int(os.environ.get(RUNS_HERE, 1))


def runs_on_card() -> int:
    """Returns how many runs of an experiment share the GPU of this process, at least 1."""
    return int(os.environ.get(RUNS_ON_CARD, 1))


def _free_on_machine(meminfo: Path) -> int:
    if available := _entry(meminfo, "MemAvailable:"):
        return 1024 * available
    if not hasattr(os, "sysconf"):  # Windows has no such call, and no /proc either
        return UNKNOWN_MEMORY
    # macOS does not report free memory: half of all memory is counted.
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        pages = os.sysconf("SC_AVPHYS_PAGES")
    else:
        pages = os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields the folders of the control groups (container, job) of this process, the own one first.

    The second value is whether they are of version 2.
    """
    top = root / "sys/fs/cgroup"
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            group = top / path.lstrip("/")
        elif controller in controllers.split(","):
            group = top / controller / path.lstrip("/")
        else:
            continue
        # The top group may be the container's own, whose path exists only outside of it.
        for folder in (group, *group.parents):
            yield folder, not controllers


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Yields the free bytes of each control group that has a limit."""
    for folder, is_second in _control_groups(root, "memory"):
        if is_second:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, usage, cache = names
        with suppress(OSError, ValueError):  # no such file, or its content is "max"
            used = int((folder / usage).read_text()) - _entry(folder / "memory.stat", cache)
            yield max(0, int((folder / limit).read_text()) - used)


def _quotas(root: Path) -> Iterator[int]:
    """Yields the number of cores of each control group that has a quota of processor time."""
    for folder, is_second in _control_groups(root, "cpu"):
        with suppress(OSError, ValueError):  # no such file, or its content is "max"
            if is_second:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if quota > 0:  # -1: there is none
                yield quota // period


def _entry(table: Path, name: str) -> int:
    """Returns the number after a name in a table; 0 if there is none."""
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), 0)
