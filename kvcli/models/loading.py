"""Load a checkpoint, or create one from its shape, with its tokenizer and its geometry.

Nothing is ever silently random: a weight that the files lack is an error, and random weights need
`load_format="dummy"`.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.kernels.packed_linear import PackedWeight
from kvcli.models.auto import model_class
from kvcli.models.checkpoint import (
    StoredTensor,
    check_config,
    check_files,
    check_pointer,
    check_safetensors,
    explain,
    is_panic,
    notices,
    quiet,
    stored_parts,
    stored_tensors,
)
from kvcli.models.devices import Place, Placement, device_map, placed, resolve_devices, take_hooks_out
from kvcli.models.dummy import fallback_tokenizer, random_model
from kvcli.models.geometry import ModelGeometry, build_on_meta, geometry_of, geometry_of_model
from kvcli.models.gguf import config_of, empty_model, from_hub, load_gguf, tensor_kinds, tie_head, tokenizer_of
from kvcli.models.place import bundled_model, find, gguf_parts
from kvcli.models.streamed import FilePart, Layout, Source, WeightsOn, WeightStreaming, check_place
from kvcli.models.weights import (
    WIDER,
    HalfForm,
    PackedForm,
    WeightForm,
    Weights,
    form_of,
    have_dtype,
    have_plain_latents,
    settle,
)

# Fingerprints tell models apart by their files, without reading gigabytes.

_SAMPLE = 1 << 20  # bytes read at the start, in the middle and at the end of every file of weights
_SUFFIXES = (".safetensors", ".bin")
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hash config, quantisation on loading, and name, size and three samples of each weight file into 12 hex digits.

    Retraining a model changes all of its weights, so samples suffice. Dummy weights are told apart by their shape
    alone.
    """
    digest = hashlib.sha256(_config(checkpoint.config.to_dict()).encode())
    if checkpoint.spec.weights != "auto":
        digest.update(checkpoint.spec.weights.encode())
    for path in [] if checkpoint.spec.dummy else _weight_files(checkpoint):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:12]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the behaviour of a tokenizer, its chat template included, into twelve hexadecimal digits."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(json.dumps([rules, tokenizer.chat_template]).encode()).hexdigest()[:12]


def text_fingerprint(checkpoint: Checkpoint) -> str:
    """Hash what turns texts into tokens and ends them: the tokenizer, its template, and the end tokens of the model."""
    path, ends = checkpoint.path, None
    if path is not None and (file := path / "generation_config.json").is_file():
        ends = json.loads(file.read_text("utf-8")).get("eos_token_id")
    return hashlib.sha256(json.dumps([tokenizer_fingerprint(checkpoint.tokenizer), ends]).encode()).hexdigest()[:12]


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    path = checkpoint.path
    if _is_gguf(path):
        return gguf_parts(path)
    if path is None:
        config = cached_file(str(checkpoint.spec.name), "config.json", local_files_only=True)
        folder = None if config is None else Path(config).parent
    else:
        folder = path if path.is_dir() else path.parent
    return [] if folder is None else sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)


def _repetition_penalty(checkpoint: Checkpoint) -> float | None:
    """Return the repetition penalty that a checkpoint's generation_config.json asks for, if any."""
    spec, path = checkpoint.spec, checkpoint.path
    try:
        with quiet():
            found = GenerationConfig.from_pretrained(_target(spec, path), local_files_only=_local(spec, path))
    except (OSError, ValueError):  # none, or one that loading the model will refuse
        return None
    penalty: float | None = found.repetition_penalty
    return penalty


def _is_gguf(path: Path | None) -> TypeGuard[Path]:
    return path is not None and path.suffix == ".gguf" and not path.is_dir()


