"""Saved KV without a model: prompts of numbers, keys and values drawn from their place."""

import torch

from kvcli.runtime.saved.manifest import Identity, PromptRead
from kvcli.runtime.saved.writer import KVWriter, Saving

HK, D, LAYERS = 2, 8, 3
IDENTITY = Identity(model="tiny", weights="aa", tokenizer="bb", rope="cc", dtype="float32")
ASKED = PromptRead(source="notes.txt", text="some text", question="why?")


def layer_kv(layer, tokens):
    """Keys and values [Hk, tokens, d] of a layer, the same for a token whatever comes after it."""
    return torch.randn(tokens, 2, HK, D, generator=torch.Generator().manual_seed(layer)).permute(1, 2, 0, 3).unbind()


def save(ids, parent_folder, target, first=0, parent=IDENTITY.root, identity=IDENTITY, layers=LAYERS):
    """Save a prompt's pages from page `first` on; returns the writer."""
    writer = KVWriter(Saving(ids, identity, ASKED, first, parent), parent_folder, target)
    for layer in range(layers):
        k, v = layer_kv(layer, len(ids))
        writer.prefill(layer, k, v, k[:, :0], None)
    writer.finish()
    return writer


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
