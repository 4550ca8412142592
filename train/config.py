"""The training configuration: one YAML file, `key=value` overrides, no unknown keys.

    base: smollm2-135m
    heads: {num_heads: 4, num_layers: 2}
    …

An override names a key by its path: `optimizer.learning_rate=1e-3`. Its value is read as YAML.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from medusa_heads.errors import ConfigError

C = TypeVar("C")

COUNTS = (
    "epochs",
    "positions_per_step",
    "gradient_accumulation_steps",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
)
"""Settings of a run that are at least 1."""


@dataclass(frozen=True)
class DataConfig:
    paths: tuple[str, ...] = ()
    """Chat rows: directories that `train.distill` wrote, or JSON-lines files."""
    max_length: int | None = None
    """Tokens of a row that are kept; null: the base's context limit."""
    held_out: float = 0.03
    """Fraction of rows, by a hash of their id, that is evaluated and never trained on."""
    max_positions: int | None = None
    """Train on rows of at most this many supervised positions together, chosen by a hash of their id, so that a smaller
    number's rows are among a larger one's; null: on all. The held-out rows stay the same: for learning curves."""


@dataclass(frozen=True)
class FeaturesConfig:
    directory: str | None = None
    """Where `train.features` caches hidden states; null: the base runs inside the training step."""
    positions: Literal["answers", "all"] = "answers"
    """Which positions are stored: those that predict a supervised token, or the prompts' too."""
    layers: tuple[int, ...] = ()
    """Layers whose entering states are stored beside the last state."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    rows_per_shard: int = 1000
    batch_tokens: int = 1024
    """Padded tokens in one forward of the base."""


@dataclass(frozen=True)
class HeadsConfig:
    family: Literal["medusa", "hydra", "eagle", "draft_model"] = "medusa"
    """Three kinds of heads on the base's states, or a small model of the base's own kind that reads tokens alone."""
    num_heads: int = 4
    """Of Medusa and Hydra. An EAGLE head goes as deep as it is asked; `loss.unroll` says how deep it is trained."""
    num_layers: int = 1
    """Layers of each Medusa or Hydra head, or of a draft model."""
    prefix_attention: bool = False
    """Hydra: a decoder layer over the base's states before the heads read them."""
    version: Literal[1, 3] = 1
    """EAGLE: 1 reads the last state, 3 the fused states of several layers."""
    layers: tuple[int, ...] | None = None
    """EAGLE-3: the layers whose entering states are fused, the number of layers standing for the base's last state;
    null: a low, a middle and a high one, as published. Draft model: the base's layers that it begins as copies of, one
    for each of its own; null: spread evenly."""
    own_projection: bool = False
    """Train a vocabulary projection for each head instead of sharing the base's."""
    draft_vocab_size: int | None = None
    """Draft from this many most frequent tokens of the training data; null: from the whole vocabulary."""
    start: str | None = None
    """Trained heads to go on from, of the same family and shape: a directory, an embedded name or a Hub id. Their draft
    vocabulary is kept."""


@dataclass(frozen=True)
class LossConfig:
    teacher_weight: float = 0.0
    """Between hard labels (0) and the base's own distribution (1)."""
    teacher_temperature: float = 1.0
    """Of the teacher's softmax; below 1 sharpens it."""
    acceptance_weight: float = 0.0
    """Share of the loss that looks at acceptance itself, Σ min(p, q) over the draft's law p and the base's q. The
    rest is divided as `teacher_weight` says."""
    acceptance: Literal["total_variation", "log"] = "total_variation"
    """1 − Σ min(p, q), or −log Σ min(p, q)."""
    feature_weight: float = 0.0
    """EAGLE-1: of SmoothL1 between the head's states and the base's, beside a token loss of weight 1."""
    feature_noise: float = 0.0
    """EAGLE: width of the uniform noise on the states that a head reads in training."""
    unroll: int = 1
    """EAGLE: steps that a head is trained to go on by its own states."""
    head_decay: float = 0.8
    """Head i, or unrolled step i, is weighted head_decay^i."""
    chunk_positions: int = 128
    """Positions whose logits stand in memory at once."""
    sampled_rows: int | None = None
    """Instead of all draft rows, a step's loss is over this many: a half that is always there, the most frequent tokens
    of `heads.draft_vocab_size` or, without it, the lowest ids; and a random draw from the others, weighted by how many
    each stands for. Null: all rows."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices between hidden states and leaves the rest to AdamW."""
    learning_rate: float = 1e-3
    """Peak, after warm-up; with Muon, of its matrices."""
    adamw_learning_rate: float = 1e-3
    """Muon: peak of what is left to AdamW."""
    momentum: float = 0.95
    """Muon's."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    warmup_steps: int = 40
    final_fraction: float = 0.02
    """Of the peak learning rate at the last step; a cosine leads there."""
    max_grad_norm: float = 1.0

    def check_precision(self, mixed_precision: str | None) -> None:
        """Raises ConfigError for Muon in fp16: its two optimizers share accelerate's scaler, which goes to its next
        scale after the first one's step."""
        if self.name == "muon" and mixed_precision == "fp16":
            raise ConfigError("optimizer.name muon does not go with fp16 precision: take mixed_precision bf16 or no")


@dataclass(frozen=True)
class EvaluationConfig:
    rows: int | None = 400
    """At most this many held-out rows; null: all."""
    tree_nodes: int = 16
    """Node budget of the tree that is saved with the heads, the root included. Medusa's is static, the others' grow."""
    tree_width: int = 4
    """All but Medusa: nodes that are read in a step of the dynamic tree that is saved."""
    walked_rows: int = 12
    """All but Medusa: rows of each kind through which dynamic trees are drafted, to measure what they gain."""
    depth: int | None = None
    """EAGLE: tokens ahead that are measured; null: as many as were unrolled. Draft model: tokens that a draft goes
    ahead; null: 6."""


