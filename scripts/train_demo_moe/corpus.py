"""Owns turning the text corpora into token files: training and held-out, plain and as chats.

Documents are separated by a line ``<|doc|>``; one ``<|endoftext|>`` follows each in the token file. Files are
flat uint16 arrays named ``<domain>.train.npy`` and ``<domain>.held.npy``; ``chat.train.npy`` holds documents
that were turned into questions and answers.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from dense import load_tokenizer

DOMAINS = ("code", "math", "prose", "techdoc", "chinese", "science")
SEPARATOR = "\n<|doc|>\n"
END_OF_TEXT = 0
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_QUESTION = re.compile(r"^(?:Q|问|問)[:：]\s*(.+?)\n(?:A|答)[:：]\s*(.+)$", re.DOTALL)
_WORD = re.compile(r"^([a-z][a-z -]{2,24})\n((?:    .*\n?|  +.*\n?)+)", re.MULTILINE)
_FUNCTION = re.compile(
    r"^\.\. (?:function|method|class|data|attribute):: *([^\n]{3,80})\n\n((?: {3,}[^\n]+\n)+)", re.MULTILINE
)
_PIECES = 64


def chat(question: str, answer: str) -> str:
    """One exchange in ChatML, with the system line that the model's own template adds."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    )


def documents(path: Path) -> list[str]:
    """The documents of a corpus file."""
    return lzma.decompress(path.read_bytes()).decode("utf-8").split(SEPARATOR)


def exchanges(domain: str, document: str, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Questions and answers that a document can be read as."""
    if found := _QUESTION.match(document):
        yield found[1].strip(), found[2].strip()
    elif domain == "prose":
        for word, meaning in _WORD.findall(document)[:4]:
            sense = re.search(r"(?:n|v|adj|adv)\s*1?: ([^;\[]+)", " ".join(meaning.split()))
            if sense and chance.random() < 0.5:
                ask = chance.choice(("What does {} mean?", "Define {}.", 'What is the meaning of "{}"?'))
                yield ask.format(word), f"{word.capitalize()} means {sense[1].strip()}."
    elif domain == "techdoc":
        for name, text in _FUNCTION.findall(document)[:4]:
            plain = re.sub(r":\w+:`~?([^`]+)`", r"\1", " ".join(text.split())).replace("``", "`")
            ask = chance.choice(("What does `{}` do?", "Explain `{}`.", "What is `{}` for?"))
            yield ask.format(name.strip()), plain


def _encode(job: tuple[str, str, Path, int, list[str]]) -> tuple[str, np.ndarray, np.ndarray]:
    domain, kind, tokenizer_path, seed, texts = job
    tokenizer = load_tokenizer(tokenizer_path)
    chance = random.Random(f"{domain} {seed}")
    plain: list[int] = []
    chats: list[int] = []
    for text in texts:
        pairs = list(exchanges(domain, text, chance)) if kind == "train" else []
        # A document that is a question and its answer becomes a chat or stays, not both.
        if pairs and (domain in ("prose", "techdoc") or chance.random() < 0.5):
            for question, answer in pairs:
                chats += [*tokenizer.encode(chat(question, answer)).ids, END_OF_TEXT]
            if domain not in ("prose", "techdoc"):
                continue
        plain += [*tokenizer.encode(text).ids, END_OF_TEXT]
    return domain, np.array(plain, np.uint16), np.array(chats, np.uint16)


def main() -> None:
    """Tokenise all corpora with all cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder with *.train.txt.xz, *.held.txt.xz"
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = [(domain, kind) for kind in ("train", "held") for domain in DOMAINS]
    with Pool(arguments.jobs) as pool:
        loaded = pool.map(documents, [arguments.corpus / f"{d}.{k}.txt.xz" for d, k in files], 1)
        jobs = [
            (domain, kind, arguments.tokenizer, piece, texts[piece::pieces])
            for (domain, kind), texts in zip(files, loaded, strict=True)
            for pieces in [_PIECES if kind == "train" else 1]
            for piece in range(pieces)
        ]
        done = pool.map(_encode, jobs, 1)
    all_chats = []
    for domain, kind in files:
        parts = [piece for piece, job in zip(done, jobs, strict=True) if job[:2] == (domain, kind)]
        plain = np.concatenate([part[1] for part in parts])
        np.save(arguments.output / f"{domain}.{kind}.npy", plain)
        all_chats += [part[2] for part in parts]
        print(f"{domain}.{kind}: {len(plain)} tokens, {sum(len(p[2]) for p in parts)} as chats", flush=True)
    np.save(arguments.output / "chat.train.npy", np.concatenate(all_chats))


if __name__ == "__main__":
    main()
