"""Drive one method object with made-up queries, keys and values, without a model."""

import torch
from engine import new_method

from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry

H, HK, D = 6, 2, 16
SOFTMAX = Softmax(D**-0.5)
CHUNK = 32  # tokens of the prompt that a method sees read together


def layers(count=2, window=None):
    return [LayerGeometry(index, H, HK, D, window, True) for index in range(count)]


def storage_bytes(tensors):
    """Bytes that tensors take together; views share theirs."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Stream:
    """Random KV and slowly turning queries: cosine of consecutive queries spreads around `turn`."""

    def __init__(self, prompt, steps, seed=0, turn=0.85):
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape):
            return torch.randn(*shape, generator=generator)

        self.prompt, self.steps = prompt, steps
        self.k, self.v = 2 * noise(HK, prompt + steps, D), noise(HK, prompt + steps, D)
        self.prompt_q = noise(H, prompt, D)  # the prompt's last queries; a method sees as many as it asks for
        self.q = [noise(H, D)]
        for _ in range(steps - 1):
            mix = turn + 0.3 * (torch.rand(H, 1, generator=generator) - 0.5)
            self.q.append(mix * self.q[-1] + (1 - mix.clamp(max=1) ** 2).sqrt() * noise(H, D))

    def run(self, name, settings, layer=1, **known):
        """Feed everything to one layer; yields (step, method, output [H, d]). `known` goes to `new_method`."""
        method = new_method(name, settings, layers(), self.prompt + self.steps, **known)
        k, v = self.k[:, : self.prompt].clone(), self.v[:, : self.prompt].clone()
        for start in range(0, self.prompt, CHUNK):
            stop = min(start + CHUNK, self.prompt)
            method.observe(layer, self.prompt_q[:, start:stop], k[:, :stop], SOFTMAX)
        method.prefill(layer, k, v, self.prompt_q[:, max(0, self.prompt - method.query_rows) :], SOFTMAX)
        for step in range(self.steps):
            at = self.prompt + step
            method.context.counters.next_step()
            yield step, method, method.attend(layer, self.q[step], self.k[:, at], self.v[:, at], SOFTMAX)


def by_token(x):
    return x.double().transpose(0, 1).tolist()  # [heads, n, d] -> [n][heads][d]


def close(out, expected):
    return torch.allclose(out.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-4)
