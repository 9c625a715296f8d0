"""What a Transformer can be made of: mixers, blocks, positions, as configurations. `models` builds it."""

from dataclasses import dataclass, field
from typing import Literal

from mesascope.store import check_numbers, later


@dataclass(frozen=True)
class Softmax:
    r"""$o_t = \sum_{i\le t} \mathrm{softmax}_i(k_i^\top q_t/\sqrt{d})\, v_i$."""


@dataclass(frozen=True)
class Linear:
    r"""$o_t = \sum_{i\le t} v_i k_i^\top q_t$, unscaled."""


@dataclass(frozen=True, kw_only=True)
class Mesa:
    r"""$o_t = \Phi_t q_t$, $\Phi_t$ the ridge regression of values on keys up to t.

    Attributes:
        lam_init: λ at the start, one per head, learned.
        raw: the parameter is λ itself, used as 1e-6 where training drives it lower (released code, but for the
            bound); otherwise its softplus is λ.
        method: see `mesa_attention`.
    """

    lam_init: float = 1.0
    raw: bool = False
    method: str = "auto"

    def __post_init__(self):
        check_numbers(self, positive=("lam_init",))


@dataclass(frozen=True)
class Delta:
    r"""Delta-Net: one gradient step per token, with a learned rate $\beta_t\in(0,1)$ per head and token."""


Mixer = Softmax | Linear | Mesa | Delta


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Scale each head's queries and keys.

    Attributes:
        by: their Euclidean norm, their sum, or mean and standard deviation (LayerNorm without parameters).
        values: normalize values instead of keys (the released code does in mesa layers).
        of: queries and keys as they are projected; or what meets in the end, which with DPFP is their features.
    """

    by: Literal["l2", "sum", "layer_norm"] = "l2"
    values: bool = False
    of: Literal["projections", "features"] = later("projections")


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """$x + W_2\\,\\phi(W_1 x)$."""

    hidden: int
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"

    def __post_init__(self):
        check_numbers(self, hidden=1)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: a mixer, and an MLP or none.

    Attributes:
        heads: how many.
        key_dim: width of each head's queries, keys and values.
        dpfp: ν of deterministic parameter-free projection features of queries and keys (2ν times as wide); 0: none.
        forgets: a learned forgetting factor per head and token.
        shift_keys: $k_{t-1}$ takes the place of $k_t$: pairs $(x_{t-1}, x_t)$ without a layer that makes them.
    """

    mixer: Mixer = field(default_factory=Softmax)
    heads: int = 4
    key_dim: int = 20
    normalize: Normalize | None = None
    dpfp: int = 0
    forgets: bool = False
    shift_keys: bool = False
    mlp: FeedForward | None = None

    def __post_init__(self):
        check_numbers(self, heads=1, key_dim=1, dpfp=0)

    @property
    def is_plain(self) -> bool:
        """Softmax attention of queries and keys as they are."""
        changed = self.normalize is not None or self.dpfp or self.forgets or self.shift_keys
        return isinstance(self.mixer, Softmax) and not changed


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Sinusoidal codes (base 10000, sine in even columns, cosine in odd ones).

    Attributes:
        at: `key_inputs`: beside what the first layer's queries and keys are computed from (released code);
            `keys`: beside those queries and keys themselves (the paper's text); `tokens`: added to the embedded tokens.
        dim: width of the code; for `tokens` it is that of the model.
    """

    at: Literal["key_inputs", "keys", "tokens"] = "key_inputs"
    dim: int = 40

    def __post_init__(self):
        check_numbers(self, dim=1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a Transformer is made of.

    Attributes:
        token_dim: width of what it reads.
        output_dim: width of its predictions.
        model_dim: width of the residual stream, with learned matrices in and out. None: the stream is the token, and
            the prediction its first entries.
        layer_norm: before every mixer and MLP, and at the end.
        clip: the residual stream is clipped to [-clip, clip] after every block.
        masked: so many leading entries of the stream are hidden from the mixers (they are where predictions grow).
        init_std: of all weight matrices at the start.
        tf32: on a GPU, let projections and MLPs use TF32. The mixers never do.
        biases: projections and MLPs have one, zero at the start. (LayerNorms have none: what follows them does.)
        residual_init: `init_std` is so many times as large for matrices whose products are added to the stream.
    """

    token_dim: int
    output_dim: int
    model_dim: int | None = None
    blocks: tuple[Block, ...]
    positions: Positions | None = None
    layer_norm: bool = False
    clip: float | None = None
    masked: int = 0
    init_std: float = 0.05
    tf32: bool = False
    biases: bool = later(False)
    residual_init: float = later(1.0)

    def __post_init__(self):
        sizes = dict(token_dim=1, output_dim=1, model_dim=1, init_std=0, residual_init=0)
        check_numbers(self, positive=("clip",), **sizes)
        if not self.blocks:
            raise ValueError("blocks: expected at least one.")
        if self.model_dim is None and self.output_dim > self.token_dim:
            raise ValueError(
                f"output_dim: without model_dim a prediction is the first entries of a token, so expected at most "
                f"{self.token_dim}, got {self.output_dim}."
            )
        if not 0 <= self.masked < self.width:
            raise ValueError(f"masked: expected less than the width {self.width}, got {self.masked}.")
        if self.positions is not None and self.positions.at == "tokens" and self.positions.dim != self.width:
            raise ValueError(f"positions.dim: expected the width {self.width}, got {self.positions.dim}.")

    @property
    def width(self) -> int:
        return self.token_dim if self.model_dim is None else self.model_dim