def _config(config: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in config.items() if key not in _IGNORED}, sort_keys=True, default=str)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSpec:
    """The model that the user asked for.

    `name` is a directory, a GGUF file, a hub id or, with load_format "dummy", a config.json or a shape; None is the
    bundled demo model. `device` is auto, cpu, cuda or cuda:N, or several with commas (`resolve_devices`); `dtype` is
    auto, float32, bfloat16 or float16. `weights` other than auto are quantised or widened on loading. `tokenizer` is
    the directory or hub id of a tokenizer that replaces the checkpoint's. `weights_on` is where weights are streamed
    from, those for which the device has no room in `weights_memory` bytes (`kvcli.models.streamed`).
    """

    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    offline: bool = False
    weights: Weights = "auto"
    tokenizer: str | None = None
    weights_on: WeightsOn = "device"
    weights_memory: int | None = None

    @property
    def dummy(self) -> bool:
        """Whether the weights are random."""
        return self.load_format == "dummy"

    @property
    def label(self) -> str:
        """The name to show."""
        return "the bundled demo model" if self.name is None else self.name


@dataclass
class Model:
    """A model ready to run: eval mode, no gradients, on `device` in `dtype`.

    `source` is the origin of its weights: bundled, directory, file, hub or dummy. If its layers lie on several devices,
    `placement` maps them and `device` is the first.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: ModelGeometry
    device: torch.device
    dtype: torch.dtype
    name: str
    source: str
    placement: Placement | None = None

    @property
    def place(self) -> Place:
        """The device, or the placement on several devices."""
        return self.placement or self.device

    def as_dict(self) -> dict[str, Any]:
        """Return the model's part of a report."""
        streaming = self.geometry.streaming
        return {
            "name": self.name,
            "source": self.source,
            "type": self.module.config.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.place),
            **({} if self.placement is None else {"placement": self.placement.as_dict()}),
            "weights": self.geometry.weights,
            "weight_bytes": self.geometry.weight_bytes,
            "layers": self.geometry.depth,
            **({} if streaming is None else {"weights_on": streaming.where, "layers_streamed": len(streaming.layers)}),
        }


def read_config(spec: ModelSpec, header_only: bool = False) -> PreTrainedConfig:
    """Read the config that `spec` names, without its weights; `header_only` as for `locate`.

    Raises KvcliError: usage if the name is not a supported model, runtime if the file is broken or out of reach.
    """
    path = locate(spec, header_only)
    if _is_gguf(path):
        return config_of(path)
    if path is not None:
        check_config(path)
    try:
        with quiet():
            config = _config_of(_target(spec, path), _local(spec, path))
    except Exception as error:
        raise explain(error, spec.label, spec.offline) from error
    if config._attn_implementation is not None:
        config._attn_implementation = None  # kvcli brings its own; the package of this one may be missing
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("quant_method") == "gguf":
        del config.quantization_config  # the model came from a GGUF file, and was saved unpacked
    return config


def _config_of(target: str, local: bool) -> PreTrainedConfig:
    """Read a config by transformers, which takes "float32" for a dtype and not "torch.float32"."""
    values, _ = PreTrainedConfig.get_config_dict(target, local_files_only=local)
    if (bare := _with_bare_dtypes(values)) != values and "model_type" in bare:
        named: PreTrainedConfig = AutoConfig.for_model(**bare)
        return named
    config: PreTrainedConfig = AutoConfig.from_pretrained(target, local_files_only=local, trust_remote_code=False)
    return config


