"""Ollama API in, OpenAI form out, and back."""
