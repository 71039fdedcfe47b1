"""Look for prompts that stand in two sets: check_prompts.py TRAINING.jsonl OTHER.jsonl

Names each training prompt that OTHER holds too: the same text once case, space and marks are taken away, one
inside the other, or nearly the same (many runs of characters in common). Of OTHER nothing is printed but the
identity of the record, so that whoever cleans up the training prompts never reads it. The exit code is 1 when
there is one.
"""

import argparse
import json
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

RUN = 5
NEAR = 0.45
"""Share of the runs of the shorter prompt that both hold."""
LEAST = 15
"""Characters of the shorter prompt below which only the very same one counts: it is a common phrase."""
COMMON = 0.01
"""Share of the other set's prompts from which on a run is everybody's and proves nothing."""


def normalised(text: str) -> str:
    """Letters and digits alone, in lower case and compatibility form."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(character for character in folded if character.isalnum())


def runs(text: str) -> frozenset[str]:
    """Runs of RUN characters, of the text itself where it is shorter."""
    return frozenset(text[at : at + RUN] for at in range(max(len(text) - RUN + 1, 1)))


def duplicates(training: Sequence[str], other: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Pairs of indices of the two sets, and how they agree."""
    texts = [normalised(text) for text in other]
    all_runs = [runs(text) for text in texts]
    spread = Counter(run for own in all_runs for run in own)
    limit = max(COMMON * len(texts), 2)
    telling = [frozenset(run for run in own if spread[run] <= limit) for own in all_runs]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, own in enumerate(telling):
        for run in own:
            holders[run].append(number)
    exact = {text: number for number, text in enumerate(texts)}
    for index, prompt in enumerate(training):
        text = normalised(prompt)
        if text in exact:
            yield index, exact[text], "the same"
            continue
        mine = runs(text)
        shared = Counter(number for run in mine for number in holders.get(run, ()))
        for number, count in shared.most_common(3):
            if min(len(text), len(texts[number])) < LEAST:
                continue
            if text in texts[number] or texts[number] in text:
                yield index, number, "one in the other"
                break
            if count >= NEAR * min(len(mine), len(all_runs[number])):
                yield index, number, "nearly the same"
                break


def main() -> int:
    """Print what both hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path)
    parser.add_argument("other", type=Path)
    arguments = parser.parse_args()
    sets = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        for path in (arguments.training, arguments.other)
    ]
    training, other = ([record["prompt"] for record in records] for records in sets)
    found = 0
    for index, number, how in duplicates(training, other):
        found += 1
        print(f"{how}: {training[index]!r} and record {sets[1][number].get('id', number)}")
    print(f"{found} of {len(training)} prompts also stand in {arguments.other.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
