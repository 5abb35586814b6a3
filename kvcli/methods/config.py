"""Settings of methods: how one is declared, and the settings that several methods share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from typing_extensions import override

from kvcli.errors import ExitCode, KvcliError
from kvcli.kernels.narrow_attention import NarrowDtype
from kvcli.kernels.quant import KVDtype
from kvcli.kv.cache import DenseCache, Tiers
from kvcli.kv.narrow import NarrowCache
from kvcli.kv.pages import PageBudget
from kvcli.kv.tokens import TokenBudget
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import Share, parse_count

PatternName = Literal["exact", "a-shape", "vertical-slash"]
SIZES = {"a-shape": (1024, 4096), "vertical-slash": (1000, 6096)}
"""First and newest tokens; columns and diagonals: the paper's sizes for prompts of 128K tokens (section 4)."""


class PrefillPattern(NamedTuple):
    """A pattern of prefill attention and its two sizes; exact attention has no sizes."""

    pattern: PatternName
    sizes: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, text: str) -> PrefillPattern:
        """Parse "exact", "a-shape" or "vertical-slash", the latter two optionally with sizes as in "a-shape:64,1K".

        Raises:
            ValueError: the text is none of these.
        """
        name, colon, sizes = text.partition(":")
        if name not in get_args(PatternName) or (colon and name == "exact"):
            raise ValueError(f"{text!r} is not exact, a-shape or vertical-slash, with sizes as in a-shape:64,1K")
        if not colon:
            return cls(name, SIZES.get(name, (0, 0)))  # type: ignore[arg-type]
        first, comma, second = sizes.partition(",")
        try:
            found = parse_count(first), parse_count(second)
        except ValueError:
            found = (0, 0)
        if not comma or min(found) < 1:
            raise ValueError(f"{text!r} needs two sizes of 1 or more after {name}, as in {name}:64,1K")
        return cls(name, found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Format the pattern with its sizes."""
        return self.pattern if self.pattern == "exact" else f"{self.pattern}:{self.sizes[0]},{self.sizes[1]}"


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError("must be a power of two")
    return value


PowerOfTwo = Annotated[int, AfterValidator(_power_of_two)]


def _count_or_share(value: object, count: ValidatorFunctionWrapHandler) -> int:
    if isinstance(value, Share):
        return value
    tokens: int = Share(value) if isinstance(value, str) and value.endswith("%") else count(value)
    return tokens


CountOrShare = Annotated[
    int,
    WrapValidator(_count_or_share),
    PlainSerializer(lambda value: str(value) if isinstance(value, Share) else value, when_used="json"),
]
"""A number of tokens, or a share of the prompt such as "20%", which `Profile.for_prompt` resolves."""


Cosine = Annotated[float, Field(ge=0, le=1)]
CosineByLayer = Annotated[
    Annotated[Cosine, Tag("one")] | Annotated[tuple[Cosine, ...], Field(strict=False), Tag("by layer")],
    Discriminator(lambda value: "by layer" if isinstance(value, list | tuple) else "one"),
]
"""One number for all layers, or one per layer; see `by_layer`."""


def by_layer(name: str, value: float | tuple[float, ...], layers: int) -> tuple[float, ...]:
    """Return one number per layer.

    Raises KvcliError (usage) for too few. More numbers than layers are allowed: a plan tries a model's first layers
    alone.
    """
    values = value if isinstance(value, tuple) else (value,) * layers
    if len(values) < layers:
        hint = "give one number for all layers, or one for each"
        raise KvcliError(f"{name} has {len(values)} numbers for {layers} layers", hint, ExitCode.USAGE)
    return values


def setting(default: Any, description: str, unit: str = "", **bounds: Any) -> Any:
    """Declare one setting of a method: its default, description, unit and bounds."""
    return Field(default=default, description=description, json_schema_extra={"unit": unit}, **bounds)


class MethodConfig(BaseModel):
    """Settings of a method: frozen, with unknown keys refused."""

    stateless: ClassVar[bool] = True
    smallest_page: ClassVar[int | None] = None
    """Tokens of a page that a small budget scales pages down to; None: pages keep their size."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prefill: Annotated[str, AfterValidator(lambda text: str(PrefillPattern.of(text)))] = setting(
        "exact", "how prompts are read: exact, a-shape or vertical-slash; with sizes as in a-shape:64,1K"
    )

    @property
    def leading_dense_layers(self) -> int:
        """Number of leading layers that attend to everything."""
        return 0

    @property
    def stays_in_place(self) -> bool:
        """Whether tensors keep their addresses from the first step on, so that a step can be one CUDA graph.

        Also False with settings that `step_plan` does not cover, such as query heads that select on their own.
        """
        return self.pooled

    @property
    def pooled(self) -> bool:
        """Whether the query heads of a KV head select together: the setting `pooling` is not none."""
        return getattr(self, "pooling", None) != "none"

    @property
    def cpu_only(self) -> str | None:
        """What of the settings is for a CPU alone; None: all of them are for every device."""
        return None

    @property
    def on_host(self) -> bool:
        """Whether KV lies in host memory, from where it can move on to disk."""
        return False

    def readers(self, layer: LayerGeometry) -> int:
        """Return how many query heads of a KV head select on their own; 1 where they select together."""
        return 1 if self.pooled else layer.num_heads // layer.num_kv_heads

    def read_again(self, prompt: int) -> int:  # noqa: ARG002
        """Estimate how many tokens a prefill reads in addition to a prompt of `prompt` tokens."""
        return 0

    def beside_budget(self, prompt: int, generated: int) -> int:  # noqa: ARG002
        """Return the most tokens attended in addition to `budget`, after `prompt` and `generated` tokens."""
        return 0