def _with_bare_dtypes(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with the names of dtypes as attributes of torch, also in the configs within."""
    bare = {key: _with_bare_dtypes(value) if isinstance(value, dict) else value for key, value in values.items()}
    for key in ("dtype", "torch_dtype"):
        if isinstance(name := bare.get(key), str):
            bare[key] = name.removeprefix("torch.")
    return bare


@dataclass(frozen=True)
class Checkpoint:
    """A model before its weights are read: enough to tell what it can do and whether it will fit."""

    spec: ModelSpec
    path: Path | None
    config: PreTrainedConfig
    geometry: ModelGeometry
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    placement: Placement | None = None

    @property
    def place(self) -> Place:
        """The device, or the placement on several devices."""
        return self.placement or self.device

    @property
    def name(self) -> str:
        """The name in a report."""
        return "demo" if self.spec.name is None else self.spec.name

    @property
    def source(self) -> str:
        """The origin of the weights: dummy, bundled, hub, file (GGUF) or directory."""
        if self.spec.dummy:
            return "dummy"
        if self.spec.name is None:
            return "bundled"
        if self.path is None or _on_hub(self.spec.name):
            return "hub"
        return "file" if _is_gguf(self.path) else "directory"

    def notices(self, repetition_penalty: float | None) -> list[str]:
        """List what a user should know about a checkpoint that can be used; the penalty is the run's, if it samples."""
        said = [] if _is_gguf(self.path) else notices(self.path)
        asked = None if repetition_penalty != 1 or _is_gguf(self.path) or self.spec.dummy else _repetition_penalty(self)
        if asked is not None and asked != 1:
            said.append(
                f"generation_config.json asks for a repetition penalty of {asked:g}, which is not applied: "
                f"--repetition-penalty {asked:g} applies it"
            )
        form, counts = self.geometry.form, self.geometry.parts.counts
        if form is not None and form.widened and not isinstance(form, PackedForm):
            said.append(f"{form.name} weights are unpacked on loading: {WIDER}")
        elif form is not None and not form.experts and counts.experts > counts.projections + counts.mlp:
            said.append(
                f"{counts.experts / 1e9:,.1f} billion weights are of experts, which {form.name} does not quantise"
            )
        return said

    def load(self) -> Model:
        """Read the weights, or make random ones.

        Raises KvcliError: runtime for weights that are missing or out of reach, will-not-fit where memory runs out.
        """
        try:
            with quiet():
                made = (self.config, self.dtype, self.place, self.geometry.form)
                module = random_model(*made) if self.spec.dummy else _weights(self)
        except Exception as error:
            raise explain(error, self.spec.label, self.spec.offline) from error
        module.requires_grad_(False).train(False)
        settle(module, self.dtype)
        _return_freed_memory()
        geometry_of_model(module, self.geometry)
        made_of = (self.device, self.dtype, self.name, self.source, self.placement)
        return Model(module, self.tokenizer, self.geometry, *made_of)


def _return_freed_memory() -> None:
    """Let glibc give back the pages of what loading has freed.

    It keeps them for later allocations, and where these do not fit, a run would hold up to a tenth more: weights
    unpacked to fp32 on their way to bfloat16 left 75 MB of SmolLM2's 780 in every other run.
    """
    with suppress(AttributeError, OSError, TypeError):  # other C libraries have no such function, or none at all
        ctypes.CDLL(None).malloc_trim(0)


def open_checkpoint(spec: ModelSpec, config: PreTrainedConfig | None = None) -> Checkpoint:
    """Read everything of a model except its weights; `config` (perhaps changed) replaces the checkpoint's own.

    Raises KvcliError: usage for a wrong name or a model that cannot run, runtime for files that are missing or broken.
    """
    devices = resolve_devices(spec.device)
    device = devices[0]
    path = locate(spec)
    config = read_config(spec) if config is None else config
    dtype = resolve_dtype(spec.dtype, config, device)
    if spec.dummy and not _is_gguf(path):  # random weights are made in the dtype, whatever the files hold
        vars(config).pop("quantization_config", None)
    form = form_in(config, spec.weights, device, path, dtype=spec.dtype)
    geometry = describe(config, dtype, form, None if spec.dummy else path)
    if path is not None and not spec.dummy and not _is_gguf(path):
        check_files(path)
    if form is not None:
        form.require()
    check_place(spec.weights_on, spec.weights_memory, devices)
    placement = None
    if spec.weights_on == "device":
        placement = placed(spec.device, config, dtype, geometry, devices)
    else:
        geometry = replace(geometry, streaming=_streaming(spec, path, config, dtype, geometry))
    try:
        with quiet():
            tokenizer = _tokenizer(spec, path, config, geometry)
    except Exception as error:
        raise explain(error, spec.label, spec.offline) from error
    return Checkpoint(spec, path, config, geometry, tokenizer, device, dtype, placement)


def _streaming(
    spec: ModelSpec,
    path: Path | None,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    geometry: ModelGeometry,
) -> WeightStreaming | None:
    """Choose which layers are streamed, and make sure that their files hold what a model holds.

    Raises:
        KvcliError: the weights cannot lie where `spec` says (usage), or not in so little memory (will not fit).
    """
    asked, form = f"--weights-on {spec.weights_on}", geometry.form
    if spec.dummy:
        raise usage_error(f"{asked} reads weights from files, but dummy ones are in none", "leave one of them out")
    if path is None or not (_is_gguf(path) or any(path.glob("model*.safetensors"))):
        raise usage_error(f"{asked} reads safetensors or GGUF files, and {spec.label} names none", "name a directory")
    shapes = build_on_meta(config, dtype)
    found = WeightStreaming.of(shapes, form, geometry.weight_bytes, spec.weights_on, spec.weights_memory)
    if found is None:
        return None
    streamed = {name for names in (*found.names, *(each.weights for each in found.experts)) for name in names}
    gguf = tensor_kinds(path) if _is_gguf(path) else {}
    stored = {} if _is_gguf(path) else stored_tensors(path)
    for name, weight in shapes.named_parameters():
        kinds = {gguf[name]} if name in gguf else {part.kind for part in stored_parts(name, stored)}
        if not kinds:
            raise usage_error(
                f"{asked} reads weights by their names, but the files of {spec.label} have no {name}",
                "leave it out, or use a GGUF file of this model",
            )
        packing = form.packing(name, dtype) if isinstance(form, PackedForm) else None
        held = _KINDS[weight.dtype] if packing is None else packing.name
        if kinds != {held} and name in streamed:
            raise usage_error(
                f"{asked} takes weights as they are in the files, but {name} is {min(kinds)}, not {held}",
                "name their dtype with --dtype, leave --weights out, or use a GGUF file of this model",
            )
    return found


_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def describe(config: PreTrainedConfig, dtype: torch.dtype, form: WeightForm | None, path: Path | None) -> ModelGeometry:
    """Describe a model whose files, if any, are at `path`; raises what `geometry_of` raises."""
    counted = form is not None and form.stored and not isinstance(form, PackedForm)
    folder = path if counted and path is not None and path.is_dir() else None
    return geometry_of(config, dtype, form, None if folder is None else stored_tensors(folder))


def form_in(
    config: PreTrainedConfig,
    weights: Weights,
    device: torch.device,
    path: Path | None,
    here: bool = True,
    dtype: str = "float32",
) -> WeightForm | None:
    """Choose how weights are held, as `form_of`; with dtype auto, a CPU keeps 16-bit weights in the files at `path`."""
    form = form_of(config, weights, device, here)
    if form is not None or device.type != "cpu" or (weights, dtype) != ("auto", "auto"):
        return form
    if path is None or not path.is_dir() or not any(path.glob("model*.safetensors")):
        return None
    try:
        for file in path.glob("model*.safetensors"):
            check_pointer(file)
            check_safetensors(file)
    except KvcliError:  # reported when the files are checked
        return None
    tensors = {name: tensor.kind for name, tensor in stored_tensors(path).items()}
    halves = [kind for kind in tensors.values() if kind in ("BF16", "F16")]
    return HalfForm(halves[0], True, captured=True, tensors=tensors) if halves else None


def load_model(spec: ModelSpec, config: PreTrainedConfig | None = None) -> Model:
    """Open and load a model; raises what `open_checkpoint` and `Checkpoint.load` raise."""
    return open_checkpoint(spec, config).load()


def resolve_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Choose the dtype; auto is the checkpoint's on CUDA (bfloat16 if it names none) and float32 on the CPU."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise KvcliError(f"unknown dtype {name!r}", f"use auto, {', '.join(_DTYPES)}", ExitCode.USAGE)
    if device.type == "cpu":
        return torch.float32
    dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.bfloat16
    return dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype), torch.bfloat16)


