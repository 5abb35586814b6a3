"""Several questions, saved KV and the store of it, by the real command."""

import json
import os
import shutil
from functools import partial

import pytest
from command import RETRIEVE, assert_refused
from families import tiny_checkpoint

WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "
SHORT = [*RETRIEVE, "--max-tokens", 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(WORDS * 12)
    return path


@pytest.fixture
def generate(model, warm):
    return partial(warm, "generate", "-m", model, *SHORT)


@pytest.fixture
def saved(model, document, warm, tmp_path):
    result = warm("prefill", "-m", model, document, "--save-kv", tmp_path / "fox.kv")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path}/fox.kv\n"
    assert "fox.txt: " in result.stderr
    return tmp_path / "fox.kv"


def tokens(result):
    assert result.returncode == 0, result.stderr
    return [sequence["token_ids"] for sequence in json.loads(result.stdout)["sequences"]]


def test_many_questions_in_one_run_say_what_they_say_alone(generate, document, tmp_path):
    lines = [json.dumps({"id": "last", "question": "who sleeps?", "more": 1}), "", json.dumps({"question": "why?"})]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    (tmp_path / "more.txt").write_text("who sleeps?\n\n  why? \n")
    together = generate(document, "-p", "which fox?", "--questions", tmp_path / "more.jsonl", "--json")
    alone = [tokens(generate(document, "-p", text, "--json"))[0] for text in ("which fox?", "who sleeps?", "why?")]
    assert tokens(together) == alone
    first, second, third = json.loads(together.stdout)["sequences"]
    assert [each["question"] for each in (first, second, third)] == ["which fox?", "who sleeps?", "why?"]
    assert [each["id"] for each in (first, second, third)] == [None, "last", None]
    assert first["kv"]["read_tokens"] == first["prompt_tokens"]
    assert second["kv"]["shared_tokens"] == third["kv"]["shared_tokens"] > 150
    text = generate(document, "-p", "which fox?", "--questions", tmp_path / "more.txt")
    assert f"==> {document}: who sleeps? <==" in text.stdout
    assert "shared" in text.stderr
    shown = generate(document, "--questions", tmp_path / "more.jsonl").stdout
    assert f"==> {document}: last <==" in shown


def test_questions_may_stand_before_the_document(generate, document, tmp_path):
    (tmp_path / "only.txt").write_text("which fox?\n\n" + document.read_text().rstrip())
    (tmp_path / "both.txt").write_text("which fox?\n\n" + document.read_text().rstrip() + "\n\nwhich fox?")
    for place in ("only", "both"):
        asked = generate(document, "-p", "which fox?", "--question-first", place, "--json")
        assert tokens(asked) == tokens(generate(tmp_path / f"{place}.txt", "--json"))


def test_a_saved_document_is_asked_without_its_file(generate, document, saved):
    questions = ["-p", "which fox?", "-p", "why?", "--json"]
    loaded = generate("--kv", saved, *questions)
    assert tokens(loaded) == tokens(generate(document, *questions))
    kv = json.loads(loaded.stdout)["sequences"][0]["kv"]
    assert kv["disk_tokens"] > 150
    assert kv["disk_bytes"] > 0
    assert "from disk" in generate("--kv", saved, "-p", "why?").stderr


def test_the_template_of_a_saved_document_is_taken_with_it(generate, model, warm, document, tmp_path):
    folder = tmp_path / "raw.kv"
    assert warm("prefill", "-m", model, document, "--raw", "--save-kv", folder).returncode == 0
    loaded = generate("--kv", folder, "-p", "why?", "--json")
    assert tokens(loaded) == tokens(generate(document, "--raw", "-p", "why?", "--json"))


def test_what_generate_reads_it_can_save(generate, document, tmp_path):
    result = generate(document, "-p", "why?", "--save-kv", tmp_path / "new" / "kv", "--json")
    (entry,) = json.loads(result.stdout)["saved"]
    assert entry["path"] == str(tmp_path / "new" / "kv")
    assert_refused(generate(document, "-p", "why?", "--save-kv", tmp_path / "new" / "kv"), 2, "saved KV already")


def test_a_disk_that_runs_full_costs_no_text_and_is_told_once(generate, warm, model, document, tmp_path):
    """Also where nothing but the text is wanted."""
    target, told = tmp_path / "new" / "kv", "was not saved: File too large; free some space"
    saved = generate(document, "-p", "why?", "--save-kv", target, "-q", file_size=8192)
    assert (saved.returncode, saved.stdout) == (1, generate(document, "-p", "why?").stdout)
    assert saved.stderr.count(told) == 1
    prefilled = warm("prefill", "-m", model, document, "--save-kv", target, file_size=8192)
    assert (prefilled.returncode, prefilled.stdout) == (1, "")
    assert prefilled.stderr.count(told) == 1
    assert list(target.parent.iterdir()) == []


