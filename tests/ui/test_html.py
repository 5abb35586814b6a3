"""The page as text; how it looks is for eyes."""

import json
import re
from html.parser import HTMLParser

import altair as alt
import pytest

from kvcli.errors import ExitCode, KvcliError
from kvcli.ui import html as page
from kvcli.ui.html import PALETTE, Page, check_installed, colour
from kvcli.ui.summary import Table

VOID = {"meta", "br", "link"}


class Tree(HTMLParser):
    """Checks that tags close in order, and collects them."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(html):
    tree = Tree()
    tree.feed(html)
    assert tree.open == []
    return tree.seen


@pytest.fixture
def bundle(monkeypatch):
    """The drawing library takes seconds to bundle."""
    monkeypatch.setattr(page, "_bundle", lambda: "/* vega */")


def bars():
    data = alt.Data(values=[{"phase": "</script><b>", "ms": 1.5}])
    return alt.Chart(data).mark_bar(color=colour(1)).encode(x="ms:Q", y="phase:N")


def test_all_parts_stand_in_the_file_and_nothing_else_is_fetched(bundle):
    content = Page("profile", "a model")
    content.section("Step <time>", "in & out")
    content.chart(bars(), "bars of a step")
    content.table(Table(("method", "ms"), [("full", "1.5"), ("<quest>", "0.5")]), "steps")
    content.facts([("device", "CPU"), ("tasks", ["vt", "<qa>"]), ("limit", None), ("files", {}), ("raw", {"a": 1})])
    html = content.render()
    tags = parsed(html)
    assert not [attrs for _, attrs in tags if "src" in attrs or "href" in attrs]
    assert "url(" not in html
    assert "@import" not in html
    for text in ("Step &lt;time&gt;", "in &amp; out", "&lt;quest&gt;", "<caption>steps</caption>", "<dd>CPU</dd>"):
        assert text in html
    for text in ("<dd>vt, &lt;qa&gt;</dd>", "<dd>a: 1</dd>"):
        assert text in html
    assert "limit" not in html
    assert "files" not in html
    assert len([tag for tag, _ in tags if tag == "tr"]) == 3


def test_a_chart_takes_width_and_colours_from_the_page(bundle):
    content = Page("profile")
    content.chart(bars(), "bars")
    (found,) = re.findall(r'<script type="application/vega-lite\+json">(.*?)</script>', content.render(), re.DOTALL)
    spec = json.loads(found)
    assert spec["width"] == "container"
    assert spec["mark"]["color"] == "var(--c1)"
    assert spec["config"]["axis"]["labelColor"] == "var(--muted)"
    assert spec["description"] == "bars"
    assert spec["data"]["values"] == [{"phase": "</script><b>", "ms": 1.5}]
    assert (
        next(iter(spec["datasets"].values()) if "datasets" in spec else iter([spec["data"]["values"]]))[0]["ms"] == 1.5
    )


def test_the_library_is_bundled_once_and_only_where_something_is_drawn(monkeypatch):
    calls = []
    monkeypatch.setattr(page, "_bundle", lambda: calls.append(1) or "/* vega */")
    assert "/* vega */" not in Page("nothing").render()
    assert calls == []
    content = Page("two")
    content.chart(bars(), "one")
    content.chart(bars(), "other")
    assert content.render().count("/* vega */") == 1


def test_every_colour_has_a_value_for_light_and_dark():
    html = Page("colours").render()
    for name in (*PALETTE, "var(--ink)", "var(--muted)", "var(--line)", "var(--paper)", "var(--accent)"):
        assert len(re.findall(rf"^\s+{name[4:-1]}: #[0-9a-f]{{6}};$", html, re.MULTILINE)) == 2
    assert colour(len(PALETTE)) == PALETTE[0]


def test_a_missing_library_is_said_with_the_way_out(monkeypatch):
    check_installed()
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "vl_convert" else object())
    with pytest.raises(KvcliError) as error:
        check_installed()
    assert error.value.exit_code == ExitCode.USAGE
    assert "vl_convert" in error.value.what
    assert "kvcli[html]" in error.value.hint