def quantised(tiers: Tiers, held: KVDtype) -> Tiers:
    """Return tiers whose host memory holds KV in this form.

    Raises:
        KvcliError: quantisation is asked of a model with one latent per token (usage).
    """
    if held != "auto" and tiers.parts == 1:
        what = f"kv_dtype {held}: this model's tokens have one latent instead of keys and values"
        raise KvcliError(what, "leave it at auto: a latent is small", ExitCode.USAGE)
    return replace(tiers, kv_dtype=held)


class HostKVConfig(MethodConfig):
    """The setting shared by methods that keep KV in host memory."""

    kv_dtype: KVDtype = setting(
        "auto", "KV in host memory: auto as computed, int8, int4, or k8v4 (keys in 8 bits, values in 4)"
    )

    @model_validator(mode="after")
    def _has_kv_there(self) -> HostKVConfig:
        if self.kv_dtype == "auto":
            return self
        if not self.on_host:
            raise ValueError(f"kv_dtype {self.kv_dtype} is for KV in host memory: set offload = true as well")
        if self.ablates_host:
            raise ValueError(f"kv_dtype {self.kv_dtype} does not work with the ablations of host_layout and recall")
        return self

    @model_validator(mode="after")
    def _union_is_on_the_device(self) -> HostKVConfig:
        if self.on_host and not self.pooled:
            raise ValueError("offload has room for one selection a KV head: pooling = none needs offload = false")
        return self

    @property
    @override
    def on_host(self) -> bool:
        return bool(getattr(self, "offload", True))

    @property
    def ablates_host(self) -> bool:
        """Whether the host layout or the recall is an ablation: a variant that only shows what the default gains."""
        return getattr(self, "host_layout", "hnd") != "hnd" or getattr(self, "recall", "gather") != "gather"

    def tiers(self, tiers: Tiers) -> Tiers:
        """Return the tiers in which caches are made, with this `kv_dtype` in host memory.

        Raises:
            KvcliError: quantisation is asked of a model with one latent per token; or a disk is combined with the
                ablations of the host's layout (usage).
        """
        if tiers.disk is not None and self.ablates_host:
            what = "--kv-disk does not work with the ablations of host_layout and recall"
            raise KvcliError(what, "leave them as they are", ExitCode.USAGE)
        return quantised(tiers, self.kv_dtype)


