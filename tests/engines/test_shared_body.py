"""The engine that runs a frozen body once gives the gradients of each client by itself."""

import pytest
import torch
from torch import nn

from models import Bottleneck, Delta, LoRA
from models.adapters import Trainable, train_only
from pfl.engines import Batch, Oracle, default_loss
from pfl.engines.shared_body import FULL, SharedBodyEngine
from pfl.parameters import ParameterSpace

A, B, T, WIDTH, CLASSES = 3, 4, 5, 6, 3


class Texts(nn.Module):
    """Two blocks of attention with a mask of the padding, token 0, and a head."""

    def __init__(self, encoder=True):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = None
        if encoder:
            block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        mask = tokens != 0
        x = self.embedding(tokens)
        q, v = self.query(x), self.value(x)
        x = nn.functional.scaled_dot_product_attention(q, x, v, attn_mask=mask[:, None, :])
        x = self.norm(x)
        if self.blocks is not None:
            x = self.blocks(x, src_key_padding_mask=~mask)
        weights = mask[..., None].to(x)
        return self.head((x * weights).sum(1) / weights.sum(1))


TRAINED = {
    "LoRA": lambda: LoRA(2, 4, ["query", "value", "linear1"]),
    "a pair": lambda: LoRA(2, 4, ["query", "linear2"], pair=0.3),
    "frozen A": lambda: LoRA(2, 4, ["value"], freeze_a=True),
    "no head": lambda: LoRA(2, 4, ["value"], head=False),
    "delta": lambda: Delta(["value"]),
    "bottleneck": lambda: Bottleneck(3, ["query"]),
    "head": lambda: Trainable("head"),
    "biases": lambda: Trainable("bias"),
    "norms": lambda: Trainable("norm"),
}


def problem(trained, dtype=torch.float64, clients=A):
    """A network, models that differ, and a batch with padded rows and padded texts."""
    torch.manual_seed(0)
    # PyTorch's own attention has a bias for which there is no rule for several clients.
    network = Texts(encoder=getattr(trained, "part", None) != "bias").to(dtype)
    train_only(network, trained)
    space = ParameterSpace(network)
    tokens = torch.randint(1, 11, (clients, B, T))
    tokens[:, ::2, 3:] = 0
    batch = Batch(tokens, torch.randint(CLASSES, (clients, B)), [4, 3, 1][:clients])
    w = space.vector.detach() + 0.3 * torch.randn(clients, space.size, dtype=dtype)
    return network, space, w, batch


def oracle(network, space, batch, engine):
    made = Oracle(network, space, default_loss, engine)
    made.inspect(batch.inputs[0, :2], batch.targets[0, :2], CLASSES)
    return made


@pytest.mark.parametrize("clients", [1, 2, 3])
@pytest.mark.parametrize("trained", TRAINED)
def test_gradients_losses_and_outputs_are_those_of_one_client_after_another(trained, clients):
    network, space, w, batch = problem(TRAINED[trained](), clients=clients)
    engine = oracle(network, space, batch, "auto").engine
    assert isinstance(engine, SharedBodyEngine)
    reference = oracle(network, space, batch, "sequential").engine
    for one, other in zip(engine.gradient(w, batch), reference.gradient(w, batch), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for c, count in enumerate(batch.counts):
        torch.testing.assert_close(
            engine.outputs(w, batch)[c, :count],
            reference.outputs(w, batch)[c, :count],
            rtol=0,
            atol=1e-12,
        )


def test_single_precision():
    network, space, w, batch = problem(LoRA(2, 4, ["query", "value"]), torch.float32)
    one = oracle(network, space, batch, "auto").engine.gradient(w, batch)[1]
    other = oracle(network, space, batch, "sequential").engine.gradient(w, batch)[1]
    assert (one - other).norm() < 1e-6 * other.norm()


def test_calls_have_no_more_rows_than_a_core_is_filled_by(monkeypatch):
    """With room for 40 rows, two clients with 4 texts of 5 tokens run at once, then the third."""
    network, space, w, batch = problem(LoRA(2, 4, ["query", "value"]))
    engine = oracle(network, space, batch, "auto").engine
    expected = engine.gradient(w, batch)[1]
    assert engine.places == T
    assert FULL >= 60  # all three at once so far
    sizes, run = [], engine._run
    monkeypatch.setattr("pfl.engines.shared_body.FULL", 40)
    monkeypatch.setattr(
        engine,
        "_run",
        lambda p, x, training: (sizes.append(len(x)), run(p, x, training=training))[1],
    )
    torch.testing.assert_close(engine.gradient(w, batch)[1], expected, rtol=0, atol=1e-12)
    assert sizes == [2, 1]
    monkeypatch.setattr("pfl.engines.shared_body.FULL", 39)  # one after another
    torch.testing.assert_close(engine.gradient(w, batch)[1], expected, rtol=0, atol=1e-12)
    assert sizes == [2, 1]


class Mixing(nn.Module):
    """A network with a trained value for which there is no rule for several clients."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.head(self.body(x) * self.scale)


def test_other_uses_of_trained_values_are_left_to_other_engines():
    """[C, K] beside [C B, K] cannot be multiplied, or is wrong for two models."""
    network = Mixing().double()
    space = ParameterSpace(network)
    made = Oracle(network, space, default_loss)
    made.inspect(torch.randn(2, WIDTH).double(), torch.tensor([0, 1]), CLASSES)
    assert made.engine.name == "vmap"


def test_a_bert_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from models import Pretrained

    sizes = dict(vocab_size=20, hidden_size=8, intermediate_size=12)
    config = transformers.BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    torch.manual_seed(0)
    network = Pretrained(str(tmp_path), num_classes=CLASSES, pooling="mean").double()
    train_only(network, LoRA(2, 4, ["query", "value"]))
    space = ParameterSpace(network)
    tokens = torch.randint(1, 20, (A, B, T))
    tokens[:, 1:, 3:] = 0
    batch = Batch(tokens, torch.randint(CLASSES, (A, B)), [4, 3, 1])
    w = space.vector.detach() + 0.3 * torch.randn(A, space.size).double()
    engine = oracle(network, space, batch, "auto").engine
    assert isinstance(engine, SharedBodyEngine)
    expected = oracle(network, space, batch, "sequential").engine.gradient(w, batch)[1]
    torch.testing.assert_close(engine.gradient(w, batch)[1], expected, rtol=0, atol=1e-12)
