"""Official clients of the ``proxy`` that the module of a test has started."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import openai
import pytest

from tests.support.proxy_process import ProxyProcess


@pytest.fixture
def openai_client(proxy: ProxyProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client, told only the base URL."""
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ollama_client(proxy: ProxyProcess) -> Iterator[ollama.Client]:
    """Ollama's client, told only the host."""
    client = ollama.Client(host=proxy.url)
    yield client
    client._client.close()
