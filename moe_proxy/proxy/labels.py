"""Owns the route by which somebody says what a text really is about; it learns nothing itself."""

from __future__ import annotations

from aiohttp import web

from moe_proxy import prompts
from moe_proxy.domains.base import Classification
from moe_proxy.errors import RequestError, UnsupportedError
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.replies import json_reply


async def label(exchange: Exchange) -> web.StreamResponse:
    """POST /stats/label: ``domain``, and ``text`` or the ``messages`` or ``prompt`` of a request."""
    labelling = exchange.context.labelling
    with exchange.admission.admitted():
        _, value = await exchange.json_object()
        if labelling is None:
            raise UnsupportedError(
                "corrected labels are not learned from", "start the proxy with --learn-labels"
            )
        domain, labels = value.get("domain"), exchange.context.labels
        if not isinstance(domain, str) or domain not in labels:
            raise RequestError(f"domain is {domain!r}", f"it may be one of {', '.join(sorted(labels))}")
        given = value.get("text")
        text = given if isinstance(given, str) else prompts.text_in("/v1/chat/completions", value)
        if text is None or not any(character.isalnum() for character in text):
            raise RequestError("there is no text to learn from", 'send "text", "messages" or "prompt"')
        before = await labelling.classify(text)
        await labelling.learn(text, domain)
        after = await labelling.classify(text)
        return json_reply({"domain": domain, "before": _value(before), "after": _value(after)})


def _value(answer: Classification) -> dict[str, object]:
    return {
        "domain": answer.domain,
        "confidence": round(answer.confidence, 4),
        "classifier": answer.classifier,
    }
