"""Sessions of the real command: piped, and in a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import time

import pytest
from command import assert_refused
from families import EOS, tiny_checkpoint
from safetensors.torch import load_file, save_file

WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(WORDS * 12)
    return path


def test_a_line_is_a_turn(warm, model, document):
    lines = (
        "which fox?\n\n/stats\n/method quest\n/budget 64\nand which dog?\n/nonsense\n/set x\n/retry\n/help\n/quit\nno\n"
    )
    result = warm("chat", "-m", model, document, "--max-tokens", 6, text=lines)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 3
    for words in (
        "6 tokens, ended by --max-tokens",
        "use quest, budget 64",
        "unknown command /nonsense",
        "is not KEY=VALUE",
    ):
        assert words in result.stderr
    assert "/retry           answer the last question again" in result.stderr
    said = result.stderr.splitlines()
    helped = said[said.index("/method NAME     answer with another method; reuses the KV if the method can") :]
    assert max(map(len, helped[:14])) <= 80
    assert "Traceback" not in result.stderr


def test_a_line_that_is_no_text_is_named_and_the_others_are_asked(warm, model, document, tmp_path):
    lines = tmp_path / "lines"
    lines.write_bytes("\ufeffwhich fox?\n".encode() + b"which \xff dog?\n" + b"and then?\n")
    arguments = ["chat", "-m", model, document, "--max-tokens", 3, "--json"]
    with (
        lines.open() as given,
        warm.start(*arguments, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        stdout, stderr = process.communicate(timeout=60)
    assert [each["question"] for each in json.loads(stdout)["sequences"]] == ["which fox?", "and then?"]
    assert "line 2 of standard input is not UTF-8 text (byte 6)" in stderr
    assert "Traceback" not in stderr


def test_how_tokens_are_chosen_can_be_changed(warm, model, document):
    lines = "which fox?\n/max-tokens 2\n/temperature 0.7\n/repetition_penalty 1.2\n/system Be brief.\n/retry\n"
    result = warm("chat", "-m", model, document, "--max-tokens", 6, "--json", text=lines)
    assert json.loads(result.stdout)["sequences"][0]["output_tokens"] == 2, result.stderr
    told = ("max tokens 2", "temperature 0.7", "repetition penalty 1.2", "system message changed", "tokens again")
    for words in told:
        assert words in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/temperature", "/temperature takes a value"),
        ("/temperature hot", "'hot' is not a number"),
        ("/top-p 2", "--top-p 2.0 is out of range"),
        ("/tempreature 1", "did you mean /temperature?"),
        ("/stat", "did you mean /stats?"),
        ("/", "unknown command /"),
        ("/?", "/retry           answer the last question again"),
        ('"""\nwhich', "three double quotes are not closed"),
    ],
)
def test_a_bad_command_names_the_way_out(warm, model, line, words):
    result = warm("chat", "-m", model, text=f"{line}\n")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_lines_between_quotes_are_one_question(warm, model):
    lines = '"""which fox\n  jumps\n\nand why?\n"""\nthe dog?\n"""one line"""\n'
    result = warm("chat", "-m", model, "--max-tokens", 2, "--json", "-q", text=lines)
    asked = [each["question"] for each in json.loads(result.stdout)["sequences"]]
    assert asked == ["which fox\n  jumps\n\nand why?", "the dog?", "one line"]


def test_without_a_method_a_short_conversation_is_read_whole(warm, model, document):
    result = warm("chat", "-m", model, document, "--max-tokens", 3, "--json", text="which fox?\nand then?\n")
    assert json.loads(result.stdout)["profile"]["method"] == "full"
    assert result.stderr.count("no --method: using full attention") == 1


def test_json_has_all_turns(warm, model, document):
    result = warm("chat", "-m", model, document, "--max-tokens", 6, "--json", "-q", text="which fox?\nwhich dog?\n")
    first, second = json.loads(result.stdout)["sequences"]
    assert (first["question"], second["question"]) == ("which fox?", "which dog?")
    assert second["kv"]["shared_tokens"] > 0.8 * first["prompt_tokens"] - 32
    assert result.stderr == ""


