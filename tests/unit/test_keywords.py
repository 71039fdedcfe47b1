"""The keyword classifier: rules from data, whole words only, silence where there is no evidence."""

from __future__ import annotations

import json
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.domains.base import DOMAINS
from moe_proxy.domains.keywords import KeywordClassifier
from moe_proxy.errors import ConfigError

SHIPPED = KeywordClassifier.shipped()

CASES = [
    ("print hello world", "codegen"),
    ("Write a Python function that merges two sorted lists", "codegen"),
    ("implement a rate limiter in Go", "codegen"),
    ("Translate this Python function to JavaScript: def f(x): return x + 1", "codegen"),
    ("用Python写一个排序函数", "codegen"),
    ("请用 Java 实现一个链表", "codegen"),
    ("SELECT name FROM users WHERE id = 7 ORDER BY name, why is this slow?", "debug codegen"),
    (
        'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nKeyError: 3\n\nfix this',
        "debug",
    ),
    ("My program keeps crashing with a segmentation fault", "debug"),
    ("thread 'main' panicked at src/main.rs:4:5: index out of bounds. What is wrong?", "debug"),
    ("程序运行时报错，怎么修复？", "debug"),
    ("Prove that every bounded monotone sequence converges.", "math"),
    ("Give a proof that the square of an odd integer is odd.", "math"),
    ("A baker sells 12 cakes a day for 5 days. How many cakes is that?", "math"),
    ("证明根号二是无理数", "math"),
    ("Every knight tells the truth and every knave lies. Who is lying?", "logic"),
    ("All cats are animals. Some animals are black. Does it follow that some cats are black?", "logic"),
    ("甲说乙在说谎，乙说丙在说谎，谁说的是真话？", "logic"),
    ("Quelle est la capitale de la France ?", "general_qa"),
    ("What class of drugs is aspirin?", "general_qa"),
    ("Who painted the Mona Lisa?", "general_qa"),
    ("Wo liegt der höchste Berg Europas?", "general_qa"),
    ("世界上最高的山在哪个国家？", "general_qa"),
    ("Docker 容器怎么限制内存", "chinese_tech"),
    ("如何配置服务器的负载均衡和缓存", "chinese_tech"),
    ("a blog post about catalog design", "creative_write"),
    ("Write a short story about a lighthouse", "creative_write"),
    ("Compose a haiku on rain", "creative_write"),
    ("写一首关于秋天的诗", "creative_write"),
    ("Translate to German: the function raises a TypeError when the array is empty", "translate"),
    ("Translate to French: prove that the integral of x^2 converges", "translate"),
    (
        "Please translate the following text into Spanish: Docker limits the memory of a container",
        "translate",
    ),
    ("How do you say good night in Italian?", "translate"),
    ("请把下面的句子翻译成英文：服务器的内存不够了", "translate"),
]


@pytest.mark.parametrize(("text", "domains"), CASES)
def test_cases_that_must_come_out_right(text: str, domains: str) -> None:
    """The texts that the specification and common sense name come out right."""
    assert SHIPPED.classify(text).domain in domains.split()


@pytest.mark.parametrize(
    "text", ["今日はいい天気ですね。元気ですか？", "こんにちは、私は学生です。昨日映画を見ました。"]
)
def test_japanese_is_not_chinese(text: str) -> None:
    """Japanese small talk: abstain or general_qa, not chinese_tech."""
    assert SHIPPED.classify(text).domain in (None, "general_qa")


@pytest.mark.parametrize("text", ["", "   \n", "xyzzy", "мне скучно", "안녕하세요", "🙂🙂", "\x00\ud800"])
def test_no_evidence_no_answer(text: str) -> None:
    """Without evidence it abstains."""
    answer = SHIPPED.classify(text)
    assert (answer.distribution, answer.domain, answer.classifier) == ({}, None, "keyword")


@pytest.mark.parametrize(
    ("inside", "domain"),
    [
        ("la capitale", "creative_write"),
        ("catalog logs", "debug"),
        ("proofreading", "math"),
        ("blogic", "logic"),
    ],
)
def test_words_end_at_word_boundaries(inside: str, domain: str) -> None:
    """A word inside another word is no evidence: "la capitale" is no tale, "catalog" no log."""
    assert SHIPPED.scores(inside)[domain] == 0


