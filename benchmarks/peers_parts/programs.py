"""The programs that are compared: each runs once, in a process of its own that imports nothing for the others.

`python -m peers_parts.programs` takes a job as JSON and prints what it found, with its peak memory, on a last line. A
program reads the tokens of a job, or is given made-up KV in their place, and continues them for some steps. The first
step or two are not timed: they touch memory for the first time.
"""

import json
import struct
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

WARMUP = 2
LEAST = 24  # tokens of a slot that is stretched
BLOCK = 256  # llama.cpp makes room for multiples of as many tokens
NUMBERS = {"f16": 1, "q8_0": 8}  # of types, in files of slots
ROWS = 256  # tokens whose made-up KV is drawn; it is repeated
GLUE = 64  # bytes between two tensors of a slot, at most


class Job(NamedTuple):
    """What a program does: read `ids` with the model in `file`, unless their KV is `made_up`, and take `steps`.

    `width` counts the numbers of a token's keys in a layer. `folder` has room for KV on its way into a program.
    """

    program: str
    file: str
    ids: list[int]
    made_up: bool
    steps: int
    threads: int
    width: int
    folder: str


class Found(NamedTuple):
    """What came of a job: seconds of reading all tokens and of a step; what kind of program it was, in its own words.

    `kv_bytes` are those that a step read, where it does not read all of them; `counted` has parts of all, 0 to 1.
    """

    prefill_s: float | None
    step_s: float
    version: str
    kv_bytes: int | None = None
    counted: dict[str, float] = {}  # noqa: RUF012


def llama_cpp(job: Job, kind: str) -> Found:
    """Run llama.cpp's server, which keeps what it has read for the next question."""
    import xllamacpp

    asked = xllamacpp.CommonParams()
    asked.model.path, asked.slot_save_path = job.file, f"{job.folder}/"
    asked.n_ctx, asked.n_parallel, asked.fit_params, asked.verbosity = room(job), 1, False, 1
    asked.cache_ram_mib = 0  # no second copy of the KV
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = job.threads
    asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type(NUMBERS[kind])
    server = xllamacpp.Server(asked)

    def ask(ids: Sequence[int], tokens: int) -> dict[str, float]:
        how = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True, "cache_prompt": True, "id_slot": 0}
        answer = server.handle_completions({"prompt": list(ids), "n_predict": tokens, **how})
        if "timings" not in answer:
            raise RuntimeError(answer["error"]["message"])
        timings: dict[str, float] = answer["timings"]
        return timings

    def slot(action: str, file: str) -> None:
        url, body = f"{server.listening_address}/slots/0?action={action}", json.dumps({"filename": file}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            answer.read()

    prefill_s = None
    if job.made_up:
        ask(job.ids[:LEAST], 1)
        slot("save", "short")
        stretch(job, kind)
        slot("restore", "long")
        Path(job.folder, "long").unlink()
    else:
        read = ask(job.ids, 1)
        prefill_s = read["prompt_ms"] / 1000
    timings = ask(job.ids, job.steps + 1)  # reads the last token once more, and counts the first new one among them
    if timings["cache_n"] < len(job.ids) - 1 or timings["predicted_n"] != job.steps + 1:
        raise RuntimeError(f"the slot did not keep what it had: {timings}")
    version = f"xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info()}"
    return Found(prefill_s, timings["predicted_ms"] / 1000 / job.steps, version)


def ik_llama_cpp(job: Job, kind: str) -> Found:
    """Run ik_llama.cpp, a fork of llama.cpp, by the functions of its library."""
    import ctypes
    from importlib.metadata import version

    import numpy as np
    from ik_llama_cpp import _ctypes_api as api

    library: Any = api._lib
    library.llama_print_system_info.restype = ctypes.c_char_p
    for name in ("save", "load"):
        getattr(library, f"llama_state_seq_{name}_file").restype = ctypes.c_size_t
    api.llama_backend_init()
    model = api.llama_model_load_from_file(job.file.encode(), api.llama_model_default_params())
    asked = api.llama_context_default_params()
    asked.n_ctx, asked.flash_attn, asked.type_k, asked.type_v = room(job), True, NUMBERS[kind], NUMBERS[kind]
    asked.n_threads = asked.n_threads_batch = job.threads
    context = ctypes.c_void_p(api.llama_init_from_model(model, asked))
    if not context:
        raise RuntimeError("the model or its context could not be made")
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def run(ids: Sequence[int], position: int) -> int:
        """Read some tokens, at most a batch; return the likeliest next one."""
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at] = token, position + at
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, 0, at == len(ids) - 1
        failed = api.llama_decode(context, batch)
        api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), (vocabulary,))
        return int(logits.argmax())

    def read(ids: Sequence[int]) -> int:
        for begin in range(0, len(ids), asked.n_ubatch):
            token = run(ids[begin : begin + asked.n_ubatch], begin)
        return token

    token, prefill_s = job.ids[-1], None
    read(job.ids[:LEAST])
    if job.made_up:
        paths = [str(Path(job.folder) / name).encode() for name in ("short", "long")]
        held = (ctypes.c_int32 * len(job.ids))(*job.ids)
        library.llama_state_seq_save_file(context, paths[0], 0, held, ctypes.c_size_t(LEAST))
        stretch(job, kind)
        api.llama_kv_cache_clear(context)
        room_for, taken = ctypes.c_size_t(len(held)), ctypes.c_size_t()
        if not library.llama_state_seq_load_file(context, paths[1], 0, held, room_for, ctypes.byref(taken)):
            raise RuntimeError("the made-up KV was not accepted")
        Path(job.folder, "long").unlink()
    else:
        api.llama_kv_cache_clear(context)
        started = time.perf_counter()
        token = read(job.ids)
        prefill_s = time.perf_counter() - started
    for step in range(job.steps + WARMUP):
        if step == WARMUP:
            started = time.perf_counter()
        token = run([token], len(job.ids) + step)
    step_s = (time.perf_counter() - started) / job.steps
    built = library.llama_print_system_info().decode()
    return Found(prefill_s, step_s, f"ik-llama-cpp-python {version('ik-llama-cpp-python')}: {built}")


