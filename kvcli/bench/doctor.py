"""Checks of this machine, with a remedy for each problem, and checks of a model by its config alone.

A check that raises an exception is reported as a finding, too. No check changes anything.
"""

import os
import platform
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from transformers import PreTrainedConfig

from kvcli.capacity import cgroup, memory
from kvcli.capacity.roofline import measure_rates, rate_rows
from kvcli.capacity.smaller import in_words, smaller_forms, that_fit
from kvcli.compat import onednn_suits
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import reference_profile, resolve_profile
from kvcli.kernels._numba import compiling, kept_in
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight, gated_with, packed_linear, products_with
from kvcli.kernels.page_scores import page_summary, page_summary_ref
from kvcli.kv.recurrent import PAGE, STATE_PAGES
from kvcli.memory.pinned import not_at_host_address, reads_host_addresses
from kvcli.methods import get_method, own_method_names
from kvcli.models.checkpoint import check_config, check_files
from kvcli.models.devices import Placement, placed, resolve_device, resolve_devices
from kvcli.models.geometry import LayerGeometry, ModelGeometry
from kvcli.models.loading import ModelSpec, describe, form_in, locate, read_config, resolve_dtype
from kvcli.models.place import bundled_model
from kvcli.models.weights import ON_LOADING, WIDER, WeightForm, installed
from kvcli.sizes import format_bytes
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import processor

_ROOM = 20 << 30  # bytes of disk: the weights of an 8B model in 16 bits, and some more
_WARM_TOKENS = 4096  # beyond every method's budget
_PROMPT = 4096  # tokens, with which a model has to fit into memory
_PINNED = 64 << 20  # bytes that the check of pinned memory pins


