"""Find the kind of each decoder layer by running its modules: which attend, and which keep a state.

Each module that takes a cache runs on the meta device, where nothing is allocated. One that calls transformers'
attention function attends, and its sizes are those that it passes on. One that puts the state of a convolution or a
recurrence into its cache keeps a state, of the shapes that it puts there. A layer may do both, or neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvcli.compat import can_set_attention, exporting, set_attention
from kvcli.errors import ExitCode, KvcliError
from kvcli.models.auto import angles_at, decoder_of, layers_of, rotary_of
from kvcli.models.checkpoint import quiet
from kvcli.models.entries import EntryCache, makes_entries
from kvcli.models.latent import Latent, compressed
from kvcli.models.own_attention import BIASES, run_noted
from kvcli.models.own_attention import NAME as OWN

# The cache given to a module of transformers for its state alone, of a convolution or of a recurrence.

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "layer_past")
"""Names of the cache argument in modules of transformers: `cache` from 5.24 on, and `layer_past` in old families."""


def cache_argument(module: nn.Module) -> str:
    """Return the name of a module's cache argument."""
    taken = signature(module.forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in taken)


class StateCache(Cache):
    """The state of the module with its own `number`: `tensors` as `tensors()` returns them, [b, ...] each.

    Without tensors, the module makes them. They hold a state if the sequence has `started`.
    """

    def __init__(
        self, number: int, tensors: Mapping[str, Tensor] | None = None, started: bool = False, states: int = 1
    ):
        self.state = LinearAttentionLayer(number_of_states=sum("conv" in name for name in tensors or ()) or states)
        self.state.update_index = self.update_index  # type: ignore[attr-defined]
        super().__init__(layers=[self.state] * (number + 1))  # the module asks for its own
        for name, tensor in (tensors or {}).items():
            kind, at = name.split(".")
            getattr(self.state, f"{kind}_states")[int(at)] = tensor
            getattr(self.state, f"is_{kind}_states_initialized")[int(at)] = True
            self.state.device, self.state.dtype = tensor.device, tensor.dtype  # type: ignore[assignment]
            if kind == "conv":
                self.state.conv_kernel_size[int(at)] = tensor.shape[-1]
        self.started = started
        self.index_channels = 0  # of the keys that an index of the module's own was given
        self.indexed = _MANY  # tokens whose keys it is told that there are

    def tensors(self) -> dict[str, Tensor]:
        """Return the module's tensors: "conv.0" and "recurrent.0", if it has them, and those of further states."""
        kinds = {"conv": self.state.conv_states, "recurrent": self.state.recurrent_states}
        return {
            f"{kind}.{number}": tensor
            for kind, held in kinds.items()
            for number, tensor in held.items()
            if tensor is not None
        }

    @property
    def started(self) -> bool:
        """Whether the tensors belong to a sequence that has begun; before its first tokens they are zeros."""
        return all(self.state.has_previous_state.values())

    @started.setter
    def started(self, started: bool) -> None:
        self.state.has_previous_state = dict.fromkeys(self.state.has_previous_state, started)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep no keys and values."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0, as no tokens are kept."""
        return 0

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:  # noqa: ARG002
        """Take the keys of a module's own index [1, n, c]; return the shape of many tokens' [1, `indexed`, c]."""
        self.index_channels = indexer_key_states.shape[-1]
        keys = indexer_key_states.new_ones(1, self.indexed, self.index_channels)
        self.state.keys, self.state.get_seq_length = keys, lambda: self.indexed  # type: ignore[attr-defined]
        return keys

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Do the same for keys [1, 1, n, c], as MiniMax M3's layers have them."""
        return self.update_indexer(idx_k[:, 0], 0)[:, None]

    # MiniMax asks for these, as its layers have a cache class of their own.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:  # noqa: ARG002
        """Return the state of a layer, if it has one."""
        return self.state.recurrent_states[0] if self.started else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Take the state of a layer."""
        self.update_recurrent_state(linear_cache, layer_idx)


# Watch tensors while work runs: its peak memory, and the tensors that it reads.


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made inside and live at the same time: `most` of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.most: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is gone; views share one."""
        storage = tensor.untyped_storage()
        identity, size = storage._cdata, storage.nbytes()
        if identity not in self._known:
            self._known.add(identity)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, identity, size)

    def _gone(self, identity: int, size: int) -> None:
        self._known.remove(identity)
        self.now -= size


