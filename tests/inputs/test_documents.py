"""Documents of other kinds than text."""

import sys
import zipfile

import pytest

from kvcli.errors import KvcliError
from kvcli.inputs.prompts import read_document

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