def test_several_documents_get_a_directory_each(model, warm, document, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(WORDS * 3)
    result = warm("prefill", "-m", model, document, other, "--save-kv", tmp_path / "kv", "--json")
    assert result.returncode == 0, result.stderr
    assert [entry["path"] for entry in json.loads(result.stdout)["saved"]] == [
        str(tmp_path / "kv" / name) for name in ("fox.txt", "other.txt")
    ]


def test_a_store_is_looked_after(generate, model, warm, document, tmp_path):
    store = str(tmp_path / "store")
    first = generate(document, "-p", "why?", "--json", "--kv-cache", store)
    again = generate(document, "-p", "why?", "--json", KVCLI_KV_CACHE=store)
    assert tokens(first) == tokens(again)
    assert json.loads(again.stdout)["sequences"][0]["kv"]["disk_tokens"] > 150
    (row,) = json.loads(warm("kv", "list", "--json", KVCLI_KV_CACHE=store).stdout)
    assert row["source"] == str(document)
    name = row["name"][:12]
    assert name in warm("kv", "list", "--kv-cache", store).stdout
    assert json.loads(warm("kv", "show", name, "--kv-cache", store).stdout)["tokens"] == row["tokens"]
    assert warm("kv", "check", "--kv-cache", store).returncode == 0
    (entry,) = (path for path in (tmp_path / "store").iterdir())
    data = bytearray((entry / "layer-0000.safetensors").read_bytes())
    data[-1] ^= 1
    (entry / "layer-0000.safetensors").write_bytes(data)
    broken = warm("kv", "check", "--kv-cache", store)
    assert broken.returncode == 1
    assert "layer-0000.safetensors" in broken.stderr
    assert warm("kv", "rm", name, "--kv-cache", store).returncode == 0
    assert list((tmp_path / "store").iterdir()) == []
    generate(document, "-p", "why?", "--kv-cache", store)
    assert "1 removed" in warm("kv", "prune", "--kv-cache", store, "--kv-cache-size", "0").stdout


def test_what_is_wrong_is_said_in_a_line(generate, document, saved, warm, model, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "why?"}\n{"id": 3}\n')
    (tmp_path / "empty.jsonl").write_text('{"question": " "}\n')
    torn = tmp_path / "torn"
    shutil.copytree(saved, torn)
    os.truncate(torn / "layer-0001.safetensors", 5000)
    cases = [
        ([document, "--questions", tmp_path / "bad.jsonl"], 2, "bad.jsonl, line 2: no field 'question'"),
        ([document, "--questions", tmp_path / "empty.jsonl"], 2, "line 1: the question is empty"),
        ([document, "--questions", tmp_path / "none"], 2, "no such file"),
        ([document, "-p", "why?", "-p", " "], 2, "is empty"),
        (["-", "--questions", "-"], 2, "named twice"),
        (["--kv", tmp_path / "none", "-p", "why?"], 2, "no such directory"),
        (["--kv", tmp_path, "-p", "why?"], 2, "holds no saved KV"),
        (["--kv", torn, "-p", "why?"], 1, "layer-0001.safetensors"),
        ([document, "--kv", saved, "--raw", "-p", "why?"], 2, "does not begin like"),
        ([document, "--kv-cache-size", "1GiB"], 2, "--kv-cache-size needs a store"),
        ([document, "--kv-cache", document], 2, "--kv-cache"),
        ([document, "--save-kv", tmp_path], 2, "holds something else"),
    ]
    for arguments, code, message in cases:
        assert_refused(generate(*arguments), code, message)
    assert_refused(warm("prefill", "-m", model, document), 2, "no place to save")
    assert_refused(warm("kv", "list"), 2, "no store given")
    assert_refused(warm("kv", "rm", "00", "--kv-cache", tmp_path), 2, "no entry is called")


def test_saved_kv_brings_its_model(warm, model, document, saved, tmp_path, monkeypatch):
    asked = ["--kv", saved, *SHORT, "-p", "which fox?", "--json"]
    with_model = tokens(warm("generate", "-m", model, *asked))
    monkeypatch.chdir(tmp_path)  # the model's place is known from anywhere
    alone = warm("generate", *asked)
    assert tokens(alone) == with_model
    assert f"no -m: using {model}" in "".join(alone.stderr.splitlines())
    talk = warm("chat", "--kv", saved, "--max-tokens", 3, "--json", text="which fox?\n")
    assert len(tokens(talk)) == 1


def test_saved_kv_of_a_model_that_was_moved_says_so(warm, model, document, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(model, old)
    assert warm("prefill", "-m", old, document, "--save-kv", tmp_path / "a.kv").returncode == 0
    old.rename(tmp_path / "new")
    moved = ["--kv", tmp_path / "a.kv", *SHORT, "-p", "which fox?"]
    assert_refused(warm("generate", *moved), 2, str(old), "does not exist")
    assert warm("generate", "-m", tmp_path / "new", *moved).returncode == 0


def test_prefill_says_what_to_do_next(warm, model, document, tmp_path):
    result = warm("prefill", "-m", model, document, "--save-kv", tmp_path / "a b.kv")
    assert f"kvcli generate --kv '{tmp_path}/a b.kv' -p " in result.stderr
