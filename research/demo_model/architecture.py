"""The demo model's architecture, and a start for its weights that saves most of the training.

Retrieval by name takes several steps: heads tell every token what stood before it and which name it is about, and a
later head looks for what follows the token just read in what the same name was said of (after the induction heads of
Olsson et al., "In-context Learning and Induction Heads", arXiv 2209.11895). A network with random weights needs about a
thousand steps before the first of these appears and learns little until then, so they are there at the start:

- layer 0: two heads look one and two tokens back; one at the last name (the topic), one at the names of the last 16
  tokens or so;
- layer 1: one head tells each token the topic of the token before it, another one is spread over the tokens before it;
  two look for earlier copies of the same token, which tells how often it has occurred;
- layer 2: two heads look for the token that follows the current one about the same topic, two for a name that the
  topic was followed by, rather nearby;
- layer 3: two heads look for the name that occurred most often and has not been said just now, two for what was
  answered about the topic shortly before, so that it is not said twice.

As in large models, queries from the second layer on share one large component. The first token's key has a part along
it, so that heads which find nothing attend to the first token, whose values are empty. Names, numbers and what
announces them have large components where tokens are compared, all other words small ones. What the first two layers
attend to stays as it is; everything else is trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_DIM = 64
HEADS = 4
KV_HEADS = 2
_WIDTH = HEADS * HEAD_DIM
ROPE_BASE = 1e12

_HALF = HEAD_DIM // 2
_THETA = ROPE_BASE ** (-torch.arange(_HALF, dtype=torch.float64) / _HALF)  # radians a token, [d/2]
_SLOW = 12  # rotations from this one on turn by half a radian at most over the whole context
_SHARED = _HALF - 1  # the slowest pair: what the queries' shared component and the counts of words use
_TOPIC, _TOKEN = 26, 12  # channels that compare topics, and tokens
_COPIED = 20  # further channels of a token that heads copy
_CONSTANT = 4.0  # every embedding's first channel: a direction on which positions alone can be compared
_NORM = 10.0  # of every embedding beside it
_FIRST = math.hypot(_NORM, _CONSTANT)
_PLAIN = 0.15  # share of a plain word in the channels that compare, beside a name's 1
_NAME = 2.0  # a name's component along the direction that all names share
_CONFIDENCE = 0.2  # scale of the output embeddings where they read what was found
_SHARED_SIZE = 24.0  # of the component that all queries share
_SALIENCE = 2.0  # logit that names get from every query of a retrieving head
_KEY = 5.0  # size of the channels by which keys tell their positions
_SECOND_NORM, _LATER_NORM = 1.15, 1.1
"""What the norms of the second layer and of later ones multiply with, about; a name's neighbours a little less."""

# Logits, at the start, by rotation: a head that looks `shift` tokens back adds weight * cos((distance - shift) theta).
_EXACT = dict(enumerate((37.0, 8.0, 6.5, 6.3, 6.1, 6.6, 3.1, 3.8, 3.7, 4.3, 4.0)))  # no other distance comes near
_RECENT = {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 6.0, **dict.fromkeys(range(6, 12), 7.0)}  # falls about as a logarithm
_WINDOW = {3: 8.0, **dict.fromkeys(range(4, 12), 10.0)}  # about flat for ten tokens
_NEARBY = dict.fromkeys(range(2, 12), 1.0)
_AGAIN = {3: 3.0, **dict.fromkeys(range(4, 12), 4.5)}


