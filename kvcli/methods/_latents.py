"""Which methods can keep latents, that are key and value both (`kvcli.models.latent`)."""

from collections.abc import Sequence
from dataclasses import replace

from kvcli.errors import usage_error
from kvcli.kv.cache import Tiers
from kvcli.models.geometry import LayerGeometry


def tiers_for(layers: Sequence[LayerGeometry], tiers: Tiers, name: str, refused: str | None) -> Tiers:
    """Say in how many parts caches of these layers keep a token; `refused` is why method `name` keeps no latents.

    Raises:
        KvcliError: the layers have latents, which the method cannot keep (usage).
    """
    if layers[0].parts == tiers.parts:
        return tiers
    if refused is not None:
        raise usage_error(f"{name} keeps no latents: {refused}", "take another method, such as freekv")
    return replace(tiers, parts=layers[0].parts)
