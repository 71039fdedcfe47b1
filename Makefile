# Each line calls one program; the programs live in scripts/ and in the package.
PYTHON ?= python3

.PHONY: demo test check build bench-proxy clean

demo: .venv/installed
	.venv/bin/moe-proxy demo

test: .venv/installed-dev
	.venv/bin/pytest

check: .venv/installed-dev
	scripts/check

build: .venv/installed
	.venv/bin/moe-proxy build

bench-proxy: .venv/installed
	.venv/bin/python scripts/bench_proxy
	.venv/bin/python scripts/gpu_check/page.py docs/benchmarks.json docs/benchmarks.md

clean:
	rm -rf .venv build dist

.venv/installed: pyproject.toml
	scripts/make-venv $(PYTHON)
	@touch $@

.venv/installed-dev: .venv/installed
	scripts/make-venv $(PYTHON) dev
	@touch $@