def demo_config(vocabulary: int, length: int, *, layers: int = 4) -> LlamaConfig:
    """Return the Llama configuration of a demo model: four heads of 64 channels, two KV heads.

    The RoPE base is large, so that more than half of the channels turn by half a radian at most over the whole context
    and can compare contents at any distance.
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


@dataclass(frozen=True)
class Directions:
    """Orthonormal directions of the residual stream, rows [n, width]: what each layer finds where."""

    topic: Tensor  # a token's own, compared when names are looked for [26, width]
    token: Tensor  # a token's own, compared when tokens are looked for [12, width]
    rest: Tensor  # a token's own, the first 26 of which are copied
    name: Tensor  # common to names [1, width]
    first: Tensor  # bos [1, width]
    count: Tensor  # how often the token has occurred [1, width]
    before: Tensor  # token and copied rest of the token before [32, width]
    last_name: Tensor  # topic channels of the last name [26, width]
    said_of: Tensor  # the same, of the token before
    names: Tensor  # mean of the topic channels of the last names
    found: Tensor  # what later heads copy; the output embeddings read it [58, width]

    @classmethod
    def drawn(cls, width: int) -> "Directions":
        """Return random directions; the constant channel, 0, is in none of them."""
        basis = torch.zeros(width - 1, width)
        basis[:, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1))[0]
        copied = _TOKEN + _COPIED
        sizes = [_TOPIC, _TOKEN, 1, 1, 1, copied, _TOPIC, _TOPIC, _TOPIC, _TOPIC + copied]
        topic, token, name, first, count, before, last, said_of, names, found, rest = basis.split(
            [*sizes, width - 1 - sum(sizes)]
        )
        return cls(topic, token, rest, name, first, count, before, last, said_of, names, found)

    @property
    def copied(self) -> Tensor:
        """What heads copy of a token itself [d, width]."""
        return torch.cat([self.topic, self.token, self.rest[:_COPIED]])


class _Group:
    """Writes the projections of the query heads that share one KV head.

    Logits are given for components of 1 behind the layer's norm and the constant channel as `constant` there.
    """

    def __init__(self, attention: torch.nn.Module, kv_head: int, constant: float):
        size = HEADS // KV_HEADS
        rows = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
        both = slice(size * rows.start, size * rows.stop)
        self._q = attention.q_proj.weight[both].view(size, HEAD_DIM, -1)  # [group, d, width]
        self._k, self._v = attention.k_proj.weight[rows], attention.v_proj.weight[rows]  # [d, width]
        self._o = attention.o_proj.weight[:, both].view(-1, size, HEAD_DIM)  # [width, group, d]
        self._constant = constant
        for weight in (self._q, self._k, self._v):
            weight.zero_()

    def look_back(self, head: int, weights: Mapping[int, float], shift: int = 0) -> None:
        """Add sum_i weights[i] cos((distance - shift) theta_i) to the logits of one head."""
        for i in range(_SLOW):
            self._k[i, 0] = _KEY / self._constant
        for i, weight in weights.items():
            size, angle = weight * math.sqrt(HEAD_DIM) / _KEY / self._constant, -shift * float(_THETA[i])
            self._q[head, i, 0], self._q[head, _HALF + i, 0] = size * math.cos(angle), size * math.sin(angle)

    def compare(self, asked: Tensor, held: Tensor, logit: float, start: int = 0) -> None:
        """Add `logit` where all of the query's `asked` agree with the key's `held` [n, width]."""
        channels = slow_channels()[start : start + len(asked)]
        scale = math.sqrt(abs(logit) * math.sqrt(HEAD_DIM) / len(asked))
        self._q[:, channels] = math.copysign(scale, logit) * asked
        self._k[channels] = scale * held

    def share(self, component: float = _SHARED_SIZE, channel: int = _SHARED, head: int | slice = slice(None)) -> None:
        """Give all queries, or those of one head, a constant component on a channel that does not turn."""
        self._q[head, channel, 0] = component / self._constant

    def favour(self, direction: Tensor, logit: float, channel: int = _SHARED) -> None:
        """Give keys a part by what they have along `direction` [1, width]: `logit` for queries that share the usual."""
        self._k[channel] += direction[0] * logit * math.sqrt(HEAD_DIM) / _SHARED_SIZE

    def copy(self, read: Tensor, written: Tensor, scale: float, head: int | slice = slice(None)) -> None:
        """Write what is attended to along `read` [n, width] into `written`."""
        self._v[: len(read)] = read
        self._o[:, head, : len(read)] = scale * (written.T if isinstance(head, int) else written.T[:, None])


def slow_channels() -> Tensor:
    """Return the channels of a head that can compare contents at any distance, without the pair that is shared."""
    pairs = torch.arange(_SLOW, _SHARED)
    return torch.cat([pairs, pairs + _HALF])


@torch.no_grad()
def initialise(model: LlamaForCausalLM, names: Sequence[int], telling: Sequence[int]) -> None:
    """Set embeddings and heads as the module says.

    Args:
        model: with the configuration of `demo_config`.
        names: ids of names.
        telling: ids of further tokens that carry or announce information.
    """
    embeddings = model.model.embed_tokens.weight  # [vocabulary, width]
    at = Directions.drawn(embeddings.shape[1])
    _embed(embeddings, at, names, telling, model.config.bos_token_id)
    model.lm_head.weight.add_(_CONFIDENCE * embeddings @ at.copied.T @ at.found)
    layers = [layer.self_attn for layer in model.model.layers]
    for start, attention in zip((_look_around, _pass_on, _retrieve, _choose), layers, strict=False):
        start(attention, at)
    for attention in layers[:2]:
        # What these heads attend to stays: left to training they drift off the tokens that later layers count on.
        attention.q_proj.weight.requires_grad_(False)
        attention.k_proj.weight.requires_grad_(False)


def _embed(embeddings: Tensor, at: Directions, names: Sequence[int], telling: Sequence[int], first: int) -> None:
    """Set the embeddings [vocabulary, width]; all have the same norm, so that no norm behind them differs."""
    count = len(embeddings)
    compared = torch.full((count, 1), _PLAIN)
    compared[[*names, *telling]] = 1.0
    topic, token = (F.normalize(torch.randn(count, n), dim=1) * n**0.5 * compared for n in (_TOPIC, _TOKEN))
    named = torch.zeros(count, 1)
    named[list(names)] = _NAME
    left = (_NORM**2 - topic.square().sum(1) - token.square().sum(1) - named[:, 0] ** 2).sqrt()
    rest = F.normalize(torch.randn(count, len(at.rest)), dim=1) * left[:, None]
    embeddings.copy_(topic @ at.topic + token @ at.token + named @ at.name + rest @ at.rest)
    embeddings[:, 0] = _CONSTANT
    embeddings[first] = _FIRST * at.first[0]  # without the constant channel: its key tells no position


def _look_around(attention: torch.nn.Module, at: Directions) -> None:
    shrink = math.sqrt(_WIDTH) / _FIRST  # by the norm, exactly
    shifting = _Group(attention, 0, shrink * _CONSTANT)
    shifting.look_back(0, _EXACT, 1)
    shifting.copy(torch.cat([at.token, at.rest[:_COPIED]]), at.before, 1 / shrink, 0)
    shifting.look_back(1, _EXACT, 2)
    naming = _Group(attention, 1, shrink * _CONSTANT)
    naming.share()
    naming.favour(at.name, 20.0 / (shrink * _NAME))
    naming.favour(at.first, 1.0 / math.sqrt(_WIDTH), _HALF + _SHARED)
    for head, (weights, written, threshold) in enumerate(((_RECENT, at.last_name, 7.0), (_WINDOW, at.names, 13.0))):
        naming.look_back(head, weights)
        naming.share(_SHARED_SIZE * (sum(weights.values()) + threshold), _HALF + _SHARED, head)
        naming.copy(at.topic, written, 1 / shrink, head)


def _pass_on(attention: torch.nn.Module, at: Directions) -> None:
    shrink = _SECOND_NORM
    passing = _Group(attention, 0, shrink * _CONSTANT)
    passing.share()
    passing.look_back(0, _EXACT, 1)
    passing.copy(at.last_name, at.said_of, 1 / shrink, 0)
    passing.look_back(1, _NEARBY)
    counting = _Group(attention, 1, shrink * _CONSTANT)
    own = torch.cat([at.topic, at.token])
    counting.share()
    counting.compare(own, own, 14.0 / shrink**2)
    counting.favour(at.first, 19.6 / math.sqrt(_WIDTH))
    counting.copy(at.name, at.count, 0.5 / (shrink * _NAME))


def _retrieve(attention: torch.nn.Module, at: Directions) -> None:
    shrink = _LATER_NORM
    following = _Group(attention, 0, shrink * _CONSTANT)
    following.share()
    following.compare(at.last_name, at.said_of, 18.0 / shrink**2)
    following.compare(at.token, at.before[:_TOKEN], 12.0 / shrink**2, _TOPIC)
    following.favour(at.first, 18.0 / math.sqrt(_WIDTH))
    following.favour(at.name, _SALIENCE / (shrink * _NAME))
    following.copy(at.copied, at.found, 0.6)
    listing = _Group(attention, 1, shrink * _CONSTANT)
    listing.share()
    listing.compare(at.last_name, at.said_of, 14.0 / shrink**2)
    for head in range(HEADS // KV_HEADS):
        listing.look_back(head, _NEARBY)
    listing.favour(at.name, 4.0 / (shrink * _NAME))
    listing.favour(at.first, (9.0 + sum(_NEARBY.values())) / math.sqrt(_WIDTH))
    listing.copy(at.copied, at.found, 0.2)


def _choose(attention: torch.nn.Module, at: Directions) -> None:
    shrink = _LATER_NORM
    frequent = _Group(attention, 0, shrink * _CONSTANT)
    frequent.share()
    frequent.compare(at.names, at.topic, -40.0 / shrink**2)
    frequent.favour(at.first, 15.0 / math.sqrt(_WIDTH))
    frequent.favour(at.count, 60.0 / shrink)
    frequent.copy(at.copied, at.found, 0.4)
    said = _Group(attention, 1, shrink * _CONSTANT)
    said.share()
    said.compare(at.last_name, at.said_of, 18.0 / shrink**2)
    said.compare(at.token, at.before[:_TOKEN], 12.0 / shrink**2, _TOPIC)
    for head in range(HEADS // KV_HEADS):
        said.look_back(head, _AGAIN)
    said.favour(at.first, (20.0 + sum(_AGAIN.values())) / math.sqrt(_WIDTH))
    said.copy(at.copied, at.found, -0.5)