def transformers(job: Job) -> Found:
    """Run transformers' `generate` with its default cache, on weights in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, __version__
    from transformers.utils.quantization_config import GgufConfig

    file = Path(job.file)
    how = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=how
    )
    model.eval()
    config, clock, prefill_s = model.config, Clock(), None
    cache, ids = DynamicCache(config=config), torch.tensor([job.ids])
    with torch.inference_mode():
        model(input_ids=ids[:, :LEAST], use_cache=False)
        if job.made_up:
            heads = config.num_attention_heads
            head = getattr(config, "head_dim", None) or config.hidden_size // heads
            k, v = torch.randn(2, 1, config.num_key_value_heads, len(job.ids), head)
            for layer in range(config.num_hidden_layers):
                cache.update(k.clone(), v.clone(), layer)
        else:
            started = time.perf_counter()
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            prefill_s = time.perf_counter() - started
        ids = torch.cat([ids, ids[:, -1:]], 1)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=job.steps + WARMUP + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
        )
    steps = [later - earlier for earlier, later in pairwise(clock.times[1 + WARMUP :])]
    return Found(prefill_s, sum(steps) / len(steps), f"transformers {__version__}, torch {torch.__version__}")


class Clock:
    """A streamer that notes when the tokens of each step arrive; the first one that it is given is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def kvcli(job: Job) -> Found:
    """Run a method of kvcli, as `kvcli generate` and `kvcli profile` do."""
    import torch

    from kvcli import __version__
    from kvcli.capacity.planning.probe import RandomKV
    from kvcli.capacity.roofline import step_work
    from kvcli.inputs.profiles import resolve_profile
    from kvcli.kernels._numba import compiling
    from kvcli.models.loading import ModelSpec, load_model
    from kvcli.runtime.engine import engine
    from kvcli.runtime.sampling import Sampling

    named = job.program.removeprefix(KVCLI)
    profile = resolve_profile(profile=named) if named.endswith(".toml") else resolve_profile(named)
    model = load_model(ModelSpec(job.file, device="cpu", offline=True))
    geometry, sampling = model.geometry, Sampling(max_tokens=1 + WARMUP + job.steps, ignore_eos=True)
    begin, prefill_s = job.ids[:LEAST], None
    with engine(model, [len(ids) + sampling.max_tokens for ids in (begin, job.ids)]) as ready, torch.inference_mode():
        ready.prefill(begin, [ready.method(profile, ready.context(len(begin), sampling.max_tokens))])
        attends = ready.method(profile, ready.context(len(job.ids), sampling.max_tokens))
        if job.made_up:
            RandomKV(0, model.device, model.dtype).fill([attends], geometry.layers, len(job.ids))
            sequence = ready.sequence(attends, sampling, first_token=job.ids[-1])
        else:
            started, compiled = time.perf_counter(), compiling.seconds
            (logits,) = ready.prefill(job.ids, [attends])
            prefill_s = time.perf_counter() - started - (compiling.seconds - compiled)
            sequence = ready.sequence(attends, sampling)
            sequence.accept(logits)
        for _ in ready.decode([sequence]):
            pass
        cache, correction = sequence.counters.cache(), sequence.counters.correction()
        counted = {}
        if cache.pages_requested:
            counted["missed_pages"] = cache.misses / cache.pages_requested
        if correction.heads_checked:
            counted["corrected_heads"] = correction.heads_corrected / correction.heads_checked
        held = [(attends, sequence.length)]
        work = step_work(geometry, model.dtype.itemsize, held, counted.get("missed_pages", 1.0))
    read = sum(work[phase].read + work[phase].to_device for phase in ("attention", "score", "select", "recall"))
    steps_ms = sequence.decode_ms[WARMUP:]
    return Found(prefill_s, sum(steps_ms) / len(steps_ms) / 1000, f"kvcli {__version__}", read, counted)


