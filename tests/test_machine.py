"""Cores and memory as affinity, the machine and control groups leave them."""

import os

import pytest

from pfl.machine import free_cores, free_memory


@pytest.fixture
def machine(tmp_path):
    """Writes the files of a machine that has 7000 KiB available, and those that are given."""

    def created(files):
        for path, text in {
            "proc/meminfo": "MemFree: 5 kB\nMemAvailable: 7000 kB\n",
            **files,
        }.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return created


def group(version, path, limit, used, cached=0):
    """The files of a control group."""
    if version == 2:
        folder = f"sys/fs/cgroup/{path}"
        names, cache = ("memory.max", "memory.current"), "inactive_file"
    else:
        folder = f"sys/fs/cgroup/memory/{path}"
        names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        cache = "total_inactive_file"
    texts = {name: f"{value}\n" for name, value in zip(names, (limit, used), strict=True)}
    return {
        f"{folder}/{name}": text
        for name, text in {**texts, "memory.stat": f"anon 1\n{cache} {cached}\n"}.items()
    }


@pytest.mark.parametrize(
    ("version", "groups", "free"),
    [
        (2, [("user/job", 5000, 4000)], 1000),
        (1, [("user/job", 5000, 4000)], 1000),
        (2, [("user/job", "max", 4000), ("user", 9000, 8500)], 500),
        (1, [("user/job", 2**63 - 4096, 4000), ("user", 9000, 8500)], 500),
        (2, [("user/job", 5000, 4000, 700)], 1000 + 700),  # what caches files is given back
        (1, [("user/job", 5000, 4000, 700)], 1000 + 700),
        (2, [("user/job", 5000, 6000)], 0),
        (1, [("", 5000, 4000)], 1000),  # a container that sees only itself
        (2, [("other", 5000, 4000)], 7000 * 1024),
        (2, [("user/job", 2**40, 4000)], 7000 * 1024),
    ],
)
def test_free_memory_is_what_machine_and_container_leave(machine, version, groups, free):
    files = {"proc/self/cgroup": "0::/user/job\n"}
    if version == 1:
        files = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/user/job\n0::/\n"}
    for path, *numbers in groups:
        files |= group(version, path, *numbers)
    assert free_memory(machine(files)) == free


def test_free_memory_without_the_files_of_linux(tmp_path):
    assert free_memory(tmp_path) > 2**20


def quota(version, path, quota, period=100_000):
    """The files of a control group that may take `quota` of each `period` of processor time."""
    if version == 2:
        return {f"sys/fs/cgroup/{path}/cpu.max": f"{quota} {period}\n"}
    folder = f"sys/fs/cgroup/cpu/{path}"
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("version", "groups", "cores"),
    [
        (2, [("user/job", 400_000)], 4),
        (1, [("user/job", 400_000)], 4),
        (2, [("user/job", "max")], 6),
        (1, [("user/job", -1)], 6),
        (2, [("user/job", "max"), ("user", 250_000)], 2),  # 2.5 cores
        (1, [("user/job", 800_000), ("user", 300_000, 150_000)], 2),
        (2, [("user/job", 50_000)], 1),  # half a core
        (2, [("user/job", 6_400_000)], 6),
        (2, [("other", 100_000)], 6),
        (1, [("", 200_000)], 2),  # a container that sees only itself
    ],
)
def test_cores_are_those_of_affinity_and_quota(machine, monkeypatch, version, groups, cores):
    """The affinity has six of the machine's 64 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    files = {"proc/self/cgroup": "0::/user/job\n"}
    if version == 1:
        files = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/user/job\n0::/\n"}
    for path, *numbers in groups:
        files |= quota(version, path, *numbers)
    assert free_cores(machine(files)) == cores


def test_cores_of_a_system_without_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert free_cores(tmp_path) == 5
