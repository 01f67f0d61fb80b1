"""CPU time and memory of processes, from the kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def cpu_s(pid: int) -> float:
    """utime + stime of a process, its ended threads included, in seconds.

    Read from the process's CPU clock (clock_getcpuclockid): the same account as /proc/PID/stat, which rounds it to
    10 ms. The number is the kernel's: the complement of the pid, then two bits of the clock's kind and one of "thread".
    """
    return time.clock_gettime((~pid << 3) | 2)


def total_cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(cpu_s(process.pid) for process in processes)


def rss_mb(processes: Sequence[psutil.Process]) -> float:
    """Resident memory, each process's own count, in MiB: pages that processes share are counted for each."""
    return sum(process.memory_info().rss for process in processes) / (1 << 20)
