"""Owns the prompts that are measured with: the shipped ones, joined and cut to a length in tokens."""

from __future__ import annotations

from moe_proxy.completions import ProxyClient
from moe_proxy.errors import EngineError
from moe_proxy.routing.collect import held_out_prompts


class Texts:
    """Prompts of a length; each is made once, with the tokens of the model that is asked first.

    They are those of the shipped prompts from which no map is made: one domain's first, then, as far as they
    are needed, those of the next ones, then all again.
    """

    def __init__(self) -> None:
        self._prompts = held_out_prompts()
        self._made: dict[tuple[int, int], str] = {}

    async def text(self, client: ProxyClient, tokens: int, turn: int) -> str:
        """A text of ``tokens`` tokens; another ``turn`` begins in another domain, or with another prompt."""
        key = (tokens, turn)
        if key not in self._made:
            self._made[key] = await self._make(client, tokens, turn)
        return self._made[key]

    async def _make(self, client: ProxyClient, tokens: int, turn: int) -> str:
        domains = list(self._prompts)
        start = turn % len(domains)
        first, *others = domains[start:] + domains[:start]
        skipped = turn // len(domains) % len(self._prompts[first])
        prompts = [*self._prompts[first][skipped:], *self._prompts[first][:skipped]]
        prompts += [prompt for domain in others for prompt in self._prompts[domain]]
        text = "\n\n".join(prompts)
        ids = (await client.post("/tokenize", {"content": text}))["tokens"]
        if not ids:
            raise EngineError("the model makes no tokens of the shipped prompts", "is its tokenizer whole?")
        ids = (ids * -(-tokens // len(ids)))[:tokens]
        # A cut may go through a character.
        return str((await client.post("/detokenize", {"tokens": ids}))["content"]).rstrip("\ufffd")
