"""One client after another as autograd runs them, but written down as a whole, for CUDA graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfl.engines.base import Engine
from pfl.engines.batch import Batch, Buffers, some_rows
from pfl.engines.dropout import drawing
from pfl.engines.objective import Objective
from pfl.engines.runner import ModelRunner

UNROLLED = 64
"""For how many clients a step is written down; a recording holds all of them."""
LANES = 16
"""How many clients' layers may run on a GPU at the same time."""


class UnrolledEngine(Engine):
    """Runs each client's model by itself, on padded samples, and several at a time on a GPU.

    Running statistics need rows without padding, whose samples would count in them.

    Its layers are PyTorch's ordinary ones, on one client's samples each: no kernel has an axis for
    the clients. Launched one by one such kernels take longer to start than to run. The engine is
    therefore meant to be recorded in a CUDA graph, which starts them together.
    """

    name = "unrolled"
    batched = True

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._lanes: list[torch.cuda.Stream] = []
        if runner.device.type == "cuda":
            self._lanes = [torch.cuda.Stream(runner.device) for _ in range(LANES)]

    @classmethod
    def to_record(cls, engine: Engine, clients: int) -> Engine | None:
        if clients > UNROLLED:
            return None
        return cls(engine.runner)

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        runner = self.runner
        statistics = runner.buffers
        weights = runner.weights(batch, w.dtype)
        seeds = self.seeds_of(batch)
        g = torch.empty_like(w)
        losses = w.new_empty(len(w))
        self._fork()
        with torch.enable_grad(), runner.precision():
            for c in range(len(w)):
                with self._lane(c):
                    network, parameters = runner.load(w[c], None, training=True)
                    own: dict[str, Tensor] = {}
                    row = some_rows(buffers, c)
                    if row is not None:
                        own = statistics.own(network, row)
                    with drawing(seeds[c : c + 1]):
                        inputs = runner.laid_out(batch.inputs[c])
                        if own:
                            outputs = functional_call(network, own, (inputs,))
                        else:  # which TorchScript can
                            outputs = network(inputs)
                    loss = (runner.per_sample(outputs, batch.targets[c]) * weights[c]).sum()
                    pieces = torch.autograd.grad(loss, parameters, materialize_grads=True)
                    with torch.no_grad():
                        torch.cat([piece.reshape(-1) for piece in pieces], out=g[c])
                        losses[c].copy_(loss)
                        if row is not None:
                            statistics.keep(own, network, row)
        self._join()
        return losses, g

    def _fork(self) -> None:
        """Lets all lanes wait for what was started before."""
        for lane in self._lanes:
            lane.wait_stream(torch.cuda.current_stream())

    def _lane(self, client: int) -> AbstractContextManager[object]:
        """Returns the context in which a client's kernels are started."""
        if not self._lanes:
            return nullcontext()
        return torch.cuda.stream(self._lanes[client % LANES])

    def _join(self) -> None:
        """Lets what follows wait for all lanes."""
        for lane in self._lanes:
            torch.cuda.current_stream().wait_stream(lane)


class ChannelsLastEngine(UnrolledEngine):
    """The same with images whose channels are last, for which GPUs have convolutions in bf16."""

    name = "unrolled, channels last"

    @classmethod
    def to_record(cls, engine: Engine, clients: int) -> Engine | None:
        runner = engine.runner
        convolves = any(isinstance(m, nn.Conv2d) for m in runner.network.modules())
        if clients > UNROLLED or not (convolves and runner.is_mixed_precision):
            return None
        return cls(replace(runner, channels_last=True))
