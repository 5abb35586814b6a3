import io
import sys
import types
import zipfile

import pytest
from families import tiny_tokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import encode, encode_question
from kvcli.inputs.options import Template
from kvcli.inputs.prompts import FailedPrompt, Prompt, read_document, read_prompts


def refused(function, *arguments):
    """The error of a call that has to be refused as a usage error with a hint, in one line."""
    with pytest.raises(KvcliError) as raised:
        function(*arguments)
    error = raised.value
    assert error.exit_code == ExitCode.USAGE
    assert error.hint
    assert "\n" not in error.what + error.hint
    return error


def test_byte_order_mark_and_line_ends_are_made_plain(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_document(str(path)) == "one\ntwo\nthree\n"


def test_standard_input_is_a_document(monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO("grün".encode())))
    assert read_prompts(["-"], "what?") == [Prompt("stdin", "grün", "what?")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \r\n\t", "holds only blanks"),
        (b"ab\0c", "NUL byte at 2"),
        (b"ab\xff", "byte 0xff at 2"),
        ("grün".encode("utf-16"), "UTF-16"),
        (b"%PDF-1.7 words", "PDF"),
        (b"PK\x03\x04 words", "docx"),
        (b"\x1f\x8b words", "gzip"),
        (b"\x89PNG\r\n\x1a\n", "an image (PNG)"),
        (b"\xff\xd8\xff\xe0\0", "an image (JPEG)"),
        (b"GGUF words", "GGUF"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, words):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    error = refused(read_document, str(path))
    assert str(path) in error.what
    assert words in error.what


@pytest.mark.parametrize(("name", "words"), [("missing.txt", "no such file"), (".", "is a directory")])
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    error = refused(read_document, name)
    assert error.what == f"{name}: {words}"


def test_an_unreadable_file_is_refused(monkeypatch):
    def deny(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", deny)
    assert refused(read_document, "secret.txt").what == "secret.txt: permission denied"


def test_a_path_that_cannot_exist_is_refused():
    assert "cannot be read" in refused(read_document, "a\0b").what
    assert "cannot be read" in refused(read_document, "x" * 5000).what


def test_a_prompt_without_documents_stands_alone():
    assert read_prompts([], "hello") == [Prompt("prompt", "hello")]


def test_one_bad_document_of_several_fails_alone(tmp_path):
    good = tmp_path / "good.txt"
    good.write_text("words\n")
    first, second = read_prompts([str(tmp_path / "missing.txt"), str(good)], "why?")
    assert isinstance(first, FailedPrompt)
    assert "no such file" in first.error.what
    assert second == Prompt(str(good), "words\n", "why?")


def test_nothing_to_read_is_refused_with_an_example():
    assert "kvcli generate" in refused(read_prompts, [], None).hint
    refused(read_prompts, [], " \n")
    refused(read_prompts, ["-", "-"], None)


def test_the_question_follows_the_document_after_a_blank_line():
    assert Prompt("x", "document\n", "question?").content == "document\n\nquestion?"
    assert Prompt("x", "document\n").content == "document\n"


def test_a_question_is_also_encoded_alone():
    tokenizer = tiny_tokenizer(chat=True)
    assert tokenizer.decode(encode_question(Prompt("x", "the fox", "why?"), tokenizer)) == "why?"
    assert encode_question(Prompt("x", "the fox"), tokenizer) == []


def test_the_chat_template_wraps_system_and_prompt():
    tokenizer = tiny_tokenizer(chat=True)
    ids = encode(Prompt("x", "the fox", "why?"), Template(system="be brief"), tokenizer)
    assert tokenizer.decode(ids) == "<s><system>be brief\n<user>the fox\n\nwhy?\n<assistant>"
    assert ids.count(tokenizer.bos_token_id) == 1


def test_template_variables_reach_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mood }}: {{ messages[0]['content'] }}"
    assert tokenizer.decode(encode(Prompt("x", "dog"), Template(kwargs={"mood": "calm"}), tokenizer)) == "calm: dog"


