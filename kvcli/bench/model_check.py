"""What a model's layers are, and which of them retrieve, from its config alone: the findings of `kvcli doctor -m`."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvcli.bench.doctor import Check, CheckState
from kvcli.errors import KvcliError
from kvcli.kv.recurrent import PAGE, STATE_PAGES
from kvcli.models.devices import resolve_device
from kvcli.models.geometry import LayerGeometry, ModelGeometry
from kvcli.models.loading import ModelSpec, describe, form_in, locate, read_config, resolve_dtype
from kvcli.models.weights import WIDER, WeightForm
from kvcli.sizes import format_bytes


def examine_model(spec: ModelSpec) -> Iterator[Check]:
    """Say of a model whether kvcli runs it, and what each of its layers does; layers are counted from 0.

    Raises:
        KvcliError: nothing is called so, or its config is broken or out of reach (usage, runtime).
    """
    config, device = read_config(spec), resolve_device(spec.device)
    dtype, path = resolve_dtype(spec.dtype, config, device), locate(spec)
    form = form_in(config, spec.weights, device, path, dtype=spec.dtype)
    try:
        geometry = describe(config, dtype, form, path)
    except KvcliError as error:
        yield Check("model", CheckState.BROKEN, error.what, error.hint)
        return
    yield Check("model", CheckState.OK, f"{config.model_type}, {geometry.depth} layers: kvcli runs it")
    places = [place for place, layer in enumerate(geometry.decoder) if layer.attention]
    ways: dict[str, list[int]] = {}
    for place, layer in zip(places, geometry.layers, strict=True):
        ways.setdefault(_way(layer), []).append(place)
    for way, where in ways.items():
        yield Check(way, CheckState.OK, counted(where))
    if geometry.states:
        yield from _states(geometry)
    if rest := [place for place, layer in enumerate(geometry.decoder) if not layer.attention and not layer.state]:
        yield Check("keep nothing", CheckState.OK, counted(rest))
    growing = (layer for layer in geometry.layers if layer.window is None)
    token = sum(layer.token_size * dtype.itemsize for layer in growing)
    found = f"KV {format_bytes(token)} a token, weights {format_bytes(geometry.weight_bytes)}"
    yield Check("memory", CheckState.OK, found)
    if form is not None and form.label != "auto":
        yield _weights(form, geometry)


def _weights(form: WeightForm, geometry: ModelGeometry) -> Check:
    """Say how the weights are held, and what a machine lacks for it."""
    spared = f"; {len(geometry.spared)} linear layers are spared" if geometry.spared and not form.widened else ""
    found = f"{form.name}, {'in the files' if form.stored else 'on loading'}{spared}"
    try:
        form.require()
    except KvcliError as error:
        return Check("weights", CheckState.BROKEN, error.what, error.hint)
    if form.widened:
        return Check("weights", CheckState.NOTE, f"{found}; made wide here", WIDER)
    return Check("weights", CheckState.OK, found)


def _way(layer: LayerGeometry) -> str:
    if layer.window is None:
        return "retrieve" if layer.latent is None else "retrieve latents"
    return f"{'chunk' if layer.chunked else 'window'} of {layer.window:,}"


def _states(geometry: ModelGeometry) -> Iterator[Check]:
    """Say which layers keep a state of fixed size, and what follows from that."""
    places = [place for place, layer in enumerate(geometry.decoder) if layer.state]
    size = format_bytes(sum(state.nbytes for state in geometry.states))
    kept = f"each {PAGE * STATE_PAGES:,} tokens and near the end"
    if all(state.resumes for state in geometry.states):
        found = f"{counted(places)}; {size} a sequence. Saved KV and chats can be gone on from {kept}"
        yield Check("keep a state", CheckState.OK, found)
    else:
        found = f"{counted(places)}; {size} a sequence. A prompt's beginning is read at once by them, not by chunks"
        yield Check("keep a state", CheckState.NOTE, found, "long prompts take much memory, and turns of a chat long")


def counted(places: Sequence[int]) -> str:
    """Say which layers, and how many: "0-2, 4 (4 layers)"."""
    runs = [list(run) for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    spans = [f"{run[0][1]}" if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return f"{', '.join(spans)} ({len(places)} layer{'s' * (len(places) != 1)})"
