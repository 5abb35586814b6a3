"""Each answer is that of the method to the whole conversation, whatever was read before and by whom."""

import time
from functools import cache

import pytest
import torch

from kvcli.conformance.models import VOCAB, tiny_model
from kvcli.conformance.runs import in_memory, run
from kvcli.inputs.profiles import Profile
from kvcli.methods import get_method, method_names
from kvcli.runtime.conversation import Conversation, NewTurn
from kvcli.runtime.engine import Engine
from kvcli.runtime.retrieval_heads import HeadScores
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer

TOKENS = 6
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "prefill_window": 20, "rank": 12}
SMALL |= {"chunk": 4, "outliers": 2, "local": 1}
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)


class Notes(Observer):
    def __init__(self):
        self.notices, self.read = [], 0

    def stage(self, name, total=None):
        self.read += total or 0

    def notice(self, message):
        self.notices.append(message)


@pytest.fixture(scope="module")
def model():
    return in_memory(tiny_model("gemma2"))


def settings(name):
    return {key: value for key, value in SMALL.items() if key in get_method(name).Config.model_fields}


def profile(name):
    return Profile(name, name, "", "", get_method(name).Config(**settings(name)))


def some(seed, length):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model, name, ids):
    """What the method answers to a conversation that nobody has read before."""
    return ask(Conversation(model, Observer()), ids, name).token_ids


def ask(conversation, ids, name, **question):
    *_, (sequence, _) = conversation.answer(NewTurn(ids, **question), profile(name), SAMPLING)
    return sequence


# razor and duoattention look for retrieval heads with a tokenizer, which this model lacks.
OTHERS = {"infllm", "actqkv", "lm_infinite", "razor", "duoattention", "em_llm", "q_llm", "streaming"}
EXACT = [name for name in method_names() if name not in OTHERS]


def test_one_document_and_another_method_each_turn(model):
    """Every method answers as it does to the conversation alone, and none but those that say so read it again."""
    notes = Notes()
    conversation, ids = Conversation(model, notes), some(1, 100)
    conversation.read(ids, len(ids))
    for turn, name in enumerate(EXACT):
        ids = [*ids, *some(10 + turn, 7)]
        notes.notices.clear()
        sequence = ask(conversation, ids, name)
        assert sequence.token_ids == alone(model, name, ids), name
        again = any("again" in notice for notice in notes.notices)
        assert again == (name in ("expected_attention", "h2o", "infinigen"))
        assert sequence.kv.read_tokens + sequence.kv.shared_tokens == len(ids)
        assert again or sequence.kv.read_tokens < 7 + TOKENS + 2 * 32
        ids += sequence.token_ids


@pytest.mark.parametrize("name", ["infllm", "actqkv", "lm_infinite"])
def test_a_method_that_reads_by_windows_goes_on_in_its_own_cache(model, name):
    notes = Notes()
    conversation, ids = Conversation(model, notes), some(1, 100)
    first = ask(conversation, ids, name)
    assert first.token_ids == alone(model, name, ids)
    longer = [*ids, *first.token_ids, *some(2, 9)]
    second = ask(conversation, longer, name)
    assert second.kv.read_tokens == 10  # its last token had no KV yet
    assert len(second.token_ids) == TOKENS
    assert not notes.notices
    other = ask(conversation, [*longer[:110], *some(3, 5)], name)
    assert other.kv.read_tokens == 115
    assert "again" in notes.notices[-1]


@pytest.mark.parametrize("name", ["full", "quest", "infllm"])
def test_a_first_answer_is_that_of_a_prompt(model, name):
    (sequence,) = run(model.module, name, settings(name), [some(1, 100)], TOKENS)
    assert alone(model, name, some(1, 100)) == sequence.token_ids


def test_looking_for_retrieval_heads_does_not_count_as_reading(model, monkeypatch):
    found = HeadScores(*(torch.zeros(len(model.geometry.layers), model.geometry.layers[0].num_kv_heads) for _ in "ei"))

    @cache
    def look(_):
        time.sleep(2)
        return found

    monkeypatch.setattr(Engine, "_head_scores", look)
    sequence = ask(Conversation(model, Observer()), some(1, 40), "duoattention")
    assert sequence.prefill_ms < 2000
    assert look.cache_info().misses == 1


def test_a_conversation_that_was_rewritten_goes_on_from_what_is_the_same(model):
    conversation, ids = Conversation(model, Observer()), some(1, 100)
    first = ask(conversation, ids, "quest")
    rewritten = [*ids[:70], *some(5, 60)]
    second = ask(conversation, rewritten, "quest")
    assert (second.kv.shared_tokens, second.token_ids) == (64, alone(model, "quest", rewritten))
    assert ask(conversation, ids, "quest").token_ids == first.token_ids


def test_an_attempt_is_drawn_anew(model):
    conversation, ids = Conversation(model, Observer()), some(1, 40)
    drawn = Sampling(max_tokens=TOKENS, temperature=1.0, ignore_eos=True)

    def tokens(attempt):
        *_, (sequence, _) = conversation.answer(NewTurn(ids, attempt=attempt), profile("full"), drawn)
        return sequence.token_ids

    assert tokens(0) == tokens(0) != tokens(1)


def test_an_answer_that_is_given_up_leaves_the_conversation_whole(model):
    conversation, ids = Conversation(model, Observer()), some(1, 100)
    answer = conversation.answer(NewTurn(ids), profile("freekv"), SAMPLING)
    next(answer)
    answer.close()
    longer = [*ids, *some(2, 9)]
    assert ask(conversation, longer, "freekv").token_ids == alone(model, "freekv", longer)