@pytest.mark.parametrize(("chat", "raw"), [(True, True), (False, False), (False, True)])
def test_without_a_template_the_text_is_encoded_as_it_stands(chat, raw):
    tokenizer = tiny_tokenizer(chat)
    assert encode(Prompt("x", "the fox"), Template(raw=raw), tokenizer) == tokenizer("the fox")["input_ids"]


def test_a_system_message_needs_a_template():
    assert "--raw" in refused(encode, Prompt("x", "a"), Template(system="b", raw=True), tiny_tokenizer()).what
    assert "no chat template" in refused(encode, Prompt("x", "a"), Template(system="b"), tiny_tokenizer(False)).what
    assert "no effect" in refused(encode, Prompt("x", "a"), Template(kwargs={"c": 1}), tiny_tokenizer(False)).what


def test_a_template_that_refuses_says_why():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    error = refused(encode, Prompt("x", "a"), Template(system="b"), tokenizer)
    assert "no system role here" in error.what
    assert "--raw" in error.hint


def test_template_variables_cannot_replace_what_kvcli_sets():
    assert (
        "'tokenize'" in refused(encode, Prompt("x", "a"), Template(kwargs={"tokenize": False}), tiny_tokenizer()).what
    )


def test_a_prompt_of_no_tokens_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ '' }}"
    assert "gives no text" in refused(encode, Prompt("doc.txt", "a"), Template(), tokenizer).what


def test_binary_data_without_an_end_is_refused_at_once(monkeypatch):
    assert "NUL byte at 0" in refused(read_document, "/dev/zero").what
    monkeypatch.setattr("kvcli.inputs.prompts._LONGEST", 1 << 20)
    endless = types.SimpleNamespace(read=lambda size: b"y\n" * (size // 2))
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=endless))
    assert "more than" in refused(read_document, "-").what


WORD = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
    "<w:p><w:r><w:t>The fox signed it.</w:t></w:r></w:p></w:body></w:document>"
)
CONTENT_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" ContentType='
    '"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="rId1" Type='
    '"http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/>'
    "</Relationships>"
)


def word(path):
    with zipfile.ZipFile(path, "w") as file:
        parts = {"[Content_Types].xml": CONTENT_TYPES, "_rels/.rels": RELATIONS, "word/document.xml": WORD}
        for name, text in parts.items():
            file.writestr(name, text)


def pdf(path):
    shown = b"BT /F1 12 Tf 72 700 Td (The fox signed it.) Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >> stream\n%s\nendstream" % (len(shown), shown),
    ]
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(data)
    path.write_bytes(data + b"xref\n0 5\n0000000000 65535 f \n" + table + trailer)


def page(path):
    path.write_text("<html><script>no()</script><body><p>The <b>fox</b> signed it.</p></body></html>")


MAKERS = {"report.docx": word, "report.PDF": pdf, "page.html": page}


@pytest.mark.parametrize("name", MAKERS)
def test_they_become_text(tmp_path, name):
    pytest.importorskip("markitdown")
    MAKERS[name](tmp_path / name)
    assert read_document(str(tmp_path / name)).replace("*", "").strip() == "The fox signed it."


@pytest.mark.parametrize("name", MAKERS)
def test_without_the_converter_there_is_a_way_out(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "markitdown", None)
    MAKERS[name](tmp_path / name)
    with pytest.raises(KvcliError, match="not plain text") as caught:
        read_document(str(tmp_path / name))
    assert "pip install 'kvcli[documents]'" in caught.value.hint


@pytest.mark.parametrize("name", ["report.docx", "report.pdf"])
def test_broken_ones_are_one_line(tmp_path, name):
    pytest.importorskip("markitdown")
    (tmp_path / name).write_bytes({"report.docx": b"PK\x03\x04 broken", "report.pdf": b"%PDF-1.7 broken"}[name])
    with pytest.raises(KvcliError, match="cannot be converted") as caught:
        read_document(str(tmp_path / name))
    assert "\n" not in caught.value.what
