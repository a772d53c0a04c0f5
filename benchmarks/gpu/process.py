"""A worker as the driver sees it: a process that takes jobs, and is ended when it hangs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_LIMIT = 120.0  # seconds until a process is ready


class Ended(Exception):
    """A process gave no answer."""


class NotReady(Exception):
    """A process could not begin; no other one could."""


class Process:
    """A child process that answers lines of JSON with lines of JSON.

    Args:
        command: What is run.
        log: The file of what it prints besides.
        environment: Variables besides those of this process.
        folder: Where it runs.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path
    ) -> None:
        self._log = log.open("a")
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,  # so that its own processes can be ended with it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._ready = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, job: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Returns the answer to a job; ends the process and raises `Ended` without one.

        Raises:
            Ended: There was no answer to this job.
            NotReady: The process ended before it took its first job.
        """
        if not self._ready:
            self._wait_until_ready()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(job) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            self.end()
            raise Ended("the process had ended before") from error
        return self._next(limit, "no answer")

    def _wait_until_ready(self) -> None:
        try:
            self._next(START_LIMIT, "it was not ready")
        except Ended as error:
            last = Path(self._log.name).read_text().strip().splitlines()[-3:]
            raise NotReady("\n".join([str(error), *last])) from error
        self._ready = True

    def _next(self, limit: float, what: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.end()
            raise Ended(f"{what} after {limit:.0f} s; the process was ended") from None
        if line is None:
            code = self._child.wait()
            raise Ended(f"the process ended with {code}; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return self._child.poll() is None

    def end(self) -> None:
        """Ends the process and its own processes."""
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._reader.join()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._log.close()
