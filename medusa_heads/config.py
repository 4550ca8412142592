"""What a directory of heads says about itself: `config.json`, both ways. Unknown keys are errors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from medusa_heads.errors import ConfigError

FORMAT = 1
"""Version of this project's own layout; a reader refuses a newer one."""


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads (Cai et al. 2024): k residual blocks each, on the base's last hidden state."""

    hidden_size: int
    vocab_size: int
    """Rows of the base's vocabulary projection."""
    num_heads: int = 4
    num_layers: int = 1
    """Residual SiLU blocks in each head."""
    own_projection: bool = False
    """Each head has a vocabulary projection of its own, in place of the base's."""
    draft_vocab_size: int | None = None
    """Rows of the vocabulary that the heads draft from; None: all. The base verifies over all of them."""
    base_model_name_or_path: str | None = None
    base_revision: str | None = None
    tokenizer_hash: str | None = None
    weights_hash: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        if not isinstance(self.own_projection, bool):
            raise ConfigError(f"own_projection must be true or false, not {self.own_projection!r}")
        size = self.draft_vocab_size
        if size is not None and type(size) is not int:
            raise ConfigError(f"draft_vocab_size must be an integer or null, not {size!r}")
        if size is not None and not 0 < size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size {size} does not lie within the vocabulary of {self.vocab_size}")

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "medusa_heads", "head_family": "medusa", "format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MedusaConfig:
        rest = dict(data) if isinstance(data, dict) else {}
        if rest.pop("model_type", None) != "medusa_heads" or rest.pop("head_family", None) != "medusa":
            raise ConfigError("not a config of Medusa heads in this project's layout (model_type, head_family)")
        version = rest.pop("format", None)
        if version != FORMAT:
            raise ConfigError(f"heads of format {version!r}; this version reads format {FORMAT}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(rest) - known)
        if unknown:
            raise ConfigError(f"unknown keys in the heads' config: {', '.join(unknown)}")
        missing = sorted({"hidden_size", "vocab_size"} - set(rest))
        if missing:
            raise ConfigError(f"missing keys in the heads' config: {', '.join(missing)}")
        return cls(**rest)
