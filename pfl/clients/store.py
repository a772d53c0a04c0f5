"""The store of client states: what clients keep between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.clients.memory_tiers import Tiers
from pfl.clients.state_rows import Part, Reader, Rows, SparseRows, unpacked

State = dict[str, dict[str, Any]]
"""By name of the state: its first value `initial` [width], and `parts` with the clients' rows."""


class ClientStore:
    """Rows of named client states, allocated when a client's row is first written.

    A row that was never written reads as the state's initial value, so memory grows with the
    clients that took part, not with the population. Rows lie on the training device, in host
    memory or in memory-mapped files, in this order as far as there is room.

    Args:
        num_clients: The population, M.
        tiers: The arguments of `pfl.clients.memory_tiers.Tiers`: device, memory, processes,
            sharing, directory.

    Attributes:
        names: Names of the declared states of clients.

    Example:
        >>> store = ClientStore(num_clients=1000)
        >>> store.declare("w", torch.zeros(2))
        >>> store.write("w", np.array([7]), torch.ones(1, 2))
        >>> store.read("w", np.array([7, 8]))
        tensor([[1., 1.],
                [0., 0.]])
        >>> store.seen("w").tolist()
        [7]
    """

    def __init__(self, num_clients: int, **tiers: Any) -> None:
        self.num_clients = num_clients
        self.tiers = Tiers(**tiers)
        self.reads_ahead = True
        self.names: list[str] = []
        self._states: dict[str, Rows] = {}
        self._ahead: dict[tuple[str, bytes, torch.device], tuple[np.ndarray, Future[Tensor]]] = {}

    def declare(
        self,
        name: str,
        initial: Tensor,
        *,
        dtype: torch.dtype | None = None,
        sparse: bool = False,
        of_server: bool = False,
    ) -> None:
        """Adds a state that starts as `initial` [width] for every client.

        Args:
            name: The state's name.
            initial: The first value, whose dtype is that of all rows that are read.
            dtype: The dtype in which floating rows are stored; None: that of `initial`.
            sparse: Most values of a row are zero; only the others are stored.
            of_server: The server keeps the rows, which the clients have sent; they are not among
                the `names`, and are not read ahead.
        """
        kind: type[Rows] | type[SparseRows] = Rows
        if sparse:
            kind = SparseRows
        initial = initial.detach().cpu().clone()
        if dtype is None or not initial.is_floating_point():
            dtype = initial.dtype
        self._states[name] = kind(self.num_clients, initial, dtype, self.tiers)
        if not of_server:
            self.names.append(name)

    def seen(self, name: str) -> np.ndarray:
        """Returns the ids of the clients with a row of their own, ascending int64."""
        return self._states[name].seen()

    def has(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns which of these clients have a row of their own, bool [C]."""
        return self._states[name].has(ids)

    def initial(self, name: str) -> Tensor:
        """Returns the first value of a state, [width], in host memory."""
        return self._states[name].initial

    def read(self, name: str, ids: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
        """Returns a copy of these clients' rows, [C, width]."""
        device = torch.device(device)
        _, coming = self._ahead.pop((name, ids.tobytes(), device), (None, None))
        if coming is None:
            return self._states[name].reader(ids, device)()
        rows = coming.result()
        if rows.is_cuda:  # from another stream: the memory must outlive its use on this stream
            rows.record_stream(torch.cuda.current_stream(device))
        return rows

    def rounded(self, name: str, values: Tensor) -> Tensor:
        """Returns rows of a state as they are read back once they were written."""
        return values.to(self._states[name].dtype).to(values.dtype)

    def write(self, name: str, ids: np.ndarray, values: Tensor) -> None:
        """Keeps the rows [C, width] of these clients, whose ids must differ."""
        state = self._states[name]
        if values.shape != (expected := (len(ids), len(state.initial))):
            raise ValueError(f"client state {name!r} is {list(values.shape)}, not {list(expected)}")
        for key, (other, _) in list(self._ahead.items()):
            if key[0] == name and np.isin(other, ids).any():
                del self._ahead[key]
        state.write(ids, values.detach())

    # ---- reading ahead ------------------------------------------------------------------------

    def prefetch(self, ids: np.ndarray) -> None:
        """Reads the rows of the next chunk in the background if they are not in fast memory.

        A row that is overwritten before its use is read again.
        """
        if not (self.slow and self.reads_ahead and len(ids)):
            return
        for key in list(self._ahead)[: -len(self.names)]:  # rows that were not used
            del self._ahead[key]
        device = self.tiers.device
        if self._on_gpu:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        for name in self.names:
            job = self._states[name].reader(ids, device)
            future = self._worker.submit(self._read_ahead, job)
            self._ahead[name, ids.tobytes(), device] = ids, future

    def disable_prefetch(self) -> None:
        """Stops reading ahead, and frees the memory that this takes."""
        self.reads_ahead = False
        self._ahead.clear()

    @property
    def slow(self) -> bool:
        """True if some rows are not in fast memory."""
        return self.tiers.used["file"] + self.tiers.used["memory"] * self._on_gpu > 0

    def _read_ahead(self, job: Reader) -> Tensor:
        if not self._on_gpu:
            return job()
        with torch.cuda.stream(self._stream):
            rows = job()
        self._stream.synchronize()
        return rows

    @property
    def _on_gpu(self) -> bool:
        return self.tiers.device.type == "cuda"

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        # A new thread uses the first GPU, where another stream would take memory.
        if not self._on_gpu:
            return ThreadPoolExecutor(1, "pfl-clients")
        return ThreadPoolExecutor(1, "pfl-clients", torch.cuda.set_device, (self.tiers.device,))

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.tiers.device)

    # ---- checkpoints --------------------------------------------------------------------------

    def state_dict(self, collect: Callable[[Iterator[Part]], list[Part]] = list) -> State:
        """Returns rows and initial values as tensors, which share memory with the store.

        `collect` makes a list of a state's parts: of this process's, or of all processes'.
        """
        return {
            name: {"initial": state.initial, "parts": collect(state.parts())}
            for name, state in self._states.items()
        }

    def load_state_dict(
        self, saved: State, keep: Callable[[Tensor], Tensor] = torch.ones_like
    ) -> None:
        """Loads what `state_dict` returned; the same states must have been declared.

        `keep` is a function of ids, int64 [n], that returns a mask of the rows to take.
        """
        self._ahead.clear()
        for name, entry in saved.items():
            state = self._states[name]
            state.clear()
            state.initial = entry["initial"].to(state.initial)
            for part in entry["parts"]:
                for ids, rows in unpacked(part, len(state.initial)):
                    kept = keep(ids).bool()
                    state.write(ids[kept].numpy(), rows[kept])
