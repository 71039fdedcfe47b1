"""Generate data/prompts/prompts.jsonl from the hand-written building blocks beside it: make_prompts.py

The examples behind the embedding classifier's prototypes are written too.

Every building block (a template, a topic, a snippet) belongs to one split, so that the held-out prompts
are made of pieces that no training prompt holds. Short inventories (names of languages, numbers) are
common to all splits. Prompts that are written as a whole (folders of ``written``) come as they are, and some
of them once more in another style. Each record names its source: "blocks", or the folder.
"""

import hashlib
import itertools
import json
import random
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "data" / "prompts"
SEED = 5
SPLITS = {"train": 0.9, "test": 0.1}
COUNTS = {"en": 420, "zh": 500}
ONLY_LANGUAGE_COUNT = 600  # of a domain that exists in one language
COMMON_BELOW = 10
EXAMPLES = 40
SLOT = re.compile(r"<([a-z][a-z0-9]*)>")
# Each style's share; what is left is the bare prompt.
STYLES = {"chat": 0.12, "document": 0.08, "casual": 0.12, "system": 0.06}
AGAIN = 0.35  # share of the prompts written as a whole that come in another style too
SYSTEM = (
    "You are a helpful assistant.",
    "You are an expert. Answer concisely.",
    "Be polite and answer in the user's language.",
    "你是一个乐于助人的助手。",
    "Today is Monday. Knowledge cutoff: last year.",
)
THANKS = {
    "en": ("Thanks! ", "Ok. ", "And now: ", "One more: ", "Great. "),
    "zh": ("谢谢，", "好的，", "再问一个：", "接着，"),
}

Blocks = dict[str, list[str]]


def split_of(block: str) -> str:
    """The split of a building block, from its hash alone: a new block moves no other."""
    place = int.from_bytes(hashlib.sha256(block.encode()).digest()[:4], "big") / 2**32
    for split, share in SPLITS.items():
        if place < share:
            return split
        place -= share
    return "test"


def read_blocks(path: Path) -> Blocks:
    """Sections of a block file: ``[name]``, then one item a line, with \\n for a line end."""
    blocks: Blocks = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.fullmatch(r"\[[a-z][a-z0-9]*\]", line):
            items = blocks.setdefault(line[1:-1], [])
        elif line:
            items.append(line.replace("\\n", "\n"))
    return blocks


def of_split(blocks: Blocks, split: str) -> Blocks:
    """The blocks that ``split`` may use."""
    kept = {}
    for name, items in blocks.items():
        mine = [item for item in items if split_of(f"{name} {item}") == split]
        kept[name] = mine if len(items) >= COMMON_BELOW and mine else items
    return kept


def expand(template: str, blocks: Blocks, rng: random.Random) -> str:
    """Fill the slots of ``template``, and those of what fills them; unknown names stay (HTML, C headers)."""

    def fill(match: re.Match[str]) -> str:
        items = blocks.get(match[1])
        return expand(rng.choice(items), blocks, rng) if items else match[0]

    return SLOT.sub(fill, template)


def styled(
    prompt: str, others: list[str], prose: list[str], language: str, rng: random.Random
) -> tuple[str, str]:
    """A prompt in one of the styles, as the proxy hands it to a classifier: the last turn first."""
    at = rng.random()
    ends = itertools.accumulate(STYLES.values())
    style = next((style for style, end in zip(STYLES, ends, strict=True) if at < end), "plain")
    if style == "chat":
        earlier = rng.sample(others, rng.randint(1, 4))
        return "\n".join([rng.choice(THANKS[language]) + prompt, *earlier]), style
    if style == "document":
        paragraphs = [" ".join(rng.choices(prose, k=rng.randint(3, 8))) for _ in range(rng.randint(1, 6))]
        return "\n\n".join([*paragraphs, prompt]), style
    if style == "casual":
        return (prompt.lower() if language == "en" else prompt).rstrip(".?!。？！ "), style
    return (f"{prompt}\n{rng.choice(SYSTEM)}" if style == "system" else prompt), style


def generate() -> list[dict[str, str]]:
    """All prompts, as records of domain, lang, split, style and prompt."""
    files = {
        tuple(path.name.split(".")[:2]): read_blocks(path) for path in sorted(FOLDER.glob("blocks/*.*.txt"))
    }
    languages = {domain: [lang for d, lang in files if d == domain] for domain, _ in files}
    records = []
    for (domain, language), blocks in files.items():
        count = COUNTS[language] if len(languages[domain]) > 1 else ONLY_LANGUAGE_COUNT
        for split, share in SPLITS.items():
            rng = random.Random(f"{SEED} {domain} {language} {split}")
            mine = of_split(blocks, split)
            prose_blocks = of_split(files["general_qa", language], split)
            prose = prose_blocks["doc"]
            wanted = round(count * share)
            prompts: dict[str, None] = {}
            for _ in range(wanted * 50):
                prompts[expand(rng.choice(mine["prompt"]), mine, rng)] = None
                if len(prompts) == wanted:
                    break
            for prompt in prompts:
                text, style = styled(prompt, list(prompts), prose, language, rng)
                records.append(
                    {
                        "domain": domain,
                        "lang": language,
                        "split": split,
                        "source": "blocks",
                        "style": style,
                        "prompt": text,
                    }
                )
    return records + written()


def written() -> list[dict[str, str]]:
    """The prompts that are written as a whole."""
    records: list[dict[str, str]] = []
    for path in sorted(FOLDER.glob("written/*/*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            language, prompt = line.replace("\\n", "\n").split(" ", 1)
            # The name that a line had when the splits were made: none moves to another.
            split = split_of(f"{path.stem} {language} {line.split(' ', 1)[1]}")
            about = {"domain": path.stem, "lang": language, "split": split, "source": path.parent.name}
            records.append({**about, "style": "written", "prompt": prompt})
    rng = random.Random(f"{SEED} written")
    prose: dict[tuple[str, str], list[str]] = {}
    for split, language in itertools.product(SPLITS, COUNTS):
        prose[split, language] = of_split(
            read_blocks(FOLDER / "blocks" / f"general_qa.{language}.txt"), split
        )["doc"]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        alike.setdefault((record["domain"], record["lang"], record["split"]), []).append(record["prompt"])
    again = []
    for record in records:
        key = record["domain"], record["lang"], record["split"]
        if record["lang"] not in COUNTS or len(alike[key]) < COMMON_BELOW or rng.random() >= AGAIN:
            continue
        style = "plain"
        while style == "plain":
            text, style = styled(
                record["prompt"], alike[key], prose[record["split"], record["lang"]], record["lang"], rng
            )
        again.append({**record, "style": style, "prompt": text})
    return records + again


def examples(records: list[dict[str, str]]) -> list[dict[str, str]]:
    """A few bare training prompts of each domain and language: the prototypes of the embedding classifier."""
    kept: list[dict[str, str]] = []
    taken: dict[tuple[str, str], int] = {}
    for record in records:
        key = record["domain"], record["lang"]
        if (
            record["split"] == "train"
            and record["style"] in ("plain", "written")
            and taken.get(key, 0) < EXAMPLES
        ):
            taken[key] = taken.get(key, 0) + 1
            kept.append({name: record[name] for name in ("domain", "lang", "prompt")})
    return kept


def lines(records: list[dict[str, str]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    generated = generate()
    (FOLDER / "prompts.jsonl").write_text(lines(generated), encoding="utf-8")
    domains = FOLDER.parent.parent / "moe_proxy" / "domains"
    (domains / "examples.jsonl").write_text(lines(examples(generated)), encoding="utf-8")
    print(f"{len(generated)} prompts")
