"""Which rows come together, and in which order."""

import pytest

from kvcli.batch.jobs import Job, common_tokens, prefixes
from kvcli.batch.order import TOGETHER, Shard, grouped, work
from kvcli.batch.source import Line
from kvcli.errors import KvcliError
from kvcli.inputs.options import Sampling


def job(number, ids, max_tokens=8, document=None, size=None):
    known = {"size": len(ids) if size is None else size, "document": number if document is None else document}
    sampling = Sampling(max_tokens)
    return Job(
        Line(number, 0, 0), f"r{number}", "", sampling, tokens=len(ids), prefixes=prefixes(ids), **known
    )  # fmt: skip


def test_what_rows_have_in_common_is_missed_by_half_at_most():
    ids = list(range(5000))
    whole = job(0, ids)
    for same in (10, 64, 100, 1000, 4096, 4999):
        found = common_tokens(whole, job(1, [*ids[:same], *range(9000, 9500)]))
        assert found <= same < 2 * max(found, 64)
    assert common_tokens(whole, job(1, ids[:63])) == 0


def test_questions_on_a_document_come_together_and_long_rows_first():
    documents = [[start + n for n in range(400)] for start in (0, 10_000)]
    asked = [job(n, [*documents[n % 2], 50_000 + n]) for n in range(6)]
    long, short = job(6, [7, 8, 9], max_tokens=500), job(7, [7, 8], max_tokens=2)
    groups = grouped([short, *asked, long])
    assert groups[0] == [long]
    assert groups[-1] == [short]
    assert {frozenset(each.line.number % 2 for each in group) for group in groups[1:3]} == {
        frozenset([0]),
        frozenset([1]),
    }
    assert [max(map(work, group)) for group in groups] == sorted((max(map(work, g)) for g in groups), reverse=True)


def test_a_large_group_is_cut_so_that_its_long_rows_need_not_wait():
    ids = list(range(200))
    groups = grouped([job(n, [*ids, n + 500], max_tokens=900 if n == 150 else 5) for n in range(200)])
    assert max(map(len, groups)) == TOGETHER
    assert any(each.line.number == 150 for each in groups[0])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_shards_share_all_rows_evenly_and_keep_documents_together(count):
    jobs = [job(n, [n], document=n // 4, size=100 + n) for n in range(80)]
    shards = [Shard(number, count).jobs(jobs) for number in range(1, count + 1)]
    assert sorted(each.line.number for shard in shards for each in shard) == list(range(80))
    loads = [sum(each.size for each in shard) for shard in shards]
    assert max(loads) < 1.2 * min(loads)
    homes = [{each.document for each in shard} for shard in shards]
    assert sum(map(len, homes)) == 20


def test_one_document_alone_keeps_all_shards_busy():
    jobs = [job(n, [n], document=1, size=100) for n in range(40)]
    assert [len(Shard(number, 4).jobs(jobs)) for number in (1, 2, 3, 4)] == [10, 10, 10, 10]


@pytest.mark.parametrize("text", ["0/4", "5/4", "a/b", "3", "1/", "-1/4"])
def test_names_of_shards_that_are_none(text):
    with pytest.raises(KvcliError, match="is not I/N"):
        Shard.named(text, {})