class CheckState(StrEnum):
    """The outcome of a check: a `NOTE` costs speed or a feature, `BROKEN` prevents runs."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """The finding of one check, and what to do about it (`fix`) if its state is not `OK`."""

    name: str
    state: CheckState
    found: str
    fix: str = ""


def examine(debug: bool = False) -> Iterator[Check]:
    """Run all checks, one after another; those that measure take a second or two.

    With `debug` the traceback of a check that raises an exception goes to stderr.
    """
    for name, check in _CHECKS.items():
        try:
            yield Check(name, *check())
        except KvcliError as error:
            yield Check(name, CheckState.BROKEN, error.what, error.hint)
        except Exception as error:
            if debug:
                traceback.print_exc()
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Check(name, CheckState.BROKEN, message, _FIXES.get(name, "run again with --debug"))


def warm(observer: Observer) -> Check:
    """Compile the loops of methods and of packed weights for this processor, where they are not kept already.

    The demo model takes a step under every method, as `kvcli profile` does it, but for those that would first look for
    retrieval heads. A model of another shape may need further loops, which its first run compiles.
    """
    from kvcli.bench.profiler import ProfileRequest, profile
    from kvcli.bench.runs import Entry

    if find_spec("numba") is None:
        return Check(
            "loops",
            CheckState.NOTE,
            "numba is not installed: torch's slower functions run instead",
            "pip install numba",
        )
    before, started = compiling.seconds, time.perf_counter()
    profiles = map(resolve_profile, own_method_names())
    quick = (each for each in profiles if not get_method(each.method).needs(each.settings))  # no search for heads
    compared = tuple(Entry(each.name, "method", each) for each in quick)
    model = ModelSpec(device="cpu", dtype="float32")
    profile(ProfileRequest(model, compared, contexts=(_WARM_TOKENS,), steps=1, repeat=1, warmup=1), observer)
    for packing in PACKINGS.values():
        weight = PackedWeight(torch.zeros(256, packing.row_bytes(512), dtype=torch.uint8), packing, torch.float32)
        x = torch.zeros(1, 512)
        packed_linear(x, weight)
        products_with([weight])(x)
        gated_with(weight, weight)(x)
    compiled, taken = compiling.seconds - before, time.perf_counter() - started
    found = f"compiled in {compiled:.0f} of {taken:.0f} s" if compiled else "cached by an earlier run"
    return Check("loops", CheckState.OK, f"{found}, in {kept_in() or 'this process alone'}")


def usable(checks: list[Check]) -> bool:
    """Tell whether everything necessary works."""
    return all(check.state is not CheckState.BROKEN for check in checks)


def lacks_memory(checks: list[Check]) -> bool:
    """Tell whether memory is all that a model lacks here."""
    return [check.name for check in checks if check.state is CheckState.BROKEN] == ["memory"]


Finding = tuple[CheckState, str] | tuple[CheckState, str, str]


def _versions() -> Finding:
    names = ("kvcli", "torch", "transformers", "triton", "numba")
    found = ", ".join(f"{name} {metadata.version(name)}" for name in names if installed(name))
    return CheckState.OK, f"Python {platform.python_version()}, {found}"


def _requirements() -> Finding:
    wanted = [Requirement(text) for text in metadata.requires("kvcli") or ()]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    missing = [each for each in wanted if not installed(each.name)]
    unmet = [
        f"{each.name} {metadata.version(each.name)} is not {each.specifier}"
        for each in wanted
        if each not in missing and not each.specifier.contains(metadata.version(each.name), prereleases=True)
    ]
    problems = [f"{each.name} is missing" for each in missing] + unmet
    if problems:
        return CheckState.BROKEN, "; ".join(problems), "install kvcli again in a new environment"
    return CheckState.OK, f"all {len(wanted)} are installed in suitable versions"


def _device() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if len(names) == 1:
            return CheckState.OK, names[0]
        found = f"{len(names)} GPUs ({', '.join(names)}): a run uses {_where()}, or all if its weights do not fit"
        return (
            CheckState.NOTE,
            found,
            "choose with --device, as in --device cuda:1; cuda:0,cuda:1 splits the layers over both",
        )
    name = processor()
    if torch.version.cuda is None:
        return (
            CheckState.NOTE,
            f"CPU only ({name}): this torch has no CUDA",
            "to use a GPU, install a torch built for CUDA",
        )
    fix = "check that nvidia-smi shows a GPU and that its driver is new enough for this torch"
    return CheckState.NOTE, f"CPU only ({name}): torch is built for CUDA {torch.version.cuda} and sees no GPU", fix


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"host {format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found += f", device {format_bytes(free)} free of {format_bytes(total)}"
    limit = cgroup.memory_limit()
    if limit is not None and limit < memory.total:
        fix = "raise the memory limit of the container: the KV cache is in host memory"
        return CheckState.NOTE, f"{found}, but this process may use {format_bytes(limit)}", fix
    return CheckState.OK, found


def _bandwidth() -> Finding:
    device = _where()
    rates = measure_rates(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    found = ", ".join(f"{label} {value}" for label, value in rate_rows(rates.as_dict()))
    spread = (rates.copy.most - rates.copy.least) / rates.copy.median
    if spread > 0.5:
        return (
            CheckState.NOTE,
            f"{found}; memory copy varies by {spread:.0%}",
            "stop other programs before you measure: timings are not reliable now",
        )
    return CheckState.OK, found


def _pinned() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {format_bytes(soft)}"
    if not torch.cuda.is_available():
        return CheckState.OK, f"not needed without a GPU (ulimit -l: {limit})"
    if not reads_host_addresses(_where()):
        raise not_at_host_address(_where())
    torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
    return CheckState.OK, f"{format_bytes(_PINNED)} could be pinned (ulimit -l: {limit})"


def _triton() -> Finding:
    import triton

    if not torch.cuda.is_available():
        return CheckState.OK, f"Triton {triton.__version__} can be imported; there is no GPU to compile for"
    keys = torch.arange(256, device="cuda", dtype=torch.float32).view(1, 4, 4, 16)
    if not torch.equal(page_summary(keys), page_summary_ref(keys)):
        return (
            CheckState.BROKEN,
            "Triton compiles, but its results are wrong",
            "update the driver, or torch and triton together",
        )
    return CheckState.OK, f"Triton {triton.__version__} compiles"


def _graphs() -> Finding:
    if not torch.cuda.is_available():
        return CheckState.OK, "not needed without a GPU"
    x, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = 2 * x
    graph.replay()
    if float(y.sum()) != 2048:
        return CheckState.BROKEN, "a captured graph gives wrong results", "update the driver"
    return CheckState.OK, "a graph can be captured and replayed"


def _weights() -> Finding:
    ways = {f"{weights} ({' and '.join(how.packages)})": how for weights, how in ON_LOADING.items()}
    here = [name for name, how in ways.items() if how.made is not None]
    if len(here) == len(ways):
        return CheckState.OK, f"--weights supports {', '.join(here)}"
    missing = ", ".join(name for name in ways if name not in here)
    found = f"--weights supports {', '.join(here) or 'only auto'}; not installed: {missing}"
    return CheckState.NOTE, found, "pip install 'kvcli[weights]'"


def _threads() -> Finding:
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota()
    usable_cores = cores if quota is None else min(cores, max(1, round(quota)))
    setting = os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} threads on {usable_cores} cores (OMP_NUM_THREADS {setting or 'not set'})"
    if threads > usable_cores:
        return (
            CheckState.NOTE,
            f"{found}: more threads than cores slow each other down",
            f"set OMP_NUM_THREADS={usable_cores}",
        )
    if not torch.cuda.is_available() and not onednn_suits(torch.empty(0)):
        return CheckState.NOTE, f"{found}; torch has no oneDNN, decoding is slower", "install a torch built with oneDNN"
    if threads < usable_cores and not torch.cuda.is_available():
        return CheckState.NOTE, f"{found}: some are idle", f"set OMP_NUM_THREADS={usable_cores}"
    return CheckState.OK, found


def _demo() -> Finding:
    path = bundled_model()
    check_config(path)
    check_files(path)
    return CheckState.OK, "the bundled model is complete"


def _disk() -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{format_bytes(free)} free for checkpoints in {HF_HUB_CACHE}"
    if not os.access(place, os.W_OK):
        return CheckState.NOTE, f"{HF_HUB_CACHE} cannot be written to", "set HF_HOME to a writable directory"
    if free < _ROOM:
        return CheckState.NOTE, f"{found}: an 8B model takes 16 GB", "free some space, or set HF_HOME to a larger disk"
    return CheckState.OK, found


def _where() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


_CHECKS: dict[str, Callable[[], Finding]] = {
    "versions": _versions,
    "requirements": _requirements,
    "device": _device,
    "memory": _memory,
    "bandwidth": _bandwidth,
    "pinned memory": _pinned,
    "triton": _triton,
    "CUDA graphs": _graphs,
    "weights": _weights,
    "threads": _threads,
    "demo model": _demo,
    "disk": _disk,
}
_FIXES = {
    "pinned memory": "raise ulimit -l and the container's memory limit",
    "triton": "install triton in the version that torch requires, and a C compiler",
    "CUDA graphs": "update the driver; meanwhile use --device cpu",
    "bandwidth": "free some memory and run again",
}


def examine_model(spec: ModelSpec) -> Iterator[Check]:
    """Check whether kvcli runs a model, and what each of its layers does; layers are counted from 0.

    Raises:
        KvcliError: there is no such model, or its config is broken or out of reach (usage, runtime).
    """
    config, device = read_config(spec, header_only=True), resolve_device(spec.device)
    dtype, path = resolve_dtype(spec.dtype, config, device), locate(spec, header_only=True)
    form = form_in(config, spec.weights, device, path, dtype=spec.dtype)
    try:
        geometry = describe(config, dtype, form, path)
    except KvcliError as error:
        yield Check("model", CheckState.BROKEN, error.what, error.hint)
        return
    held = _memory_check(spec, config, dtype, geometry, path)
    runs = "kvcli runs it" if held.state is CheckState.OK else "kvcli runs such models, but not this one in this memory"
    yield Check("model", CheckState.OK, f"{config.model_type}, {geometry.depth} layers: {runs}")
    places = [place for place, layer in enumerate(geometry.decoder) for _ in layer.attention]
    ways: dict[str, list[int]] = {}
    for place, layer in zip(places, geometry.layers, strict=True):
        ways.setdefault(_way(layer), []).append(place)
    for way, where in ways.items():
        yield Check(way, CheckState.OK, layer_numbers(where))
    if geometry.states:
        yield from _states(geometry)
    for number, place in enumerate(places):
        if read := [at for at, each in enumerate(geometry.decoder) if each.reader and each.reader.layer == number]:
            yield Check(f"read the KV of {place}", CheckState.OK, layer_numbers(read))
    if rest := [place for place, layer in enumerate(geometry.decoder) if not layer.keeps and not layer.reader]:
        yield Check("keep nothing", CheckState.OK, layer_numbers(rest))
    yield held
    if form is not None and form.label != "auto":
        yield _weight_check(form, geometry)


def _memory_check(
    spec: ModelSpec, config: PreTrainedConfig, dtype: torch.dtype, geometry: ModelGeometry, path: Path | None
) -> Check:
    """Check whether this machine's memory holds a model with a prompt of `_PROMPT` tokens."""
    token = sum(layer.grows * dtype.itemsize for layer in geometry.layers)
    found = f"KV {format_bytes(token)} a token, weights {format_bytes(geometry.weight_bytes)}"
    devices = resolve_devices(spec.device)
    try:
        place = placed(spec.device, config, dtype, geometry, devices) or devices[0]
    except KvcliError as error:
        return Check("memory", CheckState.BROKEN, f"{found}; {error.what}", error.hint)
    free = memory.available(place)
    prompts = [min(_PROMPT, geometry.max_positions or _PROMPT)]

    def needed(dtype: torch.dtype, geometry: ModelGeometry) -> dict[str, int]:
        return memory.need(reference_profile(), geometry, dtype, prompts, 1, 1, device=place).on(place)

    wanted = needed(dtype, geometry)
    if memory.fits(wanted, free):
        return Check("memory", CheckState.OK, found)
    pool = next(name for name, size in wanted.items() if size > free[name])
    found += f"; with a prompt of {prompts[0]:,} tokens {format_bytes(wanted[pool])} of {pool} memory"
    forms = () if isinstance(place, Placement) else smaller_forms(config, dtype, geometry, path, place)
    options = that_fit(forms, lambda form: memory.fits(needed(form.dtype, form.geometry), free))
    fix = f"it fits with {in_words(options)}" if options else "take a smaller model, or a machine with more memory"
    return Check("memory", CheckState.BROKEN, f"{found}, {format_bytes(free[pool])} are free", fix)