def locate(spec: ModelSpec, header_only: bool = False) -> Path | None:
    """Find the directory or file that `spec` names, or None for a hub id; a GGUF file on the hub is downloaded.

    With `header_only`, only the file's header is, for a caller that never reads the weights.

    Raises:
        KvcliError: there is no such model (usage).
    """
    if spec.name is None:
        return bundled_model()
    found = find(spec.name, spec.dummy)
    if found is not None or not _on_hub(spec.name):
        return found
    try:
        with quiet():
            return from_hub(spec.name, spec.offline, header_only)
    except Exception as error:
        raise explain(error, spec.name, spec.offline) from error


def _on_hub(name: str) -> bool:
    """Tell whether a name is that of a GGUF file on the hub."""
    return ":" in name and not Path(name).expanduser().exists()


def _target(spec: ModelSpec, path: Path | None) -> str:
    return str(spec.name if path is None else path)


def _local(spec: ModelSpec, path: Path | None) -> bool:
    return spec.offline or path is not None


def _weights(checkpoint: Checkpoint) -> PreTrainedModel:
    """Load the weights and fail on every one that the files lack, which transformers would initialise at random."""
    spec, path, form, config = checkpoint.spec, checkpoint.path, checkpoint.geometry.form, checkpoint.config
    if _is_gguf(path):
        assert isinstance(form, PackedForm)
        return load_gguf(path, config, form, checkpoint.dtype, checkpoint.device, checkpoint.geometry.streaming)
    streaming = checkpoint.geometry.streaming
    if path is not None and (streaming is not None or isinstance(form, HalfForm)):
        shapes = build_on_meta(config, checkpoint.dtype)
        if streaming is not None or (isinstance(form, HalfForm) and form.reads(shapes)):
            return _as_stored(checkpoint, path, shapes)
    if form is not None and form.widened:
        config = copy.deepcopy(config)
        config.quantization_config["dequantize"] = True
    loaded: Any = model_class(config).from_pretrained(
        _target(spec, path),
        config=config,
        dtype=checkpoint.dtype,
        device_map=device_map(checkpoint.place),
        local_files_only=_local(spec, path),
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # reported by name below
        output_loading_info=True,
        **({} if form is None else form.arguments(checkpoint.dtype, checkpoint.geometry.spared)),
    )
    module: PreTrainedModel = loaded[0]
    found: dict[str, Any] = loaded[1]
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"], key=str)
    if missing:
        hint = "the files are incomplete or belong to another config.json: download them again"
        hint += "" if form is None else f"; or transformers is too old for {form.name}: update it"
        raise KvcliError(f"{spec.label} lacks {len(missing)} of its weights, the first is {missing[0]}", hint)
    if mismatched:
        name, stored, expected = mismatched[0]
        raise KvcliError(
            f"{len(mismatched)} weights of {spec.label} do not have the shape that config.json says, the first is "
            f"{name}: {list(stored)}, not {list(expected)}",
            "config.json and weights belong to different models: download them again",
        )
    if found["error_msgs"]:
        raise KvcliError(f"the weights of {spec.label} cannot be read: {' '.join(found['error_msgs'][0].split())}")
    take_hooks_out(module)
    have_plain_latents(module, checkpoint.dtype)
    if form is not None and form.widened:
        have_dtype(module, checkpoint.dtype)
    return module