class UseOf(TorchFunctionMode):
    """Watches whether one of some tensors is read by any torch function called inside."""

    def __init__(self, tensors: list[Any]):
        super().__init__()
        self.tensors = [each for each in tensors if isinstance(each, Tensor)]
        self.found: bool = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = args[1:] if function is Tensor.copy_ else args
        given = tree_leaves((read, kwargs))
        self.found = self.found or any(each is tensor for each in given for tensor in self.tensors)
        return function(*args, **(kwargs or {}))


class BestOf(TorchFunctionMode):
    """Watches how many are taken as the best of many by any torch function called inside: `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.__name__ == "topk":
            self.most = max(self.most, out.indices.shape[-1])
        return out


_PROBE = "kvcli_probe"
_TWO = 2  # tokens
_FEW = 16  # tokens
_MANY = 1 << 20  # more tokens than a model's own selection has
_SOME = 26_879  # the same where the tokens have numbers: all but one of a whole number of blocks, of most sizes
# Arguments that kvcli's attention honours, or may ignore: it knows all that position_ids and the cache say.
_UNDERSTOOD = {"scaling", "softcap", "s_aux", "sliding_window"}
_UNDERSTOOD |= {"dropout", "is_causal", "position_ids", "use_cache", *CACHE_ARGUMENTS}
# The exact classes: derived ones store more.
_KEYS_AND_VALUES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
SELECTIONS = ("indices", "block_indices")
"""Arguments by which a module passes its own selection to attention: tokens [b, n, k] or blocks [b, Hk, n, k]."""
_SUPPORTED_HINT = (
    "kvcli needs a decoder of layers that keep keys and values, with full or sliding-window attention, and perhaps of "
    "others that keep a state of fixed size; `kvcli doctor -m MODEL` says what a model's layers are"
)


_MASKS = 8  # bytes for each query and token of masks, where a module selects by one


class OwnSelection(NamedTuple):
    """What a layer selects by itself (DeepSeek Sparse Attention, arXiv 2512.02556): `tokens` at most, for each query.

    It scores all tokens by an index that has a key of `channels` numbers for each; 0 if it takes the selection of the
    layer before. Scoring takes `scratch` bytes for each query and token. `heads` select on their own, all KV heads or
    one for all, and `block` consecutive tokens together. A module that looks at numbers runs for one sequence `alone`;
    one that rotates keys of its index is given the angles of `all_angles`, not only of the new tokens.

    Some select entries that each stand for `rate` tokens, or attend to all of these if `tokens` is 0; beside them they
    attend to the last `near` tokens (DeepSeek-V4).
    """

    tokens: int
    channels: int
    scratch: int
    heads: int = 1
    block: int = 1
    alone: bool = False
    all_angles: bool = False
    rate: int = 1
    near: int = 0

    @property
    def name(self) -> str:
        """Say what is selected."""
        if self.near:
            first = f"top {self.tokens:,} of " if self.tokens else ""
            return f"{first}entries of {self.rate:,} tokens, and the last {self.near:,} tokens"
        whole = f"top {self.tokens // self.block:,} of "
        return whole + ("tokens" if self.block == 1 else f"blocks of {self.block:,} tokens")

    def most(self, length: int) -> int:
        """Return how many tokens and entries a query attends to at most, of `length` tokens."""
        return self.near + (self.tokens or length // self.rate)


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer: H query heads over Hk KV heads of `head_dim`; `window` in tokens, None for full attention.

    Values with fewer dimensions than keys are kept at the size of these.

    `index` counts the layers that attend. `rope` is False if the layer uses no rotary positions (NoPE). If `chunked`,
    the window does not slide but is the chunk of that many tokens in which the query lies (Llama 4). In multi-head
    latent attention all query heads share one head, whose keys, which are also its values, end in a `latent` of that
    many channels; the other channels are rotary. A layer that `selects` by itself keeps the keys of its index as well:
    they are the first `index_channels` of the `head_dim` of every part of a token. `readers` later layers have no KV of
    their own and attend to that of this one. A module that attends `by_itself` is understood by its operations
    (`kvcli.models.own_attention`).
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rope: bool
    chunked: bool = False
    latent: int | None = None
    selects: OwnSelection | None = None
    readers: int = 0
    by_itself: bool = False

    @property
    def index_channels(self) -> int:
        """Channels of a head, in each part of a token, before its own: a share of an index key, and an entry."""
        if self.selects is None:
            return 0
        if self.near:
            return (self.head_dim + self.selects.channels) // 2
        return -(-self.selects.channels // (self.parts * self.num_kv_heads))

    @property
    def near(self) -> int:
        """Last tokens that it attends to beside entries that stand for several; 0 if it has no entries."""
        return 0 if self.selects is None else self.selects.near

    @property
    def rate(self) -> int:
        """Tokens that an entry stands for; 1 if there are none."""
        return 1 if self.selects is None else self.selects.rate

    @property
    def of_entries(self) -> LayerGeometry:
        """The same layer as one whose tokens are the entries."""
        assert self.selects is not None
        selects = self.selects._replace(rate=1, near=0) if self.selects.channels else None
        return replace(self, head_dim=self.index_channels, selects=selects)

    @property
    def parts(self) -> int:
        """Tensors that a token has in each KV head: its key and its value, or one latent that is both."""
        return 2 if self.latent is None else 1

    @property
    def token_size(self) -> int:
        """Numbers that a token has on its way to the cache, and where prompts are saved."""
        return self.parts * self.num_kv_heads * self.head_dim

    @property
    def grows(self) -> int:
        """Numbers by which a cache of everything grows with a token, rounded up."""
        if self.window is not None:
            return 0
        return -(-self.of_entries.token_size // self.rate) if self.rate > 1 else self.token_size


class StateTensor(NamedTuple):
    """A part of a layer's state of one sequence, as `StateCache.tensors` names it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StateGeometry:
    """One layer's state of all tokens before, of a fixed size: of a convolution, of a recurrence, or of both.

    `index` counts the layers that keep a state, `number` is the module's own number. `resumes` tells whether the module
    can process several tokens at once from a state; if not, it reads a prompt's beginning at once, the rest one by one.
    `temporaries` returns the bytes that it takes in addition to its input while it reads that many tokens at once.
    """

    index: int
    number: int
    tensors: tuple[StateTensor, ...]
    resumes: bool
    temporaries: Callable[[int], int] = field(compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in self.tensors)


