"""Owns ``moe-proxy classify``."""

from __future__ import annotations

import json
import sys

import click

from moe_proxy.config import load_settings
from moe_proxy.domains.choice import classifier_of


@click.command(epilog='Example: moe-proxy classify "print hello world"')
@click.argument("text", required=False)
@click.option("--classifier", metavar="NAMES", help="keyword, tfidf, embedding: asked in the order given")
@click.option("--json", "as_json", is_flag=True, help="print domain and distribution as JSON")
def classify(text: str | None, classifier: str | None, as_json: bool) -> None:
    """Say which domain TEXT (or standard input) belongs to."""
    if text is None:
        if sys.stdin.isatty():
            raise click.UsageError("no text was given: pass it as an argument or on standard input")
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    result = classifier_of(load_settings({"classifier": classifier})).classify(text)
    if as_json:
        body = {
            "domain": result.domain,
            "confidence": round(result.confidence, 4),
            "classifier": result.classifier,
            "distribution": {name: round(p, 4) for name, p in result.distribution.items()},
        }
        click.echo(json.dumps(body, ensure_ascii=False))
    elif result.domain is None:
        click.echo("no domain: the classifier abstains")
    else:
        for name, p in sorted(result.distribution.items(), key=lambda item: -item[1]):
            if p >= 0.005:
                click.echo(f"{name:15s} {p:.2f}")