def _as_stored(checkpoint: Checkpoint, path: Path, shapes: PreTrainedModel) -> PreTrainedModel:
    """Read a model of these `shapes` whose files use the same names; keep its weights as they are in the files.

    Those of streamed layers are not read yet.
    """
    spec, dtype, streaming = checkpoint.spec, checkpoint.dtype, checkpoint.geometry.streaming
    form = checkpoint.geometry.form if isinstance(checkpoint.geometry.form, HalfForm) else None
    module, stored = empty_model(shapes.config, dtype), stored_tensors(path)
    held, own = {} if form is None else form.held(shapes), dict(shapes.named_parameters())
    buffers = dict(module.named_buffers())
    parts = {name: stored_parts(name, stored) for name in (*own, *buffers)}
    wrong = [name for name, weight in own.items() if not _has_shape(parts[name], weight.shape)]
    if wrong:
        there, expected = list(parts[wrong[0]][0].shape), list(own[wrong[0]].shape)
        raise KvcliError(
            f"{len(wrong)} weights of {spec.label} do not have the shape that config.json says, the first is "
            f"{wrong[0]}: {there}, not {expected}",
            "config.json and weights belong to different models: download them again",
        )
    layout = None
    if streaming is not None:
        sources = {
            name: Source([FilePart(part.file, part.offset, part.nbytes) for part in each])
            for name, each in parts.items()
        }
        layout = Layout(streaming, sources, checkpoint.device)
    for name, weight in _tensors(parts, layout):
        if name in own:
            packing = form.packing(name, dtype) if form is not None and name in held else None
            weight = weight.view(own[name].shape)
            weight = weight.to(dtype) if packing is None else PackedWeight.of(weight, packing, dtype)
            owner, _, leaf = name.rpartition(".")
            weight = nn.Parameter(weight.to(checkpoint.device), requires_grad=False)
            setattr(module.get_submodule(owner), leaf, weight)
        else:
            buffers[name].copy_(weight.view_as(buffers[name]))
    if any(".experts." in name for name in held):
        module.set_experts_implementation("eager")  # one expert after another, so that only those chosen are unpacked
    tie_head(module)
    if checkpoint.device.type != "cpu":
        for each in module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                each._buffers[name] = buffer.to(checkpoint.device)
    if layout is not None:
        layout.attach(module)
    if (path / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(path)
    return module


def _has_shape(parts: Sequence[StoredTensor], shape: torch.Size) -> bool:
    """Tell whether tensors in files are a weight of this shape, or matrices that make one up."""
    if len(parts) == 1:
        return parts[0].shape == tuple(shape)
    columns = {part.shape[-1] for part in parts}
    return columns == {shape[-1]} and sum(prod(part.shape) for part in parts) == shape.numel()


def _tensors(parts: Mapping[str, Sequence[StoredTensor]], layout: Layout | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model that files hold, by name; streamed ones have a room in the `layout`, unread."""
    if layout is None:
        for file in sorted({part.file for each in parts.values() for part in each}):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    if name in parts:
                        yield name, tensors.get_tensor(name)
        return
    dtypes = {kind: dtype for dtype, kind in _KINDS.items()} | {"F64": torch.float64, "I64": torch.int64}
    for name, each in parts.items():
        if each:
            raw = layout.rooms[name] if name in layout.rooms else layout.sources[name].read(keep=False)
            yield name, raw.view(dtypes[each[0].kind])


def _tokenizer(
    spec: ModelSpec, path: Path | None, config: PreTrainedConfig, geometry: ModelGeometry
) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer; a dummy model without one gets a tokenizer that fits its vocabulary."""
    failure: BaseException | None = None
    if spec.tokenizer is not None:
        path = find(spec.tokenizer, False)
    if path is None or path.is_dir() or _is_gguf(path):
        try:
            if _is_gguf(path):
                return tokenizer_of(path)
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(path or spec.tokenizer or spec.name),
                config=config if spec.tokenizer is None else None,
                local_files_only=_local(spec, path),
                trust_remote_code=False,
            )
            # Without its files transformers still makes a tokenizer, of the special tokens alone.
            if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - set(tokenizer.get_added_vocab()):
                if tokenizer.chat_template is None and path is not None:
                    tokenizer.chat_template = _processors_template(path)
                return tokenizer
        except KvcliError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            failure = error
    if spec.dummy:
        return fallback_tokenizer(geometry.vocab_size)
    raise KvcliError(
        f"{spec.tokenizer or spec.label} has no usable tokenizer"
        + (f" ({' '.join(str(failure).split())[:200]})" if failure else ""),
        "put tokenizer.json and tokenizer_config.json next to config.json",
    ) from failure


def _processors_template(path: Path) -> str | None:
    """Return the chat template of a directory that has one for its processor alone, as older ones wrote it."""
    try:
        found = json.loads((path / "chat_template.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    template = found.get("chat_template") if isinstance(found, dict) else None
    return template if isinstance(template, str) else None