class Reader(NamedTuple):
    """The name of a module that attends to the KV of an earlier layer, and the number of that layer."""

    name: str
    layer: int


class DecoderLayer(NamedTuple):
    """The names of the modules of a decoder layer that keep KV, in their order, and of the one that keeps a state.

    A layer without KV of its own may have a `reader` of another layer's.
    """

    attention: tuple[str, ...]
    state: str | None
    reader: Reader | None = None

    @property
    def keeps(self) -> bool:
        """Whether the layer keeps anything of the tokens that it has seen."""
        return bool(self.attention) or self.state is not None


def layer_type_of(rotary: nn.Module, config: PreTrainedConfig, place: int) -> str | None:
    """Return the argument that selects the frequencies of decoder layer `place`, None if all layers share them.

    Some models keep one set of frequencies for each layer type (gemma3: sliding and full).
    """
    return config.layer_types[place] if isinstance(getattr(rotary, "rope_type", None), dict) else None


def refusal(config: PreTrainedConfig, reason: str) -> KvcliError:
    """Make the error that names the model type and why kvcli cannot run it."""
    return KvcliError(f"model type {config.model_type!r} is not supported: {reason}", _SUPPORTED_HINT, ExitCode.USAGE)


class _Trial(NamedTuple):
    """A way to run a module: on shapes, or on zeros for one that looks at numbers.

    One with an index is told that there are the keys of so many tokens, and gets a mask of all of them, or only of
    the new ones. It may get the rotary angles of all, too.
    """

    device: str = "meta"
    indexed: int = _MANY
    mask_of_new: bool = False
    all_angles: bool = False


_ON_ZEROS = _Trial("cpu", _SOME)
_TRIALS = (_Trial(), _ON_ZEROS, _ON_ZEROS._replace(mask_of_new=True), _ON_ZEROS._replace(all_angles=True))


