"""Saved KV without a model: prompts of numbers, keys and values drawn from their place; and runs that save and load."""

import torch

from kvcli.generate import generate
from kvcli.inputs.options import KVOptions, Template
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.methods import get_method
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.manifest import Identity, PromptRead
from kvcli.runtime.saved.writer import KVWriter, Saving
from kvcli.telemetry.observer import Observer

HK, D, LAYERS = 2, 8, 3
IDENTITY = Identity(model="tiny", weights="aa", tokenizer="bb", rope="cc", dtype="float32")
ASKED = PromptRead(source="notes.txt", text="some text", question="why?")
TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 " * 6
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "rows": 24}
QUESTIONS = ("what is the number?", "who jumps?", "why, and over which dog of those that the text names?")


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


def run(
    path,
    questions=QUESTIONS,
    method="freekv",
    text=TEXT,
    observer=None,
    template=None,
    max_tokens=8,
    prefill="exact",
    **kv,
):
    known, wanted = get_method(method).Config.model_fields, {**SMALL, "prefill": prefill}
    profile = resolve_profile(method, overrides={key: value for key, value in wanted.items() if key in known})
    request = GenerationRequest(
        profile,
        tuple(Prompt("notes.txt", text, question) for question in questions),
        Sampling(max_tokens=max_tokens, ignore_eos=True),
        template or Template(),
        kv=KVOptions(**kv),
    )
    return generate(ModelSpec(path, device="cpu"), request, observer or Observer())


def tokens(report):
    return [sequence.token_ids for sequence in report.sequences]
