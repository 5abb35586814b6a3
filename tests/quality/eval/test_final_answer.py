"""The final answer of a text that reasons: what counts as it, and whether it is right."""

import threading

import pytest

from kvcli.quality.eval.final_answer import boxed, said
from kvcli.quality.eval.scorers import score, why_unscorable


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"first \boxed{1}, no, \boxed{2}", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{3} and then it was cut: \boxed{\frac{1", "3"),
        (r"a set {1} } and \boxed{4}", "4"),
        (r"\begin{matrix}1\\{2}\end{matrix} \boxed{4}", "4"),
        (r"\boxed{", None),
        ("5", None),
        (r"\boxed{" * 3000, None),
        (r"\boxed{" * 3000 + "7" + "}" * 3000, "7"),
    ],
)
def test_the_last_whole_box_counts(text, wanted):
    assert boxed(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The answer is 5.\nDone.", "5."),
        ("Answer: 5\nFinal answer:\n\n **7**", "7**"),
        ("**Answer**: B", "B"),
        ("answers vary: 5", ""),
        ("5", ""),
    ],
)
def test_without_a_box_the_line_after_the_last_answer_counts(text, wanted):
    assert said(text) == wanted


@pytest.mark.parametrize(
    ("text", "reference", "wanted"),
    [
        (r"\boxed{204}", "204", 1),
        (r"\boxed{025}", "25", 1),
        (r"\boxed{0}", "0", 1),
        (r"\boxed{m+n = 204}", "204", 1),
        (r"\boxed{\text{204}}", "204", 1),
        (r"\boxed{204\text{ cm}^\circ}", "204", 1),
        (r"\boxed{\$204}", "204", 1),
        (r"\boxed{204.0}", "204", 1),
        (r"\boxed{\textbf{(073)}}", "73", 1),
        (r"\boxed{1{,}000}", "1000", 1),
        (r"\boxed{204.5}", "204", 0),
        (r"\boxed{204\pi}", "204", 0),
        (r"\boxed{\sqrt{204}}", "204", 0),
        (r"\boxed{\frac{204}{1}}", "1", 0),
        (r"\boxed{-204}", "204", 0),
        (r"\boxed{203} or \boxed{204}", "204", 1),
        (r"\boxed{204} or \boxed{203}", "204", 0),
        (r"<think>\boxed{204}</think> It is \boxed{203}.", "204", 0),
        (r"<think>\boxed{204}</think> I do not know.", "204", 0),
        (r"<think>\boxed{203}</think> \boxed{204}", "204", 1),
        ("The answer is $m + n = 25 + 179 = 204$.", "204", 1),
        ("The answer is 1,204.", "1204", 1),
        ("The answer is 204, which is 2 more.", "204", 0),
        ("204", "204", 0),
        ("The answer is unknown.", "204", 0),
        ("9" * 5000, "204", 0),
        (r"\boxed{" + "9" * 5000 + "}", "204", 0),
    ],
)
def test_integers(text, reference, wanted):
    assert score("final_integer", text, [reference]) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\boxed{B}", 1),
        (r"\boxed{\text{B}}", 1),
        (r"\boxed{\textbf{(B) } 5}", 1),
        (r"\boxed{B. A proton}", 1),
        (r"\boxed{A}, no, \boxed{B}", 1),
        (r"\boxed{C_2H_6}", 0),
        (r"\boxed{B^2}", 0),
        (r"\boxed{B-glucose}", 0),
        (r"\boxed{E}", 0),
        ("Answer: B. A proton has it.", 1),
        ("The correct answer is (B)", 1),
        ("**Answer: $B$**", 1),
        ("The answer is a B", 1),
        ("A or B", 0),
        ("", 0),
    ],
)
def test_letters(text, wanted):
    assert score("final_letter", text, ["B"]) == wanted


@pytest.mark.parametrize(
    ("text", "reference", "wanted"),
    [
        (r"\boxed{\dfrac{28}{6}}", r"\frac{14}{3}", 1),
        (r"\boxed{14/3}", r"\frac{14}{3}", 1),
        (r"\boxed{4.67}", r"\frac{14}{3}", 0),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        (r"\boxed{(\pi/2, 3)}", r"\left( 3, \frac{\pi}{2} \right)", 0),
        (r"\boxed{\{2, 1\}}", r"1, 2", 1),
        (r"\boxed{\{2, 1, 3\}}", r"1, 2", 0),
        (r"\boxed{10\text{ cm}}", "10", 1),
        (r"\boxed{90}", r"90^\circ", 1),
        (r"\boxed{\$32{,}348}", "32348", 1),
        (r"\boxed{$5$}", "5", 1),
        (r"\boxed{\sqrt{117}}", r"3\sqrt{13}", 1),
        (r"\boxed{2(k+1)}", "2k+2", 1),
        (r"\boxed{x = 5}", "5", 1),
        (r"\boxed{\text{evelyn}}", r"\text{Evelyn}", 1),
        (r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        (r"\boxed{1} and \boxed{2}", "2", 1),
        (r"\boxed{2} and \boxed{1}", "2", 0),
        (r"The answer is $\frac{28}{6}$.", r"\frac{14}{3}", 1),
        ("The final answer is: 7.", "7", 1),
        ("7", "7", 0),
        (r"\boxed{}", "7", 0),
        (r"\boxed{no \frac{1}{}", "7", 0),
        (r"<think>\boxed{7}</think>", "7", 0),
    ],
)
def test_mathematics(text, reference, wanted, caplog):
    pytest.importorskip("math_verify")
    assert score("math_verify", text, [reference]) == wanted
    assert not caplog.records


def test_a_tower_of_powers_is_given_up(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("kvcli.quality.eval.final_answer._PATIENCE", 1)
    assert score("math_verify", r"\boxed{9^{9^{9}}}", ["5"]) == 0


def test_mathematics_is_compared_in_other_threads_as_well():
    pytest.importorskip("math_verify")
    found = []
    thread = threading.Thread(target=lambda: found.append(score("math_verify", r"\boxed{14/2}", ["7"])))
    thread.start()
    thread.join()
    assert found == [1]


def test_references_that_cannot_be_reached_are_refused():
    assert "numbers" in why_unscorable("final_integer", ["025"], ())
    assert why_unscorable("final_integer", ["25", "0", "-7"], ()) is None
    assert "letter" in why_unscorable("final_letter", ["E"], ())
    assert why_unscorable("final_letter", ["A", "D"], ()) is None