def test_case_does_not_matter() -> None:
    """Upper and lower case are the same, in words and in patterns."""
    text = "Fix this TypeError, please: it's not working"
    assert SHIPPED.scores(text) == SHIPPED.scores(text.upper()) == SHIPPED.scores(text.replace("'", "’"))
    assert SHIPPED.classify(text).domain == "debug"


RULES = {
    "format": "moe-keywords/1",
    "minimum_score": 1.0,
    "rules": [
        {"name": "a", "domain": "math", "weight": 2, "cap": 3, "terms": ["prime number", "prime"]},
        {
            "name": "b",
            "domain": "logic",
            "weight": 1,
            "cap": 9,
            "patterns": [{"if": ["if"], "match": "if \\w+"}],
        },
        {"name": "c", "domain": "debug", "weight": 0.5, "cap": 9, "terms": ["c++"], "han": ["报错"]},
    ],
}


def test_scores_and_distribution() -> None:
    """Distinct terms add their weight up to the cap; the distribution is the softmax of the scores."""
    rules = KeywordClassifier.from_json(json.dumps(RULES), "test")
    assert rules.scores("prime, prime, prime")["math"] == 2
    assert rules.scores("a prime number")["math"] == 3
    assert rules.scores("a prime number if so")["logic"] == 1
    answer = rules.classify("if prime").distribution
    assert set(answer) == set(DOMAINS)
    assert sum(answer.values()) == pytest.approx(1.0)
    assert answer["math"] / answer["logic"] == pytest.approx(2.718281828)
    assert rules.classify("C++").distribution == {}


def test_han_terms_and_words_in_han_text() -> None:
    """Han terms need no boundary; Latin words inside Han text are words."""
    rules = KeywordClassifier.from_json(json.dumps(RULES), "test")
    assert rules.scores("程序报错了")["debug"] == 0.5
    assert rules.scores("用C++写")["debug"] == 0.5
    assert rules.scores("このプログラムは报错です")["debug"] == 0


def test_both_ends_of_a_long_text_count() -> None:
    """Of a long text the head and the tail are read: an order stands at one of them."""
    filler = "lorem ipsum " * 5000
    assert SHIPPED.classify("Translate to German: " + filler).domain == "translate"
    assert SHIPPED.classify(filler + "\nFix this bug, it is not working").domain == "debug"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "moe-keywords/1"}',
        json.dumps(RULES | {"rules": [{"name": "a"}]}),
        json.dumps(RULES | {"rules": [RULES["rules"][0] | {"domain": "poetry"}]}),  # type: ignore[index,operator]
        json.dumps(RULES | {"rules": [RULES["rules"][0] | {"patterns": ["("]}]}),  # type: ignore[index,operator]
        json.dumps(RULES | {"rules": [RULES["rules"][0] | {"script": "klingon"}]}),  # type: ignore[index,operator]
        json.dumps(RULES | {"rules": [RULES["rules"][0] | {"terms": ["!"]}]}),  # type: ignore[index,operator]
    ],
)
def test_malformed_rules_are_refused(text: str) -> None:
    """A rule file that is malformed is refused with its name."""
    with pytest.raises(ConfigError, match=r"rules\.json"):
        KeywordClassifier.from_json(text, "rules.json")


@given(st.text())
def test_any_text_has_a_distribution_or_none(text: str) -> None:
    """Whatever the text is, the answer is a distribution over the domains or an abstention."""
    distribution = SHIPPED.classify(text).distribution
    assert not distribution or sum(distribution.values()) == pytest.approx(1.0)


def median_ms(text: str, rounds: int = 15) -> float:
    """Processor time of one classification."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        SHIPPED.classify(text)
        times.append(time.thread_time() - start)
    return 1000 * statistics.median(times)


def test_it_is_quick() -> None:
    """Quick enough for the request path at any length (bounds with room for a slow machine under load)."""
    prose = (
        "What is wrong with this? I want to write about the history of it, and if it rains, then all is wet. "
    )
    assert median_ms((prose * 20)[:2000]) < 5
    assert median_ms((prose * 2000)[:200_000]) < 15
    for hostile in (
        "a" * 200_000,
        "if " * 70_000,
        " " * 200_000,
        "如果" * 100_000,
        "select " * 30_000,
        "1 " * 100_000,
    ):
        assert median_ms(hostile, rounds=5) < 50
