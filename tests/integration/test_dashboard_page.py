"""The dashboard in a browser, over a real engine: it loads, its numbers move, nobody complains."""

from __future__ import annotations

import json
from collections.abc import Callable

import aiohttp
import pytest

from tests.support.browser import NONE, browser_path, tab
from tests.support.proxy_process import ProxyProcess

pytestmark = [pytest.mark.engine, pytest.mark.skipif(browser_path() is None, reason=NONE)]

CHAT = {"messages": [{"role": "user", "content": "print hello world in python"}]}
CONTEXT = 16384
CELLS = "#in-flight tr:first-child td"
# Colours in the picture of where experts lie.
COLOURS = """() => {
  const heat = document.getElementById("heat");
  const copy = new OffscreenCanvas(heat.width, heat.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(heat, 0, 0);
  const image = copy.getImageData(0, 0, heat.width, heat.height);
  return new Set(new Uint32Array(image.data.buffer)).size;
}"""


def shows(selector: str, pattern: str, index: int = 0) -> str:
    """A script that is true once the text of an element matches ``pattern``."""
    element = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
    return f"() => /{pattern}/.test({element}?.textContent ?? '')"


async def test_numbers_move_during_a_stream(start_proxy: Callable[..., ProxyProcess]) -> None:
    """It loads and shows a request in flight with domain and rate, the hit rate, a mark in each chart."""
    proxy = start_proxy("--ram-budget", "40%", "--ctx", str(CONTEXT))
    async with tab() as opened, aiohttp.ClientSession() as http:
        page = opened.page
        await page.goto(f"{proxy.url}/dashboard")
        await page.wait_for_function(shows("#state", "^ready$"))
        assert await page.text_content("#model") == "planted-moe"
        await page.wait_for_function(shows("#in-flight", "^none$"))
        assert await page.text_content("#hit-rate") == "–"

        # It goes on until everything was seen.
        endless = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": CONTEXT - 100}
        async with http.post(proxy.url + "/v1/chat/completions", json=endless) as stream:
            assert stream.status == 200
            await page.wait_for_function(shows("#active", "^1$"))
            await page.wait_for_function(shows("#hit-rate", "^[0-9]"))
            await page.wait_for_function(shows(CELLS, "^codegen$"))
            await page.wait_for_function(shows(CELLS, "^[1-9]", 2))
            tokens = await page.locator(CELLS).nth(3).text_content()
            await page.wait_for_function(shows(CELLS, f"^(?!{tokens}$)[0-9]+$", 3))
            assert not stream.content.at_eof()
            stream.close()
        for chart in ("hit-rate", "miss", "tokens"):
            assert await page.locator(f"#{chart}-chart path").count() == 1, chart
        assert await page.locator("#domains-chart rect").count() > 0

        await page.wait_for_function(shows("#in-flight", "^none$"))
        assert (await page.locator("#latency td").all_text_contents())[9] == "0"
        async with http.post(proxy.url + "/v1/chat/completions", json=CHAT | {"max_tokens": 3}) as answer:
            assert answer.status == 200
        await page.wait_for_function(shows("#latency td", "^1$", 9))
        await page.wait_for_function(shows("#recent td", "^codegen$"))
        model = proxy.get("/stats")["model"]
        size = await page.evaluate(
            "[document.getElementById('heat').width, document.getElementById('heat').height]"
        )
        assert size == [model["experts"], model["layers"]]
        assert await page.evaluate(COLOURS) > 2
        await page.uncheck("#overlay")
        assert await page.evaluate(COLOURS) == 2
        assert opened.complaints == []


async def test_a_phone_in_the_dark(start_proxy: Callable[..., ProxyProcess]) -> None:
    """Nothing is wider than a phone; it is dark where the system is; a key is asked for once."""
    proxy = start_proxy(env={"MOE_PROXY_API_KEY": "sk-right"})
    async with tab(width=360, height=740, dark=True) as opened:
        page = opened.page
        await page.goto(f"{proxy.url}/dashboard")
        await page.fill("#key", "sk-wrong")
        await page.click("#key-form button")
        await page.wait_for_function(shows("#key-error", "^This key is wrong"))
        assert await page.is_hidden("#main")
        await page.fill("#key", "sk-right")
        await page.click("#key-form button")
        await page.wait_for_selector("#main:not([hidden])")
        assert await page.is_hidden("#key-form")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, ground[4:-1].split(","))) < 150
        # Kept until the tab is closed.
        await page.reload()
        await page.wait_for_selector("#main:not([hidden])")
        assert await page.is_hidden("#key-form")
        # Any browser notes that it was refused, without a key and with the wrong one; and nothing else.
        assert len(opened.complaints) == 2
        assert all("401" in text for text in opened.complaints)
