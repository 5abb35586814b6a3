"""Random models: the right shapes with random weights, to measure time and memory without a checkpoint."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.models.auto import model_class
from kvcli.models.devices import Place, Placement, all_of
from kvcli.models.place import bundled_model
from kvcli.models.weights import WeightForm, quantise

_SEED = 0


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype, where: Place, form: WeightForm | None = None
) -> PreTrainedModel:
    """Make the model of `config` on one device or several, drawing each weight once as its architecture initialises it.

    The whole model exists in `dtype` before it is brought into a `form`. The same config, dtype and devices give the
    same weights; the global random state is left as it was.
    """
    devices = all_of(where)
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        torch.manual_seed(_SEED)
        # Otherwise torch draws every weight first, and transformers draws it again.
        with no_init_weights(), devices[0] if len(devices) == 1 else torch.device("meta"):
            model: PreTrainedModel = model_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
        if isinstance(where, Placement) and len(devices) > 1:
            allocate(model, where)
        model.init_weights()  # type: ignore[no-untyped-call]
    if form is not None:
        quantise(model, form, dtype)
    return model


def allocate(model: PreTrainedModel, where: Placement) -> None:
    """Allocate uninitialised memory for a model on the meta device, each part where it is to lie."""
    for name, device in where.modules.items():
        model.get_submodule(name).to_empty(device=device)
    for module in model.modules():  # rotary frequencies, which `init_weights` computes
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=where.first)
    model.tie_weights()


def fallback_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose ids fit a vocabulary of `vocab_size`: the demo model's if possible, else bytes."""
    try:
        demo: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(bundled_model(), local_files_only=True)
        if len(demo) <= vocab_size:
            return demo
    except (KvcliError, OSError, ValueError):
        pass  # an installation without the demo model can still measure
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if len(alphabet) > vocab_size:
        raise KvcliError(
            f"a vocabulary of {vocab_size} is too small for any tokenizer",
            f"a dummy model needs vocab_size {len(alphabet)} or more",
            ExitCode.USAGE,
        )
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )
