"""What a directory of heads says about itself: `config.json`, both ways. Unknown keys are errors.

One frozen dataclass a head family; `head_family` in the file says which.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

from medusa_heads.errors import ConfigError

FORMAT = 1
"""Version of this project's own layout; a reader refuses a newer one."""

OWN_TYPE = "medusa_heads"
"""`model_type` of this project's own layout."""

C = TypeVar("C", bound="HeadsConfig")


@dataclass(frozen=True)
class HeadsConfig:
    """What the configs of all families share."""

    family: ClassVar[str] = ""

    hidden_size: int
    vocab_size: int
    """Rows of the base's vocabulary projection."""
    own_projection: bool = False
    """The heads have vocabulary projections of their own, in place of the base's."""
    draft_vocab_size: int | None = None
    """Rows of the vocabulary that the heads draft from; None: all. The base verifies over all of them."""
    base_model_name_or_path: str | None = None
    base_revision: str | None = None
    tokenizer_hash: str | None = None
    weights_hash: str | None = None

    def __post_init__(self) -> None:
        self.check_positive("hidden_size", "vocab_size")
        if not isinstance(self.own_projection, bool):
            raise ConfigError(f"own_projection must be true or false, not {self.own_projection!r}")
        size = self.draft_vocab_size
        if size is not None and type(size) is not int:
            raise ConfigError(f"draft_vocab_size must be an integer or null, not {size!r}")
        if size is not None and not 0 < size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size {size} does not lie within the vocabulary of {self.vocab_size}")

    def check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": OWN_TYPE, "head_family": self.family, "format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any]) -> C:
        rest = dict(data) if isinstance(data, dict) else {}
        if rest.pop("model_type", None) != OWN_TYPE or rest.pop("head_family", None) != cls.family:
            title = cls.family.capitalize()
            raise ConfigError(f"not a config of {title} heads in this project's layout (model_type, head_family)")
        version = rest.pop("format", None)
        if version != FORMAT:
            raise ConfigError(f"heads of format {version!r}; this version reads format {FORMAT}")
        unknown = sorted(set(rest) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown keys in the heads' config: {', '.join(unknown)}")
        needed = {field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
        missing = sorted(needed - set(rest))
        if missing:
            raise ConfigError(f"missing keys in the heads' config: {', '.join(missing)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in rest.items()}
        return cls(**values)


@dataclass(frozen=True)
class MedusaConfig(HeadsConfig):
    """Medusa heads (Cai et al. 2024): k heads of residual blocks on the base's last hidden state."""

    family = "medusa"

    num_heads: int = 4
    num_layers: int = 1
    """Residual SiLU blocks in each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("num_heads", "num_layers")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decoder layer of the base's own kind: what a draft layer takes over from the base's config."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    """A name of transformers' `ACT2FN`."""
    gated_mlp: bool = True
    """down(act(gate x) · up x), else down(act(up x))."""
    norm: str = "rms"
    """`rms` or `layer`."""
    norm_eps: float = 1e-6
    rope_parameters: dict[str, Any]
    """transformers' own: `rope_type`, `rope_theta`, and what the type needs."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that is rotated."""
    attention_bias: bool = False
    """Of the query, key and value projections."""
    output_bias: bool = False
    """Of attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norms over each head's query and key, before rotation."""
    max_position_embeddings: int = 2048


@dataclass(frozen=True)
class EagleConfig(HeadsConfig):
    """One autoregressive draft layer over the base's states.

    EAGLE (Li et al. 2024) reads the last state and predicts the next one; EAGLE-3 (Li et al. 2025) fuses three layers'
    states and is free of that target.
    """

    family = "eagle"

    version: int = 1
    """1: EAGLE-1 and EAGLE-2, whose heads are the same; 3: EAGLE-3."""
    layers: tuple[int, ...] = ()
    """Version 3: the states that are fused, number i being the state that *enters* layer i of the base."""
    layer: dict[str, Any] | None = None
    """The fields of `LayerShape`."""
    fc_bias: bool = False
    """Version 1: a bias in the projection that joins embedding and state."""
    norm_before_residual: bool = False
    """Version 3: the draft layer's residual is the normed feature (an option of the library speculators)."""
    state_norm: str | None = None
    """Version 3: RMS norms before the states are fused: `joined`, one over all of them, or `each` (options of other
    projects)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version not in (1, 3):
            raise ConfigError(f"version must be 1 or 3, not {self.version!r}")
        if (self.version == 3) != bool(self.layers):
            raise ConfigError(f"version {self.version} of EAGLE does not go with layers {list(self.layers)}")
        if any(type(i) is not int or i < 0 for i in self.layers):
            raise ConfigError(f"layers must be numbers of layers, not {list(self.layers)}")
        if self.version == 3 and self.fc_bias:
            raise ConfigError("fc_bias belongs to version 1")
        if self.version == 1 and (self.norm_before_residual or self.state_norm is not None):
            raise ConfigError("norm_before_residual and state_norm belong to version 3")
        if self.state_norm not in (None, "joined", "each"):
            raise ConfigError(f"state_norm must be joined, each or null, not {self.state_norm!r}")
        _ = self.shape

    @property
    def shape(self) -> LayerShape:
        try:
            return LayerShape(**(self.layer or {}))
        except TypeError as error:
            raise ConfigError(f"layer: {str(error).replace('LayerShape.__init__() ', '')}") from None


@dataclass(frozen=True)
class HydraConfig(HeadsConfig):
    """Hydra heads (Ankner et al. 2024): head i also reads the embeddings of the tokens drafted before it."""

    family = "hydra"

    num_heads: int = 4
    num_layers: int = 1
    """Layers of each head's MLP: the first takes state and embeddings, the others are residual."""
    prefix_attention: bool = False
    """A decoder layer over the base's states before the heads read them (Hydra++)."""
    layer: dict[str, Any] | None = None
    """The fields of `LayerShape`, for the prefix attention."""
    prefix_norm: bool = False
    """A norm behind the prefix attention, as in the heads that were published."""
    entry_bias: bool = False
    """A bias beside R in each head's first layer, likewise."""
    projection_bias: bool = False
    """Biases of projections of their own, likewise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("num_heads", "num_layers")
        if self.prefix_attention != (self.layer is not None):
            raise ConfigError("layer describes the prefix attention: both or neither")
        if self.prefix_norm and not self.prefix_attention:
            raise ConfigError("prefix_norm belongs to the prefix attention")
        if self.projection_bias and not self.own_projection:
            raise ConfigError("projection_bias belongs to projections of their own")
        if self.layer is not None:
            _ = self.shape

    @property
    def shape(self) -> LayerShape:
        try:
            return LayerShape(**(self.layer or {}))
        except TypeError as error:
            raise ConfigError(f"layer: {str(error).replace('LayerShape.__init__() ', '')}") from None


CONFIGS: dict[str, type[HeadsConfig]] = {c.family: c for c in (MedusaConfig, EagleConfig, HydraConfig)}


def config_from_dict(data: dict[str, Any]) -> HeadsConfig:
    """The config of whichever family the file names."""
    family = data.get("head_family") if isinstance(data, dict) else None
    if family not in CONFIGS:
        raise ConfigError(
            f"not a config of heads in this project's layout: head_family is {family!r}, not one of {sorted(CONFIGS)}"
        )
    return CONFIGS[family].from_dict(data)
