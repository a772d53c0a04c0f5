"""Pretrained transformers: masks and padding, heads, prompts, folders; with tiny random ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models import LoRA, Pretrained, SoftPrompt
from pfl.cli import main

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=40, pad_token_id=0, hidden_size=8, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, intermediate_size=12, max_position_embeddings=16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A BERT, and a GPT-2 with a dropout rate, as `save_pretrained` writes them."""
    torch.manual_seed(0)
    made = {}
    bert = transformers.BertModel(transformers.BertConfig(**SIZES))
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    )
    for name, model in (("bert", bert), ("gpt", gpt)):
        made[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(made[name])
    return made


TOKENS = torch.tensor([[5, 6, 7, 8, 9, 0, 0], [3, 4, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize("pooling", ["mean", "own"])
def test_padding_changes_nothing(folders, pooling):
    network = Pretrained(folders["bert"], num_classes=3, pooling=pooling).eval()
    outputs = network(TOKENS)
    assert outputs.shape == (2, 3)
    torch.testing.assert_close(outputs[:1], network(TOKENS[:1, :5]))
    assert network.head.weight.shape == (3, 8)


def test_the_mean_is_that_of_the_real_tokens(folders):
    network = Pretrained(folders["bert"], pooling="mean").eval()
    plain = transformers.BertModel.from_pretrained(folders["bert"]).eval()
    features = plain(input_ids=TOKENS[:1, :5]).last_hidden_state.mean(1)
    expected = features @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(network(TOKENS)[:1], expected)


def test_the_own_head_is_that_of_the_class(folders):
    network = Pretrained(folders["bert"], num_classes=3).eval()
    plain = transformers.BertForSequenceClassification.from_pretrained(
        folders["bert"], num_labels=3
    ).eval()
    plain.bert.pooler.load_state_dict(network.model.bert.pooler.state_dict())
    plain.classifier.load_state_dict(network.head.state_dict())
    mask = (TOKENS != 0).long()
    torch.testing.assert_close(network(TOKENS), plain(TOKENS, attention_mask=mask).logits)


def test_a_causal_model_has_the_classes_second_and_no_head(folders):
    network = Pretrained(folders["gpt"], task="causal", padding_id=0).eval()
    plain = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt"]).eval()
    assert network.head is None
    torch.testing.assert_close(network(TOKENS)[1], plain(TOKENS[1:]).logits[0].T)
    torch.testing.assert_close(network(TOKENS)[0, :, :5], plain(TOKENS[:1, :5]).logits[0].T)
    LoRA(rank=2, layers=["c_attn"]).apply(network)
    trained = [n for n, p in network.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all("lora" in name for name in trained)
    before = network(TOKENS)
    assert before.requires_grad


@pytest.mark.parametrize("task", ["classify", "causal"])
def test_a_prompt_stands_before_the_tokens(folders, task):
    """A prompt of embedded tokens gives what the text with these tokens gives."""
    kind, more = ("gpt", dict(padding_id=0)) if task == "causal" else ("bert", dict(pooling="mean"))
    network = Pretrained(folders[kind], task=task, **more).eval()
    first = torch.tensor([[11, 12]])
    text = torch.cat([first, TOKENS[1:]], 1)
    if task == "causal":
        expected = network(text)[0, :, 2:]
    else:
        hidden = network.model(text).last_hidden_state[:, 2:].mean(1)
        expected = network.head(hidden)[0]
    SoftPrompt(2).apply(network)
    table = network.model.get_input_embeddings().weight
    network.prompt.data = table[first[0]].clone()
    embedded = network(TOKENS)
    # GPT-2 and BERT number the places from 0 in both, so that all else is equal.
    torch.testing.assert_close(embedded[1], expected)
    many = torch.func.functional_call(
        network, {"prompt": torch.stack([network.prompt, 2 * network.prompt])}, (TOKENS,)
    )
    torch.testing.assert_close(many[0], embedded[0])
    network.prompt.data *= 2
    torch.testing.assert_close(many[1], network(TOKENS)[1])


def test_dropout_and_dtype(folders):
    network = Pretrained(folders["bert"], dropout=0.25, dtype="bfloat16")
    rates = {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.25}
    assert network.head.weight.dtype == torch.float32
    assert {p.dtype for p in network.model.parameters()} == {torch.bfloat16}
    assert network(TOKENS).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(folder="nowhere"), "Pretrained.folder: nowhere; it must be a folder with a config"),
        (dict(task="cls"), "Pretrained.task: 'cls'; it must be classify or regress or causal"),
        (dict(pooling="max"), "Pretrained.pooling: 'max'"),
        (dict(sha256="00"), "Pretrained.sha256: 00, but .*model.safetensors has [0-9a-f]{64}"),
    ],
)
def test_mistakes_have_one_line(folders, arguments, message):
    with pytest.raises(ValueError, match=message):
        Pretrained(**{"folder": folders["bert"], **arguments})
    with pytest.raises(ValueError, match="padding_id: null"):
        Pretrained(folders["gpt"], task="causal")
    with pytest.raises(ValueError, match=r"tokens must be below \d+, as of the folder's tokenizer"):
        Pretrained(folders["bert"])(torch.tensor([[5, 1000]]))
    with pytest.raises(ValueError, match=r"SoftPrompt: it needs Pretrained\.pooling: mean"):
        SoftPrompt(2).apply(Pretrained(folders["bert"]))


# ---- adapters that peft opens -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("kind", ["own", "mean", "causal", "pair"])
def test_peft_opens_an_exported_adapter_and_gives_the_same_logits(folders, kind, tmp_path):
    """As a reader of README.md does it, in evaluation mode, for drawn factors and heads."""
    pytest.importorskip("peft")
    from pfl.errors import ConfigError
    from pfl.export.peft import adapter_code, save_adapter

    settings = {"task": "causal", "padding_id": 0} if kind == "causal" else {"num_classes": 3}
    settings |= {"pooling": "mean"} if kind == "mean" else {}
    network = Pretrained(folders["gpt" if kind == "causal" else "bert"], **settings).eval()
    layers = ["c_attn", "c_proj"] if kind == "causal" else ["query", "value"]
    plain = network(TOKENS).detach()
    with pytest.raises(ConfigError, match=r"it needs a Pretrained network"):
        save_adapter(network, tmp_path)
    LoRA(2, 3.0, layers, pair=0.3 if kind == "pair" else None).apply(network)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter)
    save_adapter(network, tmp_path)
    # transformers warns that the classifier is drawn anew, which peft then replaces.
    scope = {}
    exec(
        adapter_code(network)
        .replace('"."', repr(str(tmp_path)))
        .replace('"head.s', f'"{tmp_path}/head.s'),
        scope,
    )
    result = scope["network"](TOKENS, attention_mask=(TOKENS != 0).long())
    if kind == "causal":
        actual = result.logits.mT[:, :, :5]
        expected = network(TOKENS)[:, :, :5]
    elif kind == "mean":
        weights = (TOKENS != 0)[..., None].float()
        actual = scope["head"]((result.last_hidden_state * weights).sum(1) / weights.sum(1))
        expected = network(TOKENS)
    else:
        actual, expected = result.logits, network(TOKENS)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert (expected - plain[..., : expected.shape[-1]]).abs().max() > 0.1


@pytest.mark.parametrize(("form", "line"), [("peft", "bert', num_labels=2)"), ("", "bert', task=")])
def test_a_readme_says_where_the_weights_were(folders, tmp_path, monkeypatch, form, line):
    monkeypatch.chdir(tmp_path)
    Path("bert").symlink_to(folders["bert"])
    inputs = torch.randint(1, 6, (20, 3), generator=torch.manual_seed(0))
    np.savez("words.npz", inputs=inputs.numpy(), targets=inputs[:, 0].numpy() % 2)
    network = "{class_path: Pretrained, init_args: {folder: bert, num_classes: 2}}"
    data = "{class_path: ArrayDataModule, init_args: {file: words.npz, num_clients: 2}}"
    words = ["--trainer.max_epochs", "1", "--trainer.name", "run", "--model", "FedAvg"]
    words += ["--model.network", network, "--model.trainable", "LoRA", "--data", data]
    words += ["--model.trainable.layers", "[query, value]"]
    assert main(["fit", *words]) == 0
    words = ["--ckpt_path", "runs/run/checkpoints/last.ckpt", "--global", "--out", "out"]
    if form:
        words += ["--format", form]
    assert main(["export", *words]) == 0
    readme = Path("out/global/README.md").read_text()
    assert line in readme
    assert "The pretrained weights were in `bert` where the run was started" in readme