def test_a_session_begins_with_saved_kv_and_saves_it(warm, model, document, tmp_path):
    """Both ways: what `prefill` saved, and what /save did, without the document."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert warm("prefill", "-m", model, document, "--save-kv", first).returncode == 0
    talk = ["chat", "-m", model, "--max-tokens", 6, "--json"]
    read = json.loads(warm(*talk, document, text="which fox?\n").stdout)["sequences"][0]
    loaded = warm(*talk, "--kv", first, text=f"which fox?\n/save {second}\n")
    assert json.loads(loaded.stdout)["sequences"][0]["token_ids"] == read["token_ids"], loaded.stderr
    assert "saved" in loaded.stderr
    again = warm(*talk, "--kv", second, document, text="which fox?\n")
    assert json.loads(again.stdout)["sequences"][0]["token_ids"] == read["token_ids"], again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv", "nowhere"], "nowhere"),
        (["-"], "- cannot be a document"),
        (["missing.txt"], "missing.txt"),
        (["--method", "qest"], "unknown method 'qest'"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_bad_input_is_one_line(warm, model, arguments, words):
    assert_refused(warm("chat", "-m", model, *arguments), 2, words)


def test_the_exit_code_is_that_of_the_last_question(warm, model):
    failing = "/retry\n"
    assert warm("chat", "-m", model, "--max-tokens", 4, text=failing).returncode == 2
    assert warm("chat", "-m", model, "--max-tokens", 4, text=failing + "hello\n").returncode == 0


def test_a_session_that_is_ended_from_outside_keeps_what_was_said(warm, model, document):
    arguments = ["chat", "-m", model, document, "--max-tokens", 4, "--json"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with warm.start(*arguments, **pipes) as process:
        process.stdin.write("which fox?\n/help\n")
        process.stdin.flush()
        while "/quit" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        (turn,) = json.loads(process.stdout.read())["sequences"]
        assert process.wait() == 143
    assert turn["output_tokens"] == 4


class Terminal:
    """A session in a terminal of its own."""

    def __init__(self, warm, *arguments):
        self.master, slave = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = warm.start("chat", *arguments, **streams, variables={"TERM": "dumb"})
        os.close(slave)
        self.seen = ""

    def until(self, words, after=0):
        """Read until `words` were shown behind position `after`; returns the position behind them."""
        end = time.monotonic() + 60
        while words not in self.seen[after:]:
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        return self.seen.index(words, after) + len(words)

    def type(self, text):
        os.write(self.master, text.encode())


@pytest.fixture
def endless(tmp_path):
    """A model that never ends a text: its end-of-text token is less likely than any other."""
    path = tiny_checkpoint("llama", tmp_path / "endless")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][EOS] = 0
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_ctrl_c_stops_an_answer_and_a_line_but_not_the_session(warm, endless, document):
    terminal = Terminal(warm, "-m", endless, document, "--max-tokens", 3000)
    at = terminal.until("> ")
    terminal.type("which fox?\n")
    at = terminal.until("fox?", at)
    time.sleep(1)  # into the answer
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.until("> ", at)
    terminal.type("half a line")
    terminal.until("half a line", at)
    time.sleep(0.5)  # until readline waits again: a signal before that is heard at the next key
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.until("\n> ", at)
    terminal.type("/stats\n")
    at = terminal.until("interrupted", at)
    terminal.type("/quit\n")
    assert terminal.process.wait(30) == 0


def test_a_terminal_is_told_what_answers_and_a_pipe_is_not(warm, model, document):
    terminal = Terminal(warm, "-m", model, document, "--method", "quest", "--budget", "64", "--max-tokens", 2)
    at = terminal.until("answers with quest, budget 64; /help lists commands")
    at = terminal.until("> ", at)
    terminal.type('"""\n')
    at = terminal.until("... ", at)
    time.sleep(0.5)  # until readline waits
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.until("\n> ", at)
    terminal.type("/quit\n")
    assert terminal.process.wait(30) == 0
    silent = Terminal(warm, "-m", model, "-q")
    silent.until("> ")
    silent.type("/quit\n")
    assert silent.process.wait(30) == 0
    assert "answers with" not in silent.seen + warm("chat", "-m", model, text="/quit\n").stderr


def test_questions_to_generate_can_be_turns(warm, model, document):
    asked = ["-p", "which fox?", "-p", "and which dog?"]
    common = ["-m", model, "--max-tokens", 6, "--ignore-eos", "--method", "quest"]
    result = warm("generate", document, "--turns", *asked, *common, "--json", "-q")
    assert result.returncode == 0, result.stderr
    first, second = json.loads(result.stdout)["sequences"]
    assert [first["question"], second["question"]] == ["which fox?", "and which dog?"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + len(first["token_ids"])  # what was said is before it
    assert second["kv"]["read_tokens"] < second["prompt_tokens"] - first["prompt_tokens"] + 32
    (alone,) = json.loads(warm("generate", document, *asked[:2], *common, "--json", "-q").stdout)["sequences"]
    assert first["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize(("options", "word"), [(["--num-samples", 2], "--num-samples"), (["--audit", 1], "--audit")])
def test_what_turns_go_without(warm, model, document, options, word):
    result = warm("generate", document, "--turns", "-p", "x", "-m", model, "-q", *options)
    assert_refused(result, 2, word)
    (other := document.with_name("other.txt")).write_text(WORDS)
    assert_refused(warm("generate", document, other, "--turns", "-p", "x", "-m", model, "-q"), 2, "one document")
