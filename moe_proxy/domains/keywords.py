"""Owns the classifier that needs nothing: rules from ``keywords.json``. It learns nothing and keeps nothing.

A rule belongs to a domain. Its weight is the evidence, in nats of log-odds, that each distinct term found
adds to the domain's score, up to the rule's cap. The distribution is the softmax of the scores over all
domains; below a minimum score the classifier abstains.

Everything is compared in lower case. Terms are whole words or runs of words. Han text has no word boundaries,
so Han terms are looked for as they are, in texts that are not Japanese. A pattern may name literals of which
one must occur before it is tried: finding a literal costs next to nothing, a regular expression does not.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moe_proxy.domains.base import DOMAINS, Classification
from moe_proxy.errors import ConfigError

FORMAT = "moe-keywords/1"

_EDGE_CHARACTERS = 750
"""Characters read from each end of a long text: an order stands at its beginning or at its end.

Rules cost time by the character, on the way of a request.
"""
_KANA_SHARE = 0.1
"""Kana per Han character from which a text is Japanese, not Chinese with a quoted word."""

# Words end where the script changes, so that Latin words inside Han text are words. C++ and C# are words.
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+(?:'[^\W\u3040-\u9fff]+)*(?:\+\+|#)?")
_ASCII_WORD = re.compile(r"[a-z0-9_]+(?:'[a-z0-9_]+)*(?:\+\+|#)?")


@dataclass(frozen=True)
class Pattern:
    """A regular expression over lower-case text, tried when one of ``literals`` (none: always) occurs."""

    literals: tuple[str, ...]
    match: re.Pattern[str]

    def found_in(self, text: str) -> bool:
        """Whether it occurs in ``text``, which is in lower case."""
        # Written out: this runs for every pattern on every prompt, and a generator costs more than its work.
        if self.literals:
            for literal in self.literals:
                if literal in text:
                    break
            else:
                return False
        return self.match.search(text) is not None


@dataclass(frozen=True)
class Rule:
    """Evidence for one domain. ``script`` limits it to texts of that script ("chinese", or "" for all)."""

    name: str
    domain: str
    weight: float
    cap: float
    script: str
    terms: tuple[str, ...]
    han: tuple[str, ...]
    patterns: tuple[Pattern, ...]


class KeywordClassifier:
    """Scores a text by rules; see the module's text for how scores become a distribution."""

    name = "keyword"
    slow = False

    def __init__(self, rules: Sequence[Rule], minimum_score: float) -> None:
        self._rules = tuple(rules)
        self._minimum_score = minimum_score
        self._of_term: dict[str, list[int]] = defaultdict(list)
        # Runs of words by their first word, and Han terms by their first character: few of them are tried.
        self._runs: dict[str, list[str]] = defaultdict(list)
        self._han: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._patterns = [
            (number, pattern) for number, rule in enumerate(self._rules) for pattern in rule.patterns
        ]
        for number, rule in enumerate(self._rules):
            for term in rule.terms:
                words = _WORD.findall(term.lower())
                if not words:
                    raise ValueError(f"the term {term!r} of {rule.name!r} holds no word")
                run = " ".join(words)
                self._of_term[run].append(number)
                if len(words) > 1 and run not in self._runs[words[0]]:
                    self._runs[words[0]].append(run)
            for term in rule.han:
                self._han[term[0]].append((term, number))

    @classmethod
    def shipped(cls) -> KeywordClassifier:
        """The classifier with the rules of the package, compiled once."""
        return _shipped()

    @classmethod
    def from_json(cls, text: str, source: str) -> KeywordClassifier:
        """The classifier with the rules of ``text``. Raises ConfigError naming ``source`` and the rule."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON ({error})", "see the shipped keywords.json") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConfigError(f"{source} is not of the format {FORMAT}", "see the shipped keywords.json")
        try:
            rules = [_rule(entry) for entry in document["rules"]]
            return cls(rules, float(document["minimum_score"]))
        except (KeyError, TypeError, ValueError, IndexError, re.error) as error:
            raise ConfigError(
                f"{source} has a malformed rule ({type(error).__name__}: {error})",
                "see the shipped keywords.json",
            ) from error

    def classify(self, text: str) -> Classification:
        """Distribution over all domains, or an abstention where there is too little evidence."""
        scores = self.scores(text)
        highest = max(scores.values())
        if highest < self._minimum_score:
            return Classification({}, self.name)
        odds = {domain: math.exp(score - highest) for domain, score in scores.items()}
        total = sum(odds.values())
        return Classification({domain: value / total for domain, value in odds.items()}, self.name)

    def scores(self, text: str) -> Mapping[str, float]:
        """Evidence for each domain, in nats; all 0 when no rule finds anything."""
        if len(text) > 2 * _EDGE_CHARACTERS:
            text = f"{text[:_EDGE_CHARACTERS]}\n{text[-_EDGE_CHARACTERS:]}"
        text = text.lower().replace("’", "'")
        chinese = _is_chinese(text)
        found = self._terms_found(text, chinese)
        scores = dict.fromkeys(DOMAINS, 0.0)
        for number, pattern in self._patterns:
            if pattern.found_in(text):
                found[number] += 1
        for number in sorted(found):
            rule = self._rules[number]
            if chinese or not rule.script:
                scores[rule.domain] += min(found[number] * rule.weight, rule.cap)
        return scores

    def _terms_found(self, text: str, chinese: bool) -> defaultdict[int, int]:
        """Number of distinct terms found, by rule."""
        words = (_ASCII_WORD if text.isascii() else _WORD).findall(text)
        distinct = set(words)
        terms = distinct & self._of_term.keys()
        joined = f" {' '.join(words)} "
        for first in distinct & self._runs.keys():
            terms.update(run for run in self._runs[first] if f" {run} " in joined)
        found: defaultdict[int, int] = defaultdict(int)
        for term in terms:
            for number in self._of_term[term]:
                found[number] += 1
        if chinese:
            for first in set(text) & self._han.keys():
                for term, number in self._han[first]:
                    if term in text:
                        found[number] += 1
        return found


def _is_chinese(text: str) -> bool:
    if text.isascii():
        return False
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    han = int(np.count_nonzero((points >= 0x3400) & (points <= 0x9FFF)))
    kana = int(np.count_nonzero((points >= 0x3040) & (points <= 0x30FF)))
    return han >= 2 and kana < _KANA_SHARE * han


def _rule(entry: Mapping[str, Any]) -> Rule:
    if entry["domain"] not in DOMAINS:
        raise ValueError(f"unknown domain {entry['domain']!r}")
    if entry.get("script", "") not in ("", "chinese"):
        raise ValueError(f"unknown script {entry['script']!r}")
    return Rule(
        name=str(entry["name"]),
        domain=entry["domain"],
        weight=float(entry["weight"]),
        cap=float(entry["cap"]),
        script=entry.get("script", ""),
        terms=tuple(dict.fromkeys(entry.get("terms", ()))),
        han=tuple(dict.fromkeys(entry.get("han", ()))),
        patterns=tuple(_pattern(pattern) for pattern in entry.get("patterns", ())),
    )


def _pattern(entry: str | Mapping[str, Any]) -> Pattern:
    if isinstance(entry, str):
        return Pattern((), re.compile(entry, re.MULTILINE))
    return Pattern(tuple(entry["if"]), re.compile(entry["match"], re.MULTILINE))


@cache
def _shipped() -> KeywordClassifier:
    path = Path(__file__).with_name("keywords.json")
    return KeywordClassifier.from_json(path.read_text(encoding="utf-8"), str(path))