class Peer(NamedTuple):
    """A program that is no method of kvcli: its package, and what runs it with KV of a kind.

    `kv_bytes` are those of a number of its KV, `weight_bytes` those of a weight, None if they are as in the file.
    """

    package: str
    run: Callable[[Job], Found]
    kv_bytes: float
    weight_bytes: int | None = None


PEERS = {
    "llama.cpp-f16": Peer("xllamacpp", lambda job: llama_cpp(job, "f16"), 2),
    "llama.cpp-q8_0": Peer("xllamacpp", lambda job: llama_cpp(job, "q8_0"), 34 / 32),
    "ik_llama.cpp-f16": Peer("ik_llama_cpp", lambda job: ik_llama_cpp(job, "f16"), 2),
    "ik_llama.cpp-q8_0": Peer("ik_llama_cpp", lambda job: ik_llama_cpp(job, "q8_0"), 34 / 32),
    "transformers": Peer("transformers", transformers, 4, 4),
}
KVCLI = "kvcli-"  # before the name of a method


def room(job: Job) -> int:
    """Count the tokens that llama.cpp makes room for."""
    return -(-(len(job.ids) + job.steps + WARMUP + 1) // BLOCK) * BLOCK


def stretch(job: Job, kind: str) -> None:
    """Make a slot's file `long` in the folder from `short`, which holds the first `LEAST` tokens: all, with made-up KV.

    llama.cpp and its fork write the tokens, the position of each, and one tensor after another; what they write in
    between stays as it is.

    Raises:
        ValueError: the file is not laid out like that.
    """
    import numpy as np

    slot, count = Path(job.folder, "short").read_bytes(), len(job.ids)
    start = 12 + 4 * int.from_bytes(slot[8:12], "little")  # a magic number, a version, a number of words, the words
    words = np.frombuffer(slot[12:start], "<i4").tolist()
    tokens = [at for at in range(len(words)) if words[at : at + LEAST] == job.ids[:LEAST]]
    numbers = np.frombuffer(slot[start : start + 4 * (2 + 3 * LEAST)], "<u4")
    cells = [
        (lead, width)
        for lead in (1, 2)  # numbers up to that of the positions
        for width in (2, 3)  # numbers with each position
        if numbers[lead - 1] == LEAST and _counts(numbers[lead : lead + LEAST * width].reshape(LEAST, width))
    ]
    rows = made_up_rows(kind, job.width)
    head = struct.pack("<iQ", NUMBERS[kind], len(rows) // ROWS)
    if not tokens or not cells or head not in slot:
        raise ValueError("a slot's file is laid out in a way that is not known")
    (lead, width), begins = cells[0], tokens[0]
    words[begins : begins + LEAST] = job.ids
    if begins and words[begins - 1] == LEAST:
        words[begins - 1] = count
    places = np.tile(numbers[lead : lead + width], (count, 1))
    places[:, 0] = np.arange(count)
    with Path(job.folder, "long").open("wb") as file:
        file.write(slot[:8] + struct.pack(f"<I{len(words)}i", len(words), *words))
        file.write(numbers[: lead - 1].tobytes() + struct.pack("<I", count) + places.tobytes())
        at = start + 4 * (lead + LEAST * width)
        while (found := slot.find(head, at, at + GLUE)) >= 0:
            file.write(slot[at : found + len(head)])
            for begin in range(0, count, ROWS):
                file.write(rows[: len(rows) // ROWS * min(ROWS, count - begin)])
            at = found + len(head) + len(rows) // ROWS * LEAST
        file.write(slot[at:])


def _counts(rows: Any) -> bool:
    """Tell whether numbers [n, width] count from 0 in the first column, and are the same in each other one."""
    return bool((rows[:, 0] == range(len(rows))).all() and (rows[:, 1:] == rows[0, 1:]).all())


def made_up_rows(kind: str, width: int) -> bytes:
    """Draw keys or values of `ROWS` tokens of a layer."""
    import numpy as np

    from peers_parts.blocks import blocks

    drawn = np.random.default_rng(0)
    if kind == "f16":
        return drawn.standard_normal((ROWS, width), np.float32).astype(np.float16).tobytes()
    return blocks(kind.upper(), (ROWS, width), 1.0, drawn).tobytes()


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    """Run a job."""
    job = Job(**json.load(sys.stdin))
    found = PEERS[job.program].run(job) if job.program in PEERS else kvcli(job)
    print(json.dumps({**found._asdict(), "peak_bytes": peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