class _Attended(NamedTuple):
    """What a module passes to attention: [1, H, 1, d], [1, Hk, 1, d] and [1, Hk, 1, d]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor


class LayerFinder:
    """Finds the layers of a model on the meta device: `layers`, `states`, and `decoder`, their places.

    `ends` tells whether the model has a table of its positions, learned or not, and none beyond it. `reshapes` tells
    whether its decoder gives what leaves the layers the shape of what enters them, so that all tokens have to leave.

    Raises:
        KvcliError: the model cannot be run; the message gives the reason (usage).
    """

    def __init__(self, model: PreTrainedModel, text: PreTrainedConfig):
        self.model, self.text = model, text
        self.layers: list[LayerGeometry] = []
        self.states: list[StateGeometry] = []
        self.decoder: list[DecoderLayer] = []
        self._selected: Tensor | None = None  # [1, 1, k] tokens or [1, Hk, 1, k] blocks, of the last layer that selects
        self._selects = False  # whether the layer examined did
        self._within_index = False  # whether it has an index
        self._scratch: dict[Any, int] = {}  # of modules of one form, see `OwnSelection`
        self._entries: EntryCache | None = None  # of the module that ran, if it makes entries of several tokens
        self._best = 0  # of how many it was seen to take the best
        self._angles = 0  # cosines and sines of a position
        self._trials: dict[type[nn.Module], _Trial] = {}  # how modules of a class run
        self._seen: list[_Attended] = []  # every attention
        self._keeping: set[nn.Module] = set()  # modules that keep a state
        self._by_itself: set[nn.Module] = set()  # modules that attend themselves
        self._why_not: dict[nn.Module, str] = {}  # what is not understood of other modules
        self._keys: list[Tensor] = []  # of each layer that keeps KV, by which later ones that read it are recognised
        self._passed: dict[Any, Any] = {}  # what layers pass on to later ones
        self._alike: dict[Any, tuple[dict[str, Tensor], bool, Callable[[int], int]]] = {}  # modules of one form
        rotary = rotary_of(model)
        # On the CPU: some choose their frequencies by the values of positions.
        self._rotary: nn.Module | None = None if rotary is None else type(rotary)(config=text)
        try:
            self._kv = DynamicCache(config=model.config).layers
        except Exception as error:
            raise refusal(model.config, f"transformers knows no key and value cache for it ({error})") from error
        self._asks = can_set_attention(model)  # whether the modules ask for attention, or some attend themselves
        for name in (_PROBE, OWN):
            AttentionInterface.register(name, self._attention)
        set_attention(model, _PROBE if self._asks else OWN)
        decoder, layers = decoder_of(model), layers_of(model)
        self._given = {} if self._asks else self._given_first(layers)
        self.biases = {name: self._given[name] for name in BIASES if self._given.get(name) is not None}
        inside = {*(decoder if getattr(decoder, "layers", None) is layers else layers).modules()}
        if any(hasattr(each, "layer_idx") and each not in inside for each in decoder.modules()):
            raise refusal(model.config, "its decoder has several stacks of layers")
        names = {module: name for name, module in model.named_modules()}
        # Kernels of other packages know no meta device.
        with exporting(), compressed(model.modules()), as_tokens(model.modules()):
            for place, layer in enumerate(layers):
                self._read: int | None = None  # the layer whose KV this one reads
                indexed = self._within_index = place < len(self._kv) and _has_index(self._kv[place])
                found = [self._examine(place, module) for module in _with_cache(layer, indexed)]
                attention, state = ([names[each[at]] for each in found if each[at] is not None] for at in (0, 1))
                if len(state) > 1 or (self._read is not None and len(attention) > 1):
                    raise refusal(model.config, "several modules of a decoder layer keep a state, or read another's KV")
                reader = None if self._read is None else Reader(attention.pop(), self._read)
                self.decoder.append(DecoderLayer(tuple(attention), next(iter(state), None), reader))
        self.ends, self.reshapes = self._around(layers) if self._rotary is None else (self._rotary_ends(), False)
        self.ends |= self.bias_positions is not None
        self._check(rotary)

    def _check(self, rotary: nn.Module | None) -> None:
        """Refuse models that cannot be served."""
        first = next((place for place, layer in enumerate(self.decoder) if layer.reader), len(self.decoder))
        if any(layer.keeps for layer in self.decoder[first:]):
            raise refusal(
                self.model.config, f"layer {first} reads the keys and values of another, and later ones do not"
            )
        if not self.layers and self.states:
            reason = "none of its layers attends, all keep a state (state-space, linear attention, convolution)"
            raise refusal(self.model.config, reason)
        if not self.layers:
            raise refusal(self.model.config, "its decoder is not a stack of layers that attend")
        if rotary is None and not self.states and not self.ends and not self.biases:
            reason = "its decoder gives its layers no rotary positions, and has no table of positions"
            raise refusal(self.model.config, reason)

    @property
    def bias_positions(self) -> int | None:
        """Return how many positions the bias of keys has, None if it has those of all tokens that there are (two)."""
        return next((bias.shape[-1] for bias in self.biases.values() if bias.shape[-1] != _TWO), None)

    def _given_first(self, layers: nn.ModuleList) -> dict[str, Any]:
        """Return what the decoder gives the first module that may attend, for two tokens, by the names of arguments."""
        given: dict[str, Any] = {}
        for module in [each for layer in layers[:1] for each in _with_cache(layer, False)][:1]:
            taken = signature(module.forward)

            def leave(*args: Any, taken: Signature = taken, **kwargs: Any) -> None:
                given.update(taken.bind(*args, **kwargs).arguments)
                raise InterruptedError

            module.forward = leave
            ids = torch.zeros(1, _TWO, dtype=torch.long, device="meta")
            with suppress(Exception):  # modelling code raises anything
                self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            del module.forward  # back to the method of the class
        return given

    def _around(self, layers: nn.ModuleList) -> tuple[bool, bool]:
        """Run the model without its layers on two tokens, one of which leaves them: return `ends` and `reshapes`."""
        embedding: Any = self.model.get_input_embeddings()
        hidden = torch.empty(1, 2, embedding.embedding_dim, dtype=self.model.dtype, device="meta")
        positions = torch.zeros(1, 2, dtype=torch.long, device="meta")
        entered = False

        def leave(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            nonlocal entered
            entered = True
            return hidden_states[:, -1:]

        with UseOf([positions]) as use:
            for layer in layers:
                layer.forward = leave
            try:
                self.model(inputs_embeds=hidden, position_ids=positions, use_cache=False)
            except Exception:  # an output of another shape
                return entered and use.found, True
            finally:
                for layer in layers:
                    del layer.forward  # back to the method of the class
        return use.found, False

    def _rotary_ends(self) -> bool:
        """Tell whether the rotary module looks positions up in a table, and has none after the last (GPT-J)."""
        rotary, after = self._rotary, getattr(self.text, "max_position_embeddings", None)
        assert rotary is not None
        if after is None or isinstance(getattr(rotary, "rope_type", None), dict):
            return False
        try:
            angles_at(rotary, torch.empty(1, 1, 1), torch.tensor([after]), None)
        except IndexError:
            return True
        return False

    def _examine(self, place: int, module: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """Run a module for a token, and record whether it attends and whether it keeps a state."""
        form = type(module), tuple((name, weight.shape) for name, weight in module.named_parameters())
        if form in self._alike:  # a recurrence is slow to run, even on shapes
            self._keeps(module, *self._alike[form])
            return None, module
        if _parameters(module) & {"cache_offset", "cycle_offset"}:
            reason = f"{type(module).__name__} runs several times a token, each time with keys and values of its own"
            raise refusal(self.model.config, reason)
        if "input_ids" in _parameters(module):
            raise refusal(self.model.config, f"{type(module).__name__} keeps tokens, not a state made of them")
        if "cross_attention_states" in _parameters(module):
            raise refusal(self.model.config, f"{type(module).__name__} attends to images, not to the tokens before")
        before, state, self._selects = len(self._seen), self._new_state(module), False
        if any(each.module in {*module.modules()} - {module} for each in self._seen):  # it is around one that attends
            return None, None
        kv: Any = self._kv[place] if place < len(self._kv) else None
        rope = self._run(place, module, 2 * kv.compress_rate - 1 if makes_entries(kv) else 1, state, tree_leaves)
        entries = self._entries
        if len(self._seen) > before + 1:
            raise refusal(self.model.config, f"{type(module).__name__} attends several times")
        within = not self._keeping.isdisjoint(module.modules())
        attends, tensors = len(self._seen) > before, {} if within else (entries or state).tensors()
        if attends:
            layer = self._attends(place, module, rope)
            if layer is not None:
                layer = replace(layer, by_itself=module in self._by_itself)
                key = self._seen[-1].key
                if self._selects and self._selected is not None:
                    block, heads = block_of(module), self._selected.shape[1] if self._selected.dim() == 4 else 1
                    trial, scratch = self._trials[type(module)], self._scratch_of(place, module, form)
                    sizes = block * self._selected.shape[-1], state.index_channels, scratch, heads, block
                    selects = OwnSelection(*sizes, trial.device != "meta", trial.all_angles)
                    layer = replace(layer, selects=selects)
                    layer = replace(layer, head_dim=layer.head_dim + layer.index_channels)
                if entries is not None:
                    best, channels = self._best, sum(each.shape[-1] for each in [*entries.new.values()][1:])
                    scratch, near = self._scratch_of(place, module, form), layer.window or 0
                    selects = OwnSelection(best, channels, scratch, alone=True, rate=entries.rate, near=near)
                    layer = replace(layer, selects=selects, head_dim=2 * layer.head_dim + channels, window=None)
                self.layers.append(layer)
                self._keys.append(key)
        if tensors:
            resumes = entries is not None or self._resumes(place, module, tensors)
            temporaries = partial(self._temporaries, place, module, resumes)
            if entries is not None:  # a few queries at a time score them
                temporaries = partial(self._most, place, module, only=_Trial(indexed=0))
            found = tensors, resumes, cache(temporaries)
            self._keeps(module, *found)
            if not attends:
                self._alike[form] = found
        if not attends and not tensors and not within:
            what = f"{type(module).__name__} does not use transformers' attention interface"
            raise refusal(self.model.config, what + self._why_not.get(module, ""))
        return (module if attends else None, module if tensors else None)

    def _attends(self, place: int, module: nn.Module, rope: bool) -> LayerGeometry | None:
        """Describe a layer that keeps KV; None for one that reads an earlier layer's: its keys are the very same."""
        if not getattr(module, "is_causal", True):
            raise refusal(self.model.config, "its attention is bidirectional")
        _, query, key, value = self._seen[-1]
        self._read = next((layer for layer, known in enumerate(self._keys) if known is key), None)
        if self._read is not None:
            read = self.layers[self._read]
            self.layers[self._read] = replace(read, readers=read.readers + 1)
            return None
        if key.shape[-1] < value.shape[-1]:
            reason = f"its keys have {key.shape[-1]} dimensions and its values more, {value.shape[-1]}"
            raise refusal(self.model.config, reason)
        latent = Latent.of(module)
        number = _number(module, place)
        kv = self._kv[number] if number < len(self._kv) else None
        if type(kv) not in _KEYS_AND_VALUES and not _has_index(kv) and not makes_entries(kv):
            raise refusal(self.model.config, f"layer {place} shares its keys and values, or keeps them in another form")
        window = kv.sliding_window if isinstance(kv, DynamicSlidingWindowLayer) else None
        chunked = window is not None and _kind_of(self.text, place) == "chunked_attention"
        width = None if latent is None else latent.rank
        heads, (_, kv_heads, _, head_dim) = query.shape[1], key.shape
        if latent is None and key is value and kv_heads == 1:
            width = head_dim - self._angles // 2
        return LayerGeometry(len(self.layers), heads, kv_heads, head_dim, window, rope, chunked, width)

    def _keeps(
        self, module: nn.Module, tensors: dict[str, Tensor], resumes: bool, temporaries: Callable[[int], int]
    ) -> None:
        self._keeping.add(module)
        parts = tuple(StateTensor(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items())
        self.states.append(StateGeometry(len(self.states), _number(module), parts, resumes, temporaries))

    def _resumes(self, place: int, module: nn.Module, tensors: dict[str, Tensor]) -> bool:
        recurrent = [tensor for name, tensor in tensors.items() if name.startswith("recurrent")]
        cache = StateCache(_number(module), tensors, started=True)
        return not recurrent or self._run(place, module, 2, cache, lambda _: recurrent)

    def _new_state(self, module: nn.Module) -> StateCache:
        return StateCache(_number(module), states=getattr(self.text, "number_of_conv_states", 1))

    def _temporaries(self, place: int, module: nn.Module, resumes: bool, tokens: int) -> int:
        """Count the bytes that a module takes; for one that reads token by token, extrapolate from a few tokens."""
        if resumes or tokens <= 2 * _FEW:
            return self._most(place, module, tokens)
        few = self._most(place, module, _FEW)
        return few + (tokens - _FEW) * (self._most(place, module, 2 * _FEW) - few) // _FEW

    def _scratch_of(self, place: int, module: nn.Module, form: Any) -> int:
        """Count the bytes that a module takes for each query and each token of its index, or each entry."""
        trial = self._trials[type(module)]
        if form not in self._scratch:
            few, more = (self._most(place, module, tokens) for tokens in (_FEW, 2 * _FEW))
            own = -(-(more - few) // (_FEW * trial.indexed))
            self._scratch[form] = own if trial.device == "meta" else max(own, _MASKS)
        return self._scratch[form]

    def _most(self, place: int, module: nn.Module, tokens: int, only: _Trial | None = None) -> int:
        """Count the bytes that a module takes for some tokens."""
        with exporting(), quiet(), torch.inference_mode(), PeakBytes() as peak:
            self._run(place, module, tokens, self._new_state(module), lambda _: [], only)
        return int(peak.most)

    def _run(
        self,
        place: int,
        module: nn.Module,
        tokens: int,
        cache: StateCache,
        watched: Callable[[Any], list[Any]],
        only: _Trial | None = None,
    ) -> bool:
        """Run a module for some tokens; tell whether it uses the tensors that `watched` picks from the angles."""
        indexed, seen, error = place < len(self._kv) and _has_index(self._kv[place]), len(self._seen), None
        known = only or self._trials.get(type(module))
        for trial in _TRIALS[: None if indexed else 2] if known is None else [known]:
            try:
                found = self._try(place, module, tokens, cache, watched, trial)
            except Exception as failed:  # modelling code raises anything
                error = error or failed
                del self._seen[seen:]
            else:
                self._trials.setdefault(type(module), trial)
                return found
        kv, form = (self._kv[place] if place < len(self._kv) else None), "has an unknown form"
        if indexed:
            form = "selects by an index that is not served yet"
        elif kv is not None and type(kv) not in (*_KEYS_AND_VALUES, LinearAttentionLayer):
            form = f"keeps something else than keys and values, a {type(kv).__name__},"
        raise refusal(self.model.config, f"{type(module).__name__} {form} ({error})") from error

    def _try(
        self,
        place: int,
        module: nn.Module,
        tokens: int,
        cache: StateCache,
        watched: Callable[[Any], list[Any]],
        trial: _Trial,
    ) -> bool:
        dtype, device, cache.indexed = self.model.dtype, trial.device, trial.indexed
        angles: Any = None
        tokens = tokens if self._asks else _TWO
        taken = _parameters(module)
        if self._rotary is not None and "position_embeddings" in taken:
            layer_type: str | None = layer_type_of(self._rotary, self.text, place)
            positions = torch.zeros(trial.indexed if trial.all_angles else tokens, dtype=torch.long)
            look_up = partial(angles_at, self._rotary, torch.empty(1, 1, 1, dtype=dtype), positions)
            kinds: Any = self._rotary.rope_type if layer_type is not None else ()
            if layer_type is None or layer_type in kinds:
                angles = look_up(layer_type)
            elif not {*self.text.layer_types} & {*kinds}:  # kinds of angles that are not of one layer each
                angles = {kind: look_up(kind) for kind in kinds}
            angles = tree_map(lambda x: None if x is None else x.to(device), angles)
            self._angles = sum(each.shape[-1] for each in tree_leaves(angles) if each is not None)
        given: dict[str, Any] = {
            "attention_mask": None,
            "position_embeddings": angles,
            "position_ids": torch.zeros(1, tokens, dtype=torch.long, device=device),
            "layer_idx": place,
            "shared_kv_states": self._passed,
            **dict.fromkeys(CACHE_ARGUMENTS, cache),
        }
        inner: Any = getattr(module, "q_proj", None)  # Zamba's input is two hidden states
        width = inner.in_features if isinstance(inner, nn.Linear) else self.text.hidden_size
        hidden = torch.zeros(1, tokens, width, dtype=dtype, device=device)
        given |= dict.fromkeys(("hidden_states", "q", "k", "v"), hidden)  # CTRL's takes them three times
        if place < len(self._kv) and _has_index(self._kv[place]):
            shape = (1, tokens) if trial.mask_of_new else (1, 1, tokens, trial.indexed)
            given["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=device)
            given["prev_topk_indices"] = self._selected
            if self._selected is not None and self._selected.device.type != device:
                given["prev_topk_indices"] = torch.zeros_like(self._selected, device=device)
        kv: Any = self._kv[place] if place < len(self._kv) else None
        self._entries = None
        if makes_entries(kv):

            def every(new: Tensor) -> Tensor:
                return new.new_ones(1, trial.indexed + new.shape[1], new.shape[2])

            self._entries = EntryCache(kv, trial.indexed * kv.compress_rate, every)
            given |= dict.fromkeys(CACHE_ARGUMENTS, self._entries)
            given["attention_mask"] = torch.zeros(1, 1, tokens, 0, dtype=dtype, device=device)
        named = {name: value for name, value in given.items() if name in taken}
        with BestOf() as best, UseOf(watched(angles)) as use:
            if not self._asks and self._notes(module, named):
                pass
            elif device == "meta":
                module(**named)
            else:
                functional_call(module, _zeros(module), (), named)
        self._best = int(best.most)
        return bool(use.found)

    def _notes(self, module: nn.Module, named: Mapping[str, Any]) -> bool:
        """Run a module that may attend itself on shapes; tell whether it does."""
        before = len(self._seen)
        given = {name: value for name, value in self._given.items() if name in _parameters(module)}
        given |= {name: value for name, value in named.items() if value is not None}

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return self._attention(module, q, k, v, None, scaling=scale)[0]

        try:
            positions = torch.zeros(1, _TWO, dtype=torch.long, device="meta")
            run_noted(module.forward, cache_argument(module), given, positions, attend)
        except Exception as error:  # modelling code raises anything
            self._why_not[module] = f", and attends in a way of its own: {error}"
            del self._seen[before:]
            return False
        attends = len(self._seen) > before
        if attends:
            self._by_itself.add(module)
        return attends

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Record what a module passes to attention, and its selection."""
        if self._entries is not None:  # the mask says which of these it selects
            key = value = self._entries.kv
            attention_mask = None
        indices = selection_of(kwargs, attention_mask, self._within_index)
        if indices is not None:
            self._selected, self._selects, attention_mask = indices, True, None
            kwargs = {name: value for name, value in kwargs.items() if name not in SELECTIONS}
        unknown = [name for name, given in kwargs.items() if given is not None and name not in _UNDERSTOOD]
        if attention_mask is not None or unknown:
            raise ValueError(f"it hands {', '.join(unknown) or 'a mask of its own'} to attention")
        self._seen.append(_Attended(module, query, key, value))
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        latent = Latent.of(module)
        return out if latent is None else latent.value(out), None


def _has_index(kv: object) -> bool:
    """Whether a layer's cache in transformers keeps the keys of an index, by which the layer selects."""
    return hasattr(kv, "update_indexer") or hasattr(kv, "update_index")


def selection_of(given: Mapping[str, Any], mask: Tensor | None, indexed: bool) -> Tensor | None:
    """Find what a module selects among what it passes to attention, as an argument or as a mask; None if nothing."""
    found: Tensor | None = next((given[name] for name in SELECTIONS if given.get(name) is not None), None)
    if found is not None or mask is None or not indexed:
        return found
    if mask.dtype != torch.bool:
        return mask  # see `as_tokens`
    visible = mask[:, 0]  # [b, n, all tokens]
    chosen = visible.byte().topk(int(visible.sum(-1).max()), -1).indices
    return torch.where(visible.gather(-1, chosen), chosen, -1)


@contextmanager
def as_tokens(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules that turn selected tokens into a mask pass these on themselves, in its place (GLM 5 Next)."""
    masking: list[Any] = [module for module in modules if hasattr(module, "build_attention_mask_from_topk")]
    for module in masking:
        module.build_attention_mask_from_topk = lambda topk_indices, **_: topk_indices
    try:
        yield
    finally:
        for module in masking:
            del module.build_attention_mask_from_topk  # back to the method of the class


def _zeros(module: nn.Module) -> dict[str, Tensor]:
    """Return zeros in place of a module's weights and buffers, without memory of that size."""
    held = (*module.named_parameters(), *module.named_buffers())
    return {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in held}


def block_of(module: nn.Module) -> int:
    """Return how many consecutive tokens an attention module selects together."""
    return next((int(each.block_size) for each in module.modules() if hasattr(each, "block_size")), 1)  # type: ignore[arg-type]


def _kind_of(text: PreTrainedConfig, place: int) -> str | None:
    kinds = getattr(text, "layer_types", None)
    return None if kinds is None else kinds[place]


def _with_cache(layer: nn.Module, indexed: bool) -> Iterator[nn.Module]:
    """Yield the modules of a decoder layer that may attend or keep a state, inner ones first; no index within them."""
    found = [module for module in _inside_out(layer) if module is not layer and _takes_cache(module)]
    for module in found:
        if not indexed or not any(module in {*other.modules()} for other in found if other is not module):
            yield module


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inside_out(child)
    yield module


def _takes_cache(module: nn.Module) -> bool:
    """Tell by its arguments whether a module attends or keeps a state."""
    taken = _parameters(module) if hasattr(module, "layer_idx") else set[str]()
    return {"attention_mask", "position_embeddings"} <= taken or not taken.isdisjoint(CACHE_ARGUMENTS)


def _number(module: nn.Module, place: int = 0) -> int:
    number: Any = module.layer_idx
    return place if number in (None, -1) else int(number)  # Zamba's attention is told its number in each call


def _parameters(module: nn.Module) -> set[str]:
    return {
        name
        for name, parameter in signature(module.forward).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD
    }