@dataclass(frozen=True)
class TrainingConfig:
    output: str
    """The heads' directory. Checkpoints and metrics.jsonl go to `<output>.run`."""
    base: str = "smollm2-135m"
    base_revision: str | None = None
    base_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    epochs: int = 1
    max_steps: int | None = None
    """Ends the run before its epochs do."""
    positions_per_step: int = 4096
    """Supervised positions of one optimizer step, over all processes and accumulated micro-batches."""
    gradient_accumulation_steps: int = 1
    """Micro-batches that a process splits its part of a step into."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Null: what `accelerate launch` says."""
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    resume: bool = True
    """Go on from the newest checkpoint in `<output>.run`, if there is one."""
    tracker: Literal["wandb"] | None = None
    """Send figures there as well, through accelerate; they always go to metrics.jsonl."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("teacher_weight", "acceptance_weight"):
            if not 0.0 <= getattr(self.loss, name) <= 1.0:
                raise ConfigError(f"loss.{name} must lie in [0, 1], not {getattr(self.loss, name)}")
        for name in ("feature_weight", "feature_noise"):
            if getattr(self.loss, name) < 0.0:
                raise ConfigError(f"loss.{name} must not be negative, but is {getattr(self.loss, name)}")
        for name, value in dataclasses.asdict(self.evaluation).items():
            if value is not None and value < 1:
                raise ConfigError(f"evaluation.{name} must be at least 1, not {value}")
        if self.loss.unroll < 1:
            raise ConfigError(f"loss.unroll must be at least 1, not {self.loss.unroll}")
        self._check_family()
        if not 0.0 <= self.data.held_out < 1.0:
            raise ConfigError(f"data.held_out must lie in [0, 1), not {self.data.held_out}")
        if self.data.max_positions is not None and self.data.max_positions < 1:
            raise ConfigError(f"data.max_positions must be at least 1, not {self.data.max_positions}")
        if self.loss.sampled_rows is not None and self.heads.own_projection:
            raise ConfigError("loss.sampled_rows needs the shared projection: heads.own_projection is true")
        if self.loss.sampled_rows is not None and self.loss.sampled_rows < 2:
            raise ConfigError(f"loss.sampled_rows must be at least 2, not {self.loss.sampled_rows}")
        self.optimizer.check_precision(self.mixed_precision)

    def _check_family(self) -> None:
        """Settings of one family are refused for another, where they would do nothing."""
        heads, loss = self.heads, self.loss
        belongs: dict[str, tuple[bool, bool]] = {
            "heads.start": (heads.start is not None, heads.family != "draft_model"),
            "heads.prefix_attention": (heads.prefix_attention, heads.family == "hydra"),
            "heads.own_projection": (heads.own_projection, heads.family != "draft_model"),
            "evaluation.depth": (self.evaluation.depth is not None, heads.family in ("eagle", "draft_model")),
            "heads.layers": (
                heads.layers is not None,
                heads.family == "draft_model" or (heads.family == "eagle" and heads.version == 3),
            ),
            "loss.unroll": (loss.unroll > 1, heads.family == "eagle"),
            "loss.feature_noise": (loss.feature_noise > 0, heads.family == "eagle"),
            "loss.feature_weight": (loss.feature_weight > 0, heads.family == "eagle" and heads.version == 1),
        }
        for name, (given, allowed) in belongs.items():
            if given and not allowed:
                version = f" version {heads.version}" if heads.family == "eagle" else ""
                raise ConfigError(f"{name} does not belong to heads of family {heads.family}{version}")
        if heads.family == "draft_model":
            if heads.num_layers < 1:
                raise ConfigError(f"heads.num_layers of a draft model must be at least 1, not {heads.num_layers}")
            if heads.layers is not None and len(heads.layers) != heads.num_layers:
                raise ConfigError(
                    f"heads.layers names {len(heads.layers)} layers for the {heads.num_layers} of heads.num_layers"
                )

    @property
    def run_directory(self) -> Path:
        return Path(self.output + ".run")

    def to_yaml(self) -> str:
        return yaml.safe_dump(_plain(dataclasses.asdict(self)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def build(cls: type[C], data: Any, where: str = "") -> C:
    """A dataclass from plain data, types checked.

    Raises:
        ConfigError: an unknown or missing key, or a value of another type; the message gives the key's path.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the config'} must be a mapping, not {data!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in set(data) - set(fields))
    if unknown:
        raise ConfigError(f"unknown key {', '.join(where + k for k in unknown)}; known are {', '.join(sorted(fields))}")
    missing = [
        n
        for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing key {', '.join(where + k for k in missing)}")
    return cls(**{key: _convert(hints[key], value, where + key) for key, value in data.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value is False and "no" in arguments:
            return "no"  # YAML 1.1 reads a bare `no` so
        if value not in arguments:
            raise ConfigError(f"{where} must be one of {', '.join(map(repr, arguments))}, not {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(Any, hint), value, where + ".")
    if hint is float and isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-3, without a point, as text
        except ValueError:
            raise ConfigError(f"{where} must be a number, not {value!r}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be of type {hint.__name__}, not {value!r}")
    return value


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Reads a YAML file and applies `key.path=value` overrides.

    Raises:
        ConfigError: no such file, not YAML, or whatever `build` objects to.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"an override is key=value, not {override!r}")
        target = data
        *parents, last = key.split(".")
        for name in parents:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{key}: {name} is not a section")
        target[last] = yaml.safe_load(text)
    return build(TrainingConfig, data)
