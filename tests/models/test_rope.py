import pytest
import torch
from families import (
    HEAD_DIM,
    VOCAB,
    tiny_model,
)
from rope_models import CONFIGS, SHORT, model_of
from transformers import AttentionInterface

from kvcli.kernels import _numba
from kvcli.models.geometry import attention_modules, rotates_by_length
from kvcli.models.layers import decoder_of
from kvcli.models.rope import Frequencies, Rope, RopeTable, installed


@pytest.fixture(params=["loops", "torch"])
def either_way(request, monkeypatch):
    """By loops for a CPU, however few numbers there are, or by the model's own function."""
    monkeypatch.setattr(_numba, "LEAST", 1 if request.param == "loops" else 1 << 40)


def layer_types(rotary):
    return list(rotary.rope_type) if isinstance(rotary.rope_type, dict) else [None]


def ask(rotary, positions, dtype, layer_type):
    x = torch.empty(1, 1, 1, dtype=dtype)
    return rotary(x, positions[None]) if layer_type is None else rotary(x, positions[None], layer_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_table_is_bit_identical_to_the_module(name, dtype):
    original = decoder_of(model_of(name)).rotary_emb
    for length in (37, 131):  # below and above SHORT
        table = RopeTable(Frequencies(original, length, torch.device("cpu")), dtype)
        for layer_type in layer_types(original):
            expected = ask(original, torch.arange(length), dtype, layer_type)
            found = ask(table, torch.arange(length), dtype, layer_type)
            for one, two in zip(found, expected, strict=True):
                assert one.dtype == two.dtype == dtype
                assert torch.equal(one, two)


def test_frequencies_that_depend_on_length_do_so():
    # Otherwise the test above would show nothing for these rules.
    for name in ("dynamic", "longrope"):
        original = decoder_of(model_of(name)).rotary_emb
        short, long = (RopeTable(Frequencies(original, n, torch.device("cpu")), torch.float32) for n in (37, 131))
        assert not torch.equal(short.cos_None[:37], long.cos_None[:37])


def test_what_the_module_saw_before_does_not_matter():
    original = decoder_of(model_of("dynamic")).rotary_emb
    before = RopeTable(Frequencies(original, 131, torch.device("cpu")), torch.float32)
    original(torch.empty(1, 1, 1), torch.arange(1000)[None])
    after = RopeTable(Frequencies(original, 131, torch.device("cpu")), torch.float32)
    assert torch.equal(before.cos_None, after.cos_None)


@pytest.mark.parametrize("length", [5, 8, 13])
def test_a_table_made_in_pieces_is_the_same(length, monkeypatch):
    original = decoder_of(model_of("longrope")).rotary_emb
    frequencies = Frequencies(original, length, torch.device("cpu"))
    whole = RopeTable(frequencies, torch.float32)
    monkeypatch.setattr("kvcli.models.rope._CHUNK", 4)
    pieces = RopeTable(frequencies, torch.float32)
    assert torch.equal(whole.cos_None, pieces.cos_None)
    assert torch.equal(whole.sin_None, pieces.sin_None)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_computes_the_same_with_the_table(name):
    model = model_of(name)
    n = 61
    ids = torch.randint(3, VOCAB, (2, n), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(n).repeat(2, 1)
    call = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    expected = model(**call).logits
    original = decoder_of(model).rotary_emb
    with installed(model, [n]):
        assert isinstance(decoder_of(model).rotary_emb, Rope)
        assert torch.equal(model(**call).logits, expected)
        assert not any("rotary" in key for key in model.state_dict())
    assert decoder_of(model).rotary_emb is original


def test_the_original_comes_back_after_an_error():
    model = tiny_model("gemma3")
    original = decoder_of(model).rotary_emb
    with pytest.raises(ZeroDivisionError), installed(model, [9]):
        1 / 0  # noqa: B018
    assert decoder_of(model).rotary_emb is original


def test_positions_beyond_the_table_are_an_error():
    model = tiny_model("llama")
    with installed(model, [9]), pytest.raises(IndexError):
        model(input_ids=torch.zeros(1, 10, dtype=torch.long), use_cache=False)


def captured(model, ids, positions):
    """Post-RoPE keys [Hk, n, d] of every layer, as the attention function gets them."""
    keys = {}

    def capture(module, query, key, value, *_, **__):
        keys[module.layer_idx] = key[0].clone()
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2), None

    AttentionInterface.register("capture_keys", capture)
    model.set_attn_implementation("capture_keys")
    model(input_ids=ids, position_ids=positions, use_cache=False)
    return [keys[index] for index in range(len(keys))]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", CONFIGS)
def test_keys_come_out_of_their_rotation_and_back(name):
    model = model_of(name)
    n = 61
    ids = torch.randint(3, VOCAB, (1, n), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(n)
    with installed(model, [2 * n]) as rope:
        rotary = rope.rotary(2 * n)
        real = captured(model, ids, positions[None])
        # Attention is replaced by each token's own value: hidden states know no positions, so keys can be compared.
        same = captured(model, ids, torch.zeros_like(positions)[None])
        moved = captured(model, ids, positions[None] + n)
        assert len(rotary) == len(real)
        for layer, (one, key) in enumerate(zip(rotary, real, strict=True)):
            if one is None:
                assert torch.equal(key, same[layer])
                continue
            bare = one.unrotate(key, positions)
            assert bare.dtype == torch.float32
            assert (one.rotate(bare, positions) - key).abs().max() < 1e-5
            # At position zero the model rotates by nothing and only scales.
            assert (one.rotate(bare, torch.zeros_like(positions)) - same[layer]).abs().max() < 1e-5
            # Moved to other positions, the key is what the model computes there.
            assert (one.rotate(bare, positions + n) - moved[layer]).abs().max() < 2e-5
            assert (key - moved[layer]).abs().max() > 1e-2


def test_layers_without_rotary_positions_have_none():
    with installed(model_of("smollm3"), [16]) as rope:
        rotary = rope.rotary(16)
        assert [one is None for one in rotary] == [False, True, False, True]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", ["llama", "glm4", "gpt_oss", "phi", "longrope"])
def test_positions_per_head(name):
    generator = torch.Generator().manual_seed(5)
    with installed(model_of(name), [97]) as rope:
        rotary = rope.rotary(97)
        x = torch.randn(3, 2, 7, HEAD_DIM, generator=generator)
        positions = torch.randint(0, 97, (3, 2, 7), generator=generator)
        together = rotary[0].rotate(x, positions)
        for i in range(3):
            for j in range(2):
                alone = rotary[0].rotate(x[i, j], positions[i, j])
                assert torch.equal(together[i, j], alone)
                assert (rotary[0].unrotate(alone, positions[i, j]) - x[i, j]).abs().max() < 1e-5
        shared = rotary[0].rotate(x, positions[0, 0])
        assert torch.equal(shared[2, 1], rotary[0].rotate(x[2, 1], positions[0, 0]))


@pytest.mark.usefixtures("either_way")
def test_attention_scaling_is_undone():
    with installed(model_of("longrope"), [97]) as rope:
        rotary = rope.rotary(97)
        assert rotary[0].attention_scaling > 1.1
        x = torch.randn(2, 9, HEAD_DIM)
        rotated = rotary[0].rotate(x, torch.arange(9))
        assert torch.allclose(rotated.norm(dim=-1), rotary[0].attention_scaling * x.norm(dim=-1), atol=1e-5)
        assert (rotary[0].unrotate(rotated, torch.arange(9)) - x).abs().max() < 1e-5


def test_bfloat16_keys_lose_no_more_than_their_rounding():
    model = model_of("llama").to(torch.bfloat16)
    with installed(model, [64]) as rope:
        rotary = rope.rotary(64)
        x = torch.randn(2, 33, HEAD_DIM).bfloat16()
        bare = rotary[0].unrotate(x, torch.arange(33))
        again = rotary[0].rotate(bare, torch.arange(33))
        assert (again - x.float()).abs().max() < 1e-5


@pytest.mark.usefixtures("either_way")
def test_rows_of_no_tokens_pass():
    with installed(model_of("llama"), [8]) as rope:
        rotary = rope.rotary(8)
        none = rotary[0].rotate(torch.empty(2, 0, HEAD_DIM), torch.empty(0, dtype=torch.long))
        assert none.shape == (2, 0, HEAD_DIM)


def test_modules_share_what_is_equal():
    model = model_of("gemma3")
    with installed(model, [8]) as rope:
        rotary = rope.rotary(8)
        assert rotary[0] is rotary[1] is rotary[2]
        assert rotary[3] is not rotary[0]
    assert len(attention_modules(model)) == len(rotary)


@pytest.mark.parametrize("name", ["llama", "longrope", "dynamic"])
def test_each_row_of_a_batch_has_the_frequencies_of_its_own_length(name):
    model = model_of(name)
    lengths = [20, 97, 31]
    positions = torch.tensor([[3, 19], [3, 96], [0, 30]])
    with installed(model, lengths) as rope:
        rope.use(lengths)
        together = rope(torch.empty(1), positions)
    for row, length in enumerate(lengths):
        with installed(model, [length]) as rope:
            alone = rope(torch.empty(1), positions[row : row + 1])
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[row : row + 1], part)


@pytest.mark.parametrize(("name", "tables"), [("llama", 1), ("longrope", 2), ("dynamic", 2)])
def test_sequences_of_the_same_frequencies_share_a_table(name, tables):
    with installed(model_of(name), [20, 31, 97]) as rope:
        assert len({id(table) for _, table in rope._of_length.values()}) == tables


@pytest.mark.parametrize("name", ["llama", "glm4", "phi", "longrope"])
def test_the_rotation_on_average_is_the_mean_of_rotations(name):
    x = torch.randn(2, 3, HEAD_DIM, generator=torch.Generator().manual_seed(6))
    with installed(model_of(name), [97, 140]) as rope:
        each = torch.stack([rope.rotary(140)[0].rotate(x, torch.full((3,), at)) for at in range(90, 130)])
        for length in (97, 140):  # of which positions may be beyond the end
            found = rope.rotary(length)[0].rotate_on_average(x, torch.arange(90, 130))
            assert torch.allclose(found, each.mean(0), atol=1e-5)


@pytest.mark.parametrize(("name", "lengths"), [("dynamic", (SHORT - 8, SHORT + 8)), ("longrope", (SHORT, SHORT + 1))])
def test_it_is_known_where_frequencies_follow_the_length(name, lengths):
    shorter, longer = lengths
    assert rotates_by_length(CONFIGS[name](), shorter, longer)
    assert not rotates_by_length(CONFIGS[name](), shorter - 8, SHORT)
    assert not rotates_by_length(CONFIGS["yarn"](), shorter, longer)
    model = model_of(name)
    with installed(model, [shorter, longer]) as rope:
        assert not rope.alike([shorter, longer])
