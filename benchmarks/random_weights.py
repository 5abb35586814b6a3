"""Models with random weights, made from a config, as kvcli runs them."""

from transformers import PreTrainedModel

from kvcli.capacity.planning.probe import WordlessTokenizer
from kvcli.models.geometry import geometry_of
from kvcli.models.loading import Model


def model_of(module: PreTrainedModel) -> Model:
    """Give kvcli a model without a tokenizer; its tokens have no text."""
    geometry = geometry_of(module.config, module.dtype)
    return Model(module, WordlessTokenizer(), geometry, module.device, module.dtype, "made up", "dummy")  # type: ignore[arg-type]