class ResidentKVConfig(MethodConfig):
    """The setting shared by methods that keep everything on the device, in all KV heads or in some."""

    kv_dtype: Literal["auto", NarrowDtype] = setting(
        "auto",
        "on a CPU, KV of heads that keep everything: auto as computed, bfloat16, int8, or k8v4 (keys in 8 bits, values "
        "in 4)",
    )

    @property
    @override
    def cpu_only(self) -> str | None:
        return None if self.kv_dtype == "auto" else f"kv_dtype {self.kv_dtype}"

    def cache_of(self, layer: LayerGeometry, heads: int, capacity: int, tiers: Tiers) -> DenseCache | NarrowCache:
        """Make the cache of so many heads of a layer that keep everything.

        Raises:
            KvcliError: a narrow form is asked of a model with latents, or that selects by itself (usage).
        """
        if self.kv_dtype == "auto":
            return DenseCache(heads, layer.head_dim, capacity, tiers)
        if layer.parts == 1 or layer.selects is not None:
            what = f"kv_dtype {self.kv_dtype}: latents, and what a model selects from by itself, are kept as computed"
            raise KvcliError(what, "leave it at auto", ExitCode.USAGE)
        return NarrowCache(heads, layer.head_dim, capacity, self.kv_dtype, tiers)


class PagedConfig(MethodConfig):
    """Settings shared by methods that select pages."""

    budget: CountOrShare = setting(
        2048, "tokens attended per layer and KV head, sink and window included", "tokens", ge=1
    )
    sink: int = setting(512, "first tokens, always attended, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(512, "most recent tokens, always attended, rounded up to whole pages", "tokens", ge=1)
    page_size: PowerOfTwo = setting(32, "tokens in a page, a power of two", "tokens")
    smallest_page: ClassVar[int | None] = 8  # the bounds of smaller pages take more than an eighth of the KV's memory
    dense_layers: int = setting(1, "leading layers that attend to everything", "layers", ge=0)

    @property
    @override
    def leading_dense_layers(self) -> int:
        return self.dense_layers

    @property
    def pages(self) -> PageBudget:
        """The budget split into pages."""
        return PageBudget.of(budget=self.budget, sink=self.sink, window=self.window, page_size=self.page_size)

    @model_validator(mode="after")
    def _leaves_a_page(self) -> PagedConfig:
        pages = self.pages
        if pages.selected < 1:
            least = (pages.sink + pages.window + 1) * pages.size
            raise ValueError(
                f"budget {self.budget} leaves no page to select after sink {self.sink} and window {self.window} "
                f"in pages of {self.page_size}: raise it to at least {least}, or lower sink and window"
            )
        return self


class TokenConfig(MethodConfig):
    """Settings shared by methods that select single tokens."""

    budget: CountOrShare = setting(2048, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    sink: int = setting(0, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(0, "most recent tokens, always attended; the current one is in any case", "tokens", ge=0)
    dense_layers: int = setting(1, "leading layers that attend to everything", "layers", ge=0)

    @property
    @override
    def leading_dense_layers(self) -> int:
        return self.dense_layers

    @property
    def indexed_together(self) -> int:
        """Number of consecutive tokens that become selectable together, once the last of them is appended."""
        return 1

    @property
    def tokens(self) -> TokenBudget:
        """The budget split into sink, window and selected tokens."""
        return TokenBudget(self.budget, self.sink, max(1, self.window), self.indexed_together)

    @model_validator(mode="after")
    def _leaves_a_token(self) -> TokenConfig:
        missing = 1 - self.tokens.min_selected
        if missing > 0:
            group = f", window {self.window} and an unfilled group of {self.indexed_together}"
            beside = group if self.indexed_together > 1 else f" and window {self.window}"
            raise ValueError(
                f"budget {self.budget} leaves no token to select after sink {self.sink}{beside}: "
                f"it must be at least {self.budget + missing}"
            )
        return self