def _weight_check(form: WeightForm, geometry: ModelGeometry) -> Check:
    """Describe how the weights are held, and what a machine lacks for that."""
    spared = f"; {len(geometry.spared)} linear layers stay unquantised" if geometry.spared and not form.widened else ""
    found = f"{form.name}, {'in the files' if form.stored else 'on loading'}{spared}"
    try:
        form.require()
    except KvcliError as error:
        return Check("weights", CheckState.BROKEN, error.what, error.hint)
    if form.widened:
        return Check("weights", CheckState.NOTE, f"{found}; unpacked on loading", WIDER)
    return Check("weights", CheckState.OK, found)


def _way(layer: LayerGeometry) -> str:
    if layer.selects is not None:
        shared = "" if layer.selects.channels or layer.near else ", as the layer before"
        return f"native selection, {layer.selects.name}{shared}"
    if layer.window is None:
        return "retrieve" if layer.latent is None else "retrieve latents"
    return f"{'chunk' if layer.chunked else 'window'} of {layer.window:,}"


def _states(geometry: ModelGeometry) -> Iterator[Check]:
    """Describe which layers keep a state of fixed size, and the consequences."""
    places = [place for place, layer in enumerate(geometry.decoder) if layer.state]
    size = format_bytes(sum(state.nbytes for state in geometry.states))
    kept = f"every {PAGE * STATE_PAGES:,} tokens and near the end"
    if all(state.resumes for state in geometry.states):
        found = f"{layer_numbers(places)}; {size} per sequence. Saved KV and chats can continue {kept}"
        yield Check("keep a state", CheckState.OK, found)
    else:
        found = (
            f"{layer_numbers(places)}; {size} per sequence. "
            "They prefill a prompt's beginning in one piece, not in chunks"
        )
        yield Check(
            "keep a state", CheckState.NOTE, found, "long prompts need much memory, and turns of a chat much time"
        )


def layer_numbers(places: Sequence[int]) -> str:
    """List layers, and how many there are: "0-2, 4 (4 layers)"."""
    runs = [list(run) for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    spans = [f"{run[0][1]}" if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return f"{', '.join(spans)} ({len(places)} layer{'s' * (len(places) != 1)})"
