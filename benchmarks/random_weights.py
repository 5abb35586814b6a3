"""Models with random weights and made-up KV, as several benchmarks run them on a CPU."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from transformers import DeepseekV32Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcli.capacity.planning.probe import RandomKV, WordlessTokenizer
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import Model
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

CONFIG = LlamaConfig(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131_072,
)
INDEXED = DeepseekV32Config(  # the same sizes, with latents, and an index by which each layer selects 1,024 tokens
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    kv_lora_rank=256,
    q_lora_rank=256,
    qk_rope_head_dim=32,
    qk_nope_head_dim=64,
    v_head_dim=64,
    head_dim=32,
    index_n_heads=8,
    index_head_dim=64,
    index_topk=1024,
    first_k_dense_replace=8,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
)
FREEKV = resolve_profile("freekv", overrides={"budget": 1024, "sink": 128, "window": 128})
WARMUP = 2
SOFTMAX = Softmax((CONFIG.hidden_size // CONFIG.num_attention_heads) ** -0.5)


class NoSpecialTokens(WordlessTokenizer):
    """A tokenizer that spells nothing, for methods that look for heads by tokens drawn at random."""

    all_special_ids: tuple[int, ...] = ()
    bos_token_id = None

    def __len__(self) -> int:
        """Return as many tokens as the model has."""
        return CONFIG.vocab_size


class Run(NamedTuple):
    """What is timed beside transformers."""

    profile: Profile
    steady: bool = False


def model_of(module: PreTrainedModel) -> Model:
    """Give kvcli a model without a tokenizer; its tokens have no text."""
    geometry = geometry_of(module.config, module.dtype)
    return Model(module, NoSpecialTokens(), geometry, module.device, module.dtype, "made up", "dummy")  # type: ignore[arg-type]


def made_up_kv(context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [Hk, context, d] of every layer."""
    generator = torch.Generator().manual_seed(context)
    shape = (CONFIG.num_key_value_heads, context, CONFIG.hidden_size // CONFIG.num_attention_heads)
    return [tuple(torch.randn(shape, generator=generator) for _ in range(2)) for _ in range(CONFIG.num_hidden_layers)]


def kvcli_steps(
    run: Run, model: PreTrainedModel, kv: list | None, context: int, steps: int
) -> tuple[list[float], Counters]:
    """Step times of kvcli's loop with a method, in milliseconds, and its counters."""
    sequence = list(stepping(run, model, kv, context, steps))[-1]
    return sequence.decode_ms[WARMUP:], sequence.counters


@torch.inference_mode()
def stepping(
    run: Run, model: PreTrainedModel, kv: list | None, context: int, steps: int, timeline: Timeline | None = None
) -> Iterator[RunningSequence]:
    """Take a step of kvcli's loop with a method whenever the next item is asked for: the sequence.

    Without `kv`, the method is also shown queries of the prompt, which some choose by. The `timeline` shows phases.
    """
    sampling = Sampling(max_tokens=1 + steps + WARMUP, ignore_eos=True)
    with engine(model_of(model), [context + sampling.max_tokens]) as ready:
        method = ready.method(run.profile, ready.context(context, sampling.max_tokens, timeline=timeline))
        if kv is None:
            RandomKV(0, torch.device("cpu"), torch.float32).fill([method], ready.layers, context)
        for layer, (k, v) in enumerate(kv or ()):
            q = torch.randn(CONFIG.num_attention_heads, method.query_rows, k.shape[2]).to(k.dtype)
            method.prefill(layer, k, v, q, SOFTMAX)
        sampler = (lambda _: 1) if run.steady else None
        sequence = ready.sequence(method, sampling, sampler=sampler, first_token=1)
        for _ in ready.decode([sequence]):
            yield sequence


def step_when_asked(method: str, context: int, most: int) -> None:
    """Take as many steps as each line of standard input says, and print their times as JSON."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(CONFIG).eval()
    sequences = stepping(Run(resolve_profile(method)), module, None, context, most)
    for line in sys.stdin:
        sequence = list(islice(sequences, int(line)))[-1]
        print(json.dumps(sequence.decode_ms[-int(line) :]), flush=True)


if __name__ == "__main__":
    step_when_asked(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
