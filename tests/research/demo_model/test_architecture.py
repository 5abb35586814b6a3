"""What the heads of the demo model do before any training."""

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from kvcli.quality.tasks.phrases import NAMES, sentence

sys.path.append(str(Path(__file__).parents[3] / "research" / "demo_model"))

from architecture import demo_config, initialise
from behaviour import recorded_queries
from tokenizer import build_tokenizer, token_classes


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(1024)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(demo_config(len(tokenizer), 1024), attn_implementation="eager")
    initialise(model, *token_classes(tokenizer))
    return model.eval()


@pytest.fixture(scope="module")
def facts():
    rng = random.Random(0)
    return {name: f"{rng.randrange(10**9):09d}" for name in rng.sample(NAMES, 12)}


@pytest.fixture(scope="module")
def text(facts):
    rng = random.Random(1)
    told = [f"{sentence(rng)} {sentence(rng)} The access code of {name} is {code}." for name, code in facts.items()]
    return " ".join(told)


def read(model, tokenizer, text):
    """Return the ids of `text` and attention [layers, H, s, s]."""
    ids = tokenizer.encode(text)
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_attentions=True)
    return ids, torch.stack(output.attentions)[:, 0]


def test_all_embeddings_are_as_long_and_only_what_tells_something_is_compared(model, tokenizer):
    embeddings = model.get_input_embeddings().weight
    lengths = embeddings[3:].detach().norm(dim=1)
    assert float(lengths.max()) == pytest.approx(float(lengths.min()), rel=1e-4)
    keys = F.linear(embeddings, model.model.layers[1].self_attn.k_proj.weight[64:]).norm(dim=1)
    names, telling = token_classes(tokenizer)
    assert keys[names].min() > 3 * keys[tokenizer.convert_tokens_to_ids([" garden", " slowly"])].max()
    assert len({*names, *telling}) == len(names) + len(telling)


def test_heads_of_the_first_layer_look_one_and_two_tokens_back_and_at_the_last_name(model, tokenizer, text):
    ids, attention = read(model, tokenizer, text)
    for head, shift in enumerate((1, 2)):
        assert attention[0, head].diagonal(-shift)[5:].min() > 0.9
    names = set(token_classes(tokenizer)[0])
    for at in range(60, len(ids)):
        back = next((back for back in range(200) if ids[at - back] in names), 200)
        if back < 12:
            assert attention[0, 2, at, at - back] > 0.9
        if back > 40:
            assert attention[0, 2, at, 0] > 0.9


def test_what_follows_is_found_by_name_and_without_a_match_the_first_token_is_attended_to(
    model, tokenizer, text, facts
):
    for name, code in facts.items():
        ids, attention = read(model, tokenizer, f"{text} {name} is {code}")
        wanted = ids[-3:]
        at = next(i for i in range(len(ids)) if ids[i : i + 3] == wanted)
        assert attention[2, :2, -4, at].min() > 0.9
    assert attention[2, :2, 4:20, 0].min() > 0.9


def test_the_most_frequent_word_that_was_not_just_said_is_found(model, tokenizer):
    first, second, *others = random.Random(2).sample(NAMES, 12)
    words = [first] * 260 + [second] * 180 + others * 4
    random.Random(3).shuffle(words)
    between = " ".join(sentence(random.Random(seed)) for seed in range(3))
    asked = f"Here is a list of words: {' '.join(words)} {between} What are the most frequent words?"
    for said, wanted in ((second, first), (first, second)):
        ids, attention = read(model, tokenizer, f"{asked} {said}")
        (word,) = tokenizer.encode(f" {wanted}", add_special_tokens=False)
        assert attention[3, :2, -1, [i for i, token in enumerate(ids) if token == word]].sum(-1).min() > 0.5


def test_queries_of_neighbouring_tokens_are_alike(model, tokenizer, text):
    with recorded_queries(model) as queries:
        read(model, tokenizer, text)
    for layer in queries[1:]:
        similarity = F.cosine_similarity(layer[:, :, 1:], layer[:, :, :-1], dim=-1)
        assert similarity.mean() > 0.6


def test_what_the_first_two_layers_attend_to_is_not_trained(model):
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"}
