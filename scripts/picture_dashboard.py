"""Make docs/pictures/dashboard.png: picture_dashboard.py [--model M] [--tokens N]

Starts a proxy on the demonstration model with a small RAM budget, asks it prompts of several domains, and
takes the picture while two are being answered. Needs Chromium (apt-get install chromium-headless-shell) and
the packages of the extra "dev".
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from playwright.async_api import async_playwright

from moe_proxy.files import replacing
from moe_proxy.proxy.listening import free_port

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "dashboard.png"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MOST_BYTES = 200_000
START_S = 300.0
AT_ONCE = 2
# Cells of the second request in flight; the third is its rate.
SECOND = "#in-flight tr:nth-child(2) td"
PROMPTS = (
    "Write a Python function that sorts a list of numbers.",
    "Explain the Pythagorean theorem and prove it for a right triangle.",
    "Write a short story about an old lighthouse and the sea.",
    "Translate to French: the weather is fine today.",
    "Fix the bug in this loop: for i in range(len(xs)): xs.pop(i)",
    "Solve the equation 3x + 5 = 20 and check the result.",
    "Write a poem about autumn leaves in the wind.",
    "Translate to German: where is the railway station?",
)


@contextmanager
def proxy(model: str | None) -> Iterator[str]:
    """A proxy in folders of its own, with its model's file where it always is; its URL."""
    port = free_port("127.0.0.1", 0)
    argv = [sys.executable, "-m", "moe_proxy", "start", "--port", str(port), "--ram-budget", "40%"]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "MOE_PROXY_STATE_DIR": f"{folder}/state",
            "MOE_PROXY_RUNTIME_DIR": f"{folder}/run",
            # llama.cpp's threads spin; the browser needs a core as well.
            "OMP_WAIT_POLICY": "passive",
        }
        process = subprocess.Popen(argv + (["--model", model] if model else []), env=environment)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


async def ready(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until the model is loaded."""
    for _ in range(int(START_S * 10)):
        try:
            async with http.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass  # not listening yet
        await asyncio.sleep(0.1)
    raise SystemExit(f"picture_dashboard: the proxy was not ready within {START_S:g} s")


async def ask(http: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> None:
    """Read one answer to its end."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()


async def picture(url: str, browser_path: str, tokens: int) -> bytes:
    """The page as PNG, while the last prompts are being answered."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http, async_playwright() as playwright:
        await ready(http, url)
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=browser_path, args=flags)
        page = await browser.new_page(viewport={"width": 1000, "height": 960})
        await page.goto(f"{url}/dashboard")
        for first in range(0, len(PROMPTS), AT_ONCE):
            last = first + AT_ONCE >= len(PROMPTS)
            asked = [
                ask(http, url, prompt, 100 * tokens if last else tokens)
                for prompt in PROMPTS[first : first + AT_ONCE]
            ]
            running = [asyncio.ensure_future(one) for one in asked]
            if not last:
                await asyncio.gather(*running)
                continue
            await page.wait_for_function(
                f"() => /^[1-9]/.test(document.querySelectorAll('{SECOND}')[2]?.textContent ?? '')",
                timeout=120_000,
            )
            await asyncio.sleep(5)  # a few more points
            taken = await page.screenshot()
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await browser.close()
    return taken


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model as moe-proxy start takes it [the demonstration model]")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each answer [100]")
    options = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"picture_dashboard: none of {', '.join(BROWSERS)} is on PATH: install one of them")
    with proxy(options.model) as url:
        taken = asyncio.run(picture(url, browser_path, options.tokens))
    if len(taken) > MOST_BYTES:
        raise SystemExit(f"picture_dashboard: the picture has {len(taken)} bytes, over {MOST_BYTES}")
    with replacing(PICTURE) as path:
        path.write_bytes(taken)
    print(f"{PICTURE}: {len(taken)} bytes")


if __name__ == "__main__":
    main()
