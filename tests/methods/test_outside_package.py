"""A method in a package of its own, as CONTRIBUTING.md says: one file, one entry point, then the conformance suite."""

import os
import subprocess
import sys

METHOD = '''
"""Pages chosen at random, to see what a selection is worth."""

import torch
from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import Method
from kvcli.methods.config import PagedConfig
from kvcli.models.geometry import LayerGeometry
from kvcli.store.resident_pages import ResidentPageCache


class RandomPages(Method[PagedConfig, ResidentPageCache]):
    """Selects pages by a number drawn for each step."""

    Config = PagedConfig
    title = "pages chosen at random"
    paper = "none"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(L)"

    def new_cache(self, layer: LayerGeometry) -> ResidentPageCache:
        """Keep everything on the device."""
        shape = (layer.num_kv_heads, layer.head_dim, self.context.capacity)
        return ResidentPageCache(*shape, self.config.pages, self.context.tiers)

    def retrieve(self, layer: int, cache: ResidentPageCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Draw pages, then attend to them."""
        if not cache.active:
            return super().retrieve(layer, cache, q, softmax)
        candidates, generator = cache.candidates, torch.Generator().manual_seed(cache.length)
        drawn = torch.rand(len(cache.k), len(candidates), generator=generator).to(q.device)
        selected = drawn.topk(cache.budget.selected).indices + candidates.start  # [Hk, k]
        self.count_selected(layer, selected)
        with self.span("attention", layer):
            return cache.attend_pages(q, selected, softmax)
'''


def test_a_method_of_another_package_is_listed_generates_and_passes_the_conformance_suite(tmp_path):
    site = tmp_path / "site"
    info = site / "random_pages-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "random_pages.py").write_text(METHOD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: random-pages\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvcli.methods]\nrandom_pages = random_pages:RandomPages\n")
    (tmp_path / "document.txt").write_text("The code word of the archive is 4711. " * 60)
    env = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}

    def ran(*command):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "pages chosen at random" in ran("kvcli", "methods")
    settings = ["--budget", 128, "--sink", 32, "--window", 32, "--page-size", 16, "--max-tokens", 4, "--json"]
    out = ran("kvcli", "generate", "document.txt", "--method", "random_pages", *settings)
    assert '"random_pages"' in out
    suite = ran(
        "pytest",
        "-n",
        0,
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "kvcli.conformance",
        "-k",
        "random_pages and not family and llama",
    )
    assert "passed" in suite
