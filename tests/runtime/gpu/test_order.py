"""What `races` has to find: steps whose streams do not wait for each other, or share what they may not."""

import gc
import re

import pytest
import torch
from races import Races
from stated import HK, D, H, prefilled

from kvcli.kernels import _triton
from kvcli.kernels.softmax import Softmax
from kvcli.runtime.gpu import layers
from kvcli.runtime.gpu.pipeline import SlotPipeline
from kvcli.runtime.gpu.recorder import CudaStreams

LENGTH, LAYERS, STEPS = 42, 2, 2  # the second step fills a page
PAGES = {"budget": 20, "sink": 4, "window": 4, "page_size": 4, "dense_layers": 0}
ALL_TURN, NONE_TURN = ("freekv", PAGES | {"tau": 1.0}), ("freekv", PAGES | {"tau": 0.0})  # but for the first step
SHADOW = ("shadowkv", {"budget": 20, "chunk": 4, "outliers": 2, "local": 1, "rank": 12, "plus": True})
QUEST, INFINIGEN = ("quest", PAGES), ("infinigen", {"budget": 20, "dense_layers": 0})
OFFLOAD = "offload", {}


def steps(method, monkeypatch, streams=CudaStreams, plant=lambda pipeline: None):
    """What the streams of some steps do out of order; queries, keys and values are the caller's again after each."""
    prepared = prefilled(*method, LENGTH, LAYERS)
    races, softmax = Races(monkeypatch), Softmax(D**-0.5)
    monkeypatch.setattr(_triton, "on_cpu", True)
    pipeline = SlotPipeline([prepared], [LENGTH], streams(torch.device("cpu")))
    pipeline.start()
    plant(pipeline)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), races:
        for _ in range(STEPS):
            pipeline.advance()
            for layer in range(LAYERS):
                q, k, v = (torch.randn(1, heads, 1, D, generator=generator) for heads in (H, HK, HK))
                if layer + 1 in pipeline.predicted:
                    pipeline.predict(layer + 1, q[:, :, 0], softmax.scale)
                pipeline(layer, q, k, v, softmax)
                gc.collect()  # what nobody holds any more is free at once
                for x in (q, k, v):
                    x.fill_(float("nan"))
            pipeline.settle()
    return races.found


@pytest.mark.parametrize("method", [ALL_TURN, NONE_TURN, OFFLOAD, SHADOW], ids=str)
def test_all_is_in_order(method, monkeypatch):
    """Of the other methods too: `test_every_method.py`."""
    assert steps(method, monkeypatch) == set()


class NobodyWaits(CudaStreams):
    def wait(self, point): ...


class NoEnd(CudaStreams):
    def join(self): ...


class EarlyRecall(CudaStreams):
    """The recall streams forget the first or the last point that they should wait for."""

    forgotten = 0

    def submit(self, name, work, after):
        if name.startswith("recall"):
            after = [point for index, point in enumerate(after) if index != self.forgotten]
            after = after or [(0 * self.mark()[0], self.joins)]
        return super().submit(name, work, after)


class EarlyAfterCorrection(EarlyRecall):
    forgotten = 1


def in_turn(*case):
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("method", "streams", "words"),
    [
        (ALL_TURN, NobodyWaits, [r"fill_ writes in main what \w+ reads in stream"]),
        (NONE_TURN, NoEnd, [r"writes in main what \w+ reads in stream"]),
        (NONE_TURN, EarlyRecall, [r"writes in stream \d what \w+ reads in main"]),
        (ALL_TURN, EarlyAfterCorrection, [r"reads in stream \d what \w+ writes in stream 1"]),
        (QUEST, EarlyRecall, [r"reads in stream \d what \w+ writes in main"]),
        in_turn(OFFLOAD, NobodyWaits, [r"reads in main what _bring_kernel writes in stream 1"]),
        (
            OFFLOAD,
            EarlyRecall,
            [
                r"_bring_kernel writes in stream 1 what \w+ reads in main",
                r"_bring_kernel reads in stream 1 what _store_kernel writes in main",
            ],
        ),
        (SHADOW, EarlyRecall, [r"_leaving_kernel writes in stream \d what \w+ reads in main"]),
        in_turn(SHADOW, NoEnd, [r"reads in main what _leaving_kernel writes in stream \d"]),
    ],
    ids=str,
)
def test_a_wait_that_is_missing_is_found(method, streams, words, monkeypatch):
    found = steps(method, monkeypatch, streams)
    for what in words:
        assert any(re.search(what, each) for each in found), what


def test_a_list_of_misses_that_layers_share_is_found(monkeypatch):
    def share(pipeline):
        first, *others = (layer.recalls for layer in pipeline.layers)
        for recalls in others:
            recalls.later = first.later

    found = steps(NONE_TURN, monkeypatch, plant=share)
    assert any(re.search(r"in stream 3 what \w+ writes in stream 2", each) for each in found)


def test_queries_that_are_not_copied_are_found(monkeypatch):
    decide = layers.Speculation.decide

    def keep(self, q, rows):
        decide(self, q, rows)
        self.query = q

    monkeypatch.setattr(layers.Speculation, "decide", keep)
    found = steps(NONE_TURN, monkeypatch)
    assert any(re.search(r"fill_ writes in main what \w+ reads in stream", each) for each in found)


def test_a_choice_ahead_whose_queries_are_let_go_is_found(monkeypatch):
    kept = layers.Ahead
    monkeypatch.setattr(layers, "Ahead", lambda q, done: kept(None, done))
    found = steps(INFINIGEN, monkeypatch)
    assert any(each.startswith("freed in main while") for each in found)
