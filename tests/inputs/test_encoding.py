"""Where in a prompt's tokens its document ends."""

import pytest

from kvcli.inputs.encoding import document_tokens

DOCUMENT = list(range(100, 140))


@pytest.mark.parametrize(
    ("behind", "question", "found"),
    [
        ([1, 2, 3, 4, 9, 9], [1, 2, 3, 4], 40),
        ([1, 2, 3, 4], [1, 2, 3, 4], 40),
        ([77, 2, 3, 4, 9], [1, 2, 3, 4], 40),  # what came before it has changed its first token
        ([77, 2, 3, 88, 9], [1, 2, 3, 4], 40),  # what came behind it its last one, too
        ([1, 2, 1, 2, 9], [1, 2], 42),  # the last of several
        ([5, 6, 7], [1, 2], 43),  # not there
        ([5, 6, 7], [], 43),
        ([1, 2], [1], 40),
    ],
)
def test_the_document_ends_where_its_question_begins(behind, question, found):
    assert document_tokens(DOCUMENT + behind, question) == found


def test_a_question_before_the_document_ends_none():
    assert document_tokens([1, 2, 3, *DOCUMENT], [1, 2, 3]) == 43
    assert document_tokens([1, 2, 3, *DOCUMENT, 1, 2, 3], [1, 2, 3]) == 43
