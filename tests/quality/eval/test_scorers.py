"""Each scorer against worked examples of the benchmark it follows."""

import pytest

from kvcli.errors import KvcliError
from kvcli.quality.eval import scorers
from kvcli.quality.eval.scorers import SCORERS, score


@pytest.mark.parametrize(
    ("metric", "text", "references", "wanted"),
    [
        # RULER: string_match_all is the share of the references found, string_match_part the best of them.
        ("recall", "They are 12345 and 777.", ["12345", "777", "9"], 2 / 3),
        ("recall", "AMBER", ["amber"], 1),
        ("contains", "It was in Paris.", ["London", "paris"], 1),
        ("contains", "It was in Rome.", ["London", "paris"], 0),
        # LongBench and InfiniteBench, question answering: articles, case and punctuation do not count.
        ("qa_f1", "The Eiffel Tower.", ["eiffel tower"], 1),
        ("qa_f1", "in the Eiffel tower of Paris", ["eiffel tower"], 2 * (2 / 5) * 1 / (2 / 5 + 1)),
        ("qa_f1", "yes yes no", ["yes yes"], 0.8),
        ("qa_f1", "a Paris", ["Rome", "Paris, France"], 2 / 3),
        ("qa_f1", "", ["Rome"], 0),
        ("qa_f1_zh", "北京，中国。", ["中国北京"], 1),
        ("character_f1", "北京！", ["北京市"], 0.8),
        # The package rouge gives 2pr / (p + r + 1e-8) over distinct words.
        ("rouge_l", "the cat sat on the mat", ["the cat was on the mat"], 0.8),
        ("rouge_l", "a b c d", ["a c"], 2 * 0.5 / 1.5),
        ("rouge_l", "", ["the cat"], 0),
        ("rouge_l", "one", ["two", "one"], 1),
        ("rouge_l_zh", "今天天气", ["今天天气"], 1),
        ("rouge_lsum", "the cat sat\nit slept", ["it slept\nthe cat sat"], 1),
        ("rouge_lsum", "a b c d", ["a c"], 2 / 3),
        # Edit similarity of the first line that is code: 2 * matches / both lengths, in whole per cent.
        ("code_similarity", "\n# a comment\nreturn x + 1\nmore", ["return x + 1"], 1),
        ("code_similarity", "abcd", ["abed"], 0.75),
        ("code_similarity", "`only marks`", ["x = 1"], 0),
        ("count", "There are 12, no, 13.", ["13"], 0.5),
        ("count", "none", ["13"], 0),
        ("retrieval", "Paragraph 7", ["Paragraph 7"], 1),
        ("retrieval", "Paragraph 7 or 8 or 7", ["Paragraph 7"], 2 / 3),
        ("retrieval", "段落3", ["段落3"], 1),
        # LongBench v2: the pattern of its pred.py.
        ("choice_in_sentence", "The correct answer is (B).", ["B"], 1),
        ("choice_in_sentence", "**The correct answer is B**", ["B"], 1),
        ("choice_in_sentence", "The correct answer is (A), not (B)", ["B"], 0),
        ("choice_in_sentence", "B", ["B"], 0),
        ("choice_in_sentence", "the correct answer is (B)", ["B"], 0),
        # InfiniteBench.
        ("first_integer", "It is 71432, not 5.", ["71432"], 1),
        ("first_integer", "none", ["71432"], 0),
        ("word", '"a-b": "c-d".', ["c-d"], 1),
        ("word", "xc-d", ["c-d"], 0),
        ("name", "I think: Mulder!", ["MULDER"], 1),
        ("name", "Scully", ["MULDER"], 0),
        ("last_integer", "The value is -7.", ["-7"], 1),
        ("last_integer", "7 of them", ["7"], 0),
        ("first_number", "It is 0.5 or 3", ["0.5"], 1),
        ("first_number", "12 and 13", ["12"], 1),
        ("first_number", "12.5", ["12"], 0),
        ("leading_integers", "[1, 4, 9, 8]", ["1", "4", "8", "8"], 0.5),
        ("leading_integers", "1", ["1", "4"], 0.5),
        ("choice", "B. because", ["the second", "B"], 1),
        ("choice", "Answer is C", ["the third", "C"], 0),  # its first letter is one of the four
        ("choice", "I say the answer is: D", ["the fourth", "D"], 1),
        ("choice", "I say the answer is: the fourth", ["the fourth", "D"], 1),
        ("choice", "the answer is", ["the fourth", "D"], 0),
        ("choice", "so it must be B, not D", ["the fourth", "D"], 0),
        ("choice", "the fourth", ["the fourth", "D"], 1),
        ("choice", "", ["the fourth", "D"], 0),
        ("function_choice", "B: parse", ["parse", "B"], 1),
        ("function_choice", "The answer is: `parse`", ["parse", "B"], 1),
        ("function_choice", "The answer is: parse", ["parse", "B"], 1),
        ("function_choice", "The correct option is: C", ["parse", "B"], 0),
        ("function_choice", "parse", ["parse", "B"], 0),
        # MRCR: difflib gives 2 * matches / both lengths, after the prefix that must be there.
        ("mrcr", "aYabcd", ["aYabcd", "aY"], 1),
        ("mrcr", "aYabXd", ["aYabcd", "aY"], 2 * 3 / 8),
        ("mrcr", "abcd", ["aYabcd", "aY"], 0),
        ("mrcr", " aYabcd", ["aYabcd", "aY"], 0),
        ("mrcr", "", ["aYabcd", "aY"], 0),
        # LooGLE: the recall of ROUGE-L; masks that are named alike.
        ("rouge_l_recall", "the cat sat on the mat", ["the cat was on the mat"], 4 / 5),
        ("rouge_l_recall", "a b c d", ["a c"], 1),
        ("cloze", "{'<mask-0>': 'Ann', '<mask-1>': 'Rome'}", ['{"<mask-0>": "Ann", "<mask-1>": "Paris"}'], 1 / 2),
        ("cloze", '{"<mask-0>": "Ann"}', ['{"<mask-0>": "Ann"}'], 1),
        ("cloze", "['Ann']", ['{"<mask-0>": "Ann"}'], 0),
        ("cloze", "{'<mask-0>': open('x')}", ['{"<mask-0>": "Ann"}'], 0),
        ("cloze", "(" * 10_000, ['{"<mask-0>": "Ann"}'], 0),
        # HELMET: a label, and NDCG@10 of documents 7 (grade 3), 2 (grade 1) and others.
        ("label", " 12\ntext", ["12"], 1),
        ("label", "I say\nLabel: label: The 12.\n13", ["12"], 1),
        ("label", "112", ["12"], 0),
        ("ndcg_10", "ID7 > ID2 > ID9", ["7 3", "2 1"], 1),
        ("ndcg_10", "[2] > [7]\n3", ["7 3", "2 1"], (1 + 3 / 1.5849625) / (3 + 1 / 1.5849625)),
        ("ndcg_10", "9 > 9 > 7", ["7 3", "2 1"], (3 / 1.5849625) / (3 + 1 / 1.5849625)),  # 9 counts once
        ("ndcg_10", "7", ["7 3", "2 1"], 3 / (3 + 1 / 1.5849625)),
        ("ndcg_10", "11 > 12 > 13 > 14 > 15 > 16 > 17 > 18 > 19 > 20 > 7", ["7 3"], 0),
        ("ndcg_10", "no ranking", ["7 3"], 0),
        ("ndcg_10", "", ["7 3"], 0),
        # LOFT: the list behind "Final Answer:".
        ("recall_1", "TITLE: a | ID: 35\n\nFinal Answer: ['35', '7']", ["35"], 1),
        ("recall_1", "**Final Answer:** [35]", ["35", "36"], 1 / 2),
        ("recall_1", "Final Answer: ['7', '35']", ["35"], 0),
        ("recall_1", "Final Answer: [id1]", ["id1"], 0),  # no constant
        ("mrecall_2", "Final Answer: ['1', '2', '3']", ["2", "1"], 1),
        ("mrecall_2", "Final Answer: ['1', '3', '2']", ["2", "1"], 0),
        ("mrecall_3", "Final Answer: ['1', '2', '3']", ["1", "2", "3", "4"], 1),
        ("mrecall_5", "Final Answer: []", ["1"], 0),
        ("subspan", "Final Answer: ['in the city of Paris']", ["Rome", "paris"], 1),
        ("subspan", "Final Answer: ['Rome', 'Paris']", ["Paris"], 0),  # the first one decides
        ("subspan", "Final Answer: ['the devil's sleep']", ["Devils sleep"], 1),
        ("subspans", "Final Answer: ['Ann Lee', 'Bo']", ["Bo", "Ann"], 1),
        ("subspans", "Final Answer: ['Ann and Bo']", ["Bo", "Ann"], 0),  # one entry cannot stand for two
        ("subspans", "Final Answer: ['Ann Bo', 'Ann']", ["Ann", "Bo"], 1),  # the other way round
        ("same_rows", "Final Answer: [['gates', 2], ['Lambeau', 1]]", ['["Lambeau", 1.0]', '["Gates", "2.00"]'], 1),
        ("same_rows", "Final Answer: [28]", ["[28]"], 1),
        ("same_rows", "Final Answer: [[28], [28]]", ["[28]"], 0),
        ("first_entry", "Final Answer: ['(D)']", ["(D)"], 1),
        ("first_entry", "Final Answer: ['(A)', '(D)']", ["(D)"], 0),
    ],
)
def test_worked_examples(metric, text, references, wanted):
    assert score(metric, text, references) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Location", 1),
        ("Location or Number", 1 / 2),
        ("Other location", 0),  # the right one among the classes that are named decides
        ("nothing of it", 0),
    ],
)
def test_classification_shares_the_point_among_the_classes_named(text, wanted):
    assert score("classification", text, ["Location"], ["Location", "Number", "Other location"]) == wanted


def test_a_class_whose_name_is_part_of_the_right_one_does_not_count():
    classes = ["location", "Other location", "Number"]
    assert score("classification", "Other location", ["Other location"], classes) == 1
    assert score("classification", "location", ["Other location"], classes) == 0


def test_a_library_that_is_missing_is_named_with_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(scorers, "import_module", missing)
    with pytest.raises(KvcliError, match="needs rouge") as raised:
        scorers.check_installed("rouge_l")
    assert "kvcli[eval]" in raised.value.hint
    scorers.check_installed("qa_f1")


SEVERAL = {"classification", "function_choice", "mrcr", "ndcg_10"}  # references of a form of their own


@pytest.mark.parametrize("metric", sorted(SCORERS.keys() - SEVERAL))
def test_an_empty_answer_scores_nothing(metric):
    assert score(metric, "", ["12"]) == 0
