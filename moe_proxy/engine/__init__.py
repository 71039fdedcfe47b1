"""One supervised llama-server: its build, its command line, its life, its control API."""
