"""The ranking of the site's search: what the theme's worker does with its index, in Python.

The theme searches with lunr (BM25 with ``k1 = 1.2`` and, as the theme sets it, ``b = 0``): every word of a
query also finds the words that begin with it; the weight of a word in a field is its idf times the boosts of
field and entry; a result counts ``1 + x²`` times as much, where x is the share of the query's words that it
has, and one more for the head of a page. The sections of a page are one result.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

K1 = 1.2
STOP_WORDS = frozenset(
    "a able about across after all almost also am among an and any are as at be because been but by "
    "can cannot could dear did do does either else ever every for from get got had has have he her "
    "hers him his how however i if in into is it its just least let like likely may me might most "
    "must my neither no nor not of off often on only or other our own rather said say says she should "
    "since so some than that the their them then there these they this tis to too twas us wants was "
    "we were what when where which while who whom why will with would yet you your".split()
)


class Search:
    """An index as the theme's worker makes it."""

    def __init__(self, index: Mapping[str, Any]) -> None:
        """Read the content of ``search_index.json``."""
        self._separator = re.compile(index["config"]["separator"])
        boosts = {name: field["boost"] for name, field in index["config"]["fields"].items()}
        self._head: dict[str, str] = {}
        """Location of an entry: that of the head of its page."""
        first: dict[str, str] = {}
        counts: dict[str, dict[str, Counter[str]]] = defaultdict(dict)
        weights: dict[str, float] = {}
        for entry in index["docs"]:
            place = entry["location"]
            self._head[place] = first.setdefault(place.partition("#")[0], place)
            weights[place] = entry.get("boost", 1)
            for name in boosts:
                text = entry.get(name, "")
                counts[name][place] = Counter(self._words(" ".join(text) if isinstance(text, list) else text))
        found: dict[str, int] = Counter(
            word for field in counts.values() for one in field.values() for word in one
        )
        idf = {
            word: math.log(1 + abs((len(index["docs"]) - number + 0.5) / (number + 0.5)))
            for word, number in found.items()
        }
        self._vocabulary = sorted(idf)
        # Word, field: entries with the word's weight there.
        self._weights: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for name, field in counts.items():
            for place, words in field.items():
                for word, number in words.items():
                    weight = idf[word] * (K1 + 1) * number / (K1 + number) * boosts[name] * weights[place]
                    self._weights[word, name][place] = math.floor(weight * 1000 + 0.5) / 1000
        self._fields = tuple(boosts)

    def _words(self, text: str) -> Iterator[str]:
        """The words of a text with tags, as they are indexed."""
        for part in re.split(r"<[^>]*>", text):
            for word in self._separator.split(part):
                if word and word.lower() not in STOP_WORDS:
                    yield word.lower()

    def pages(self, query: str) -> list[str]:
        """Return the addresses of the pages found, best first."""
        terms = [word for word in self._separator.split(query.lower()) if word]
        scores, matched = self._scores(terms)
        ranked = []
        for place, score in scores.items():
            counted = [term for term in terms if term in matched[place] or term not in STOP_WORDS]
            share = sum(term in matched[place] for term in counted) / len(counted) if counted else 0.0
            ranked.append((score * (1 + ((self._head[place] == place) + share) ** 2), place))
        ranked.sort(key=lambda one: -one[0])
        return list(dict.fromkeys(self._head[place] for _, place in ranked))

    def _scores(self, terms: Sequence[str]) -> tuple[dict[str, float], dict[str, set[str]]]:
        """The score of each entry before the theme's boosts, and the words of the query that it has."""
        expanded = {term: self._beginning_with(term) for term in terms}
        clauses = Counter(word for term in terms for word in expanded[term])
        scores: dict[str, float] = defaultdict(float)
        matched: dict[str, set[str]] = defaultdict(set)
        for name in self._fields:
            length = math.sqrt(sum(number**2 for number in clauses.values()))
            for word, number in clauses.items():
                for place, weight in self._weights.get((word, name), {}).items():
                    scores[place] += number * weight / length
                    matched[place].update(term for term in terms if word.startswith(term))
        return scores, matched

    def _beginning_with(self, term: str) -> list[str]:
        """The indexed words that begin so."""
        found = []
        for word in self._vocabulary[bisect_left(self._vocabulary, term) :]:
            if not word.startswith(term):
                break
            found.append(word)
        return found
