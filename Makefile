# Each target makes what it needs first, under .envs/ and .models/ of this checkout.
PYTHON ?= python3
BUILD = $(PYTHON) tests/environments/build.py
DEV = .envs/dev/bin

.PHONY: help demo test bench chaos soak test-abuse test-clients check lint clean

help:
	@echo "make demo    a real vLLM engine on the CPU, asked over gRPC and through the SMG gateway"
	@echo "make test    the checks and every test, with the real engines and the real gateway"
	@echo "make test-abuse    attacks on the gRPC listener beside good streams, connections cut at every byte"
	@echo "make chaos   every part killed, stopped and replaced under 64 streams; writes docs/reliability.md"
	@echo "make soak    20 minutes of mixed load, then what grew"
	@echo "make test-clients  clients of other makers: grpcio, grpc-js, tonic, nghttp2, h2 (installs nghttp2-client and npm packages)"
	@echo "make bench   CPU, latency and memory beside the Rust servicer and grpc.aio; bench.json, docs/benchmark.png"
	@echo "make check   ruff, mypy, import directions, the wheel: what runs without an engine"
	@echo "make clean   remove what the targets above made (.envs, .models, caches)"

demo:
	@$(BUILD) vllm smg model
	@.envs/vllm/bin/python examples/demo/run.py

test: lint
	@$(BUILD) vllm sglang smg model tiny router vllm-rs
	@$(DEV)/python -m pytest -q --ignore tests/clients

bench:
	@$(BUILD) dev smg model vllm-rs
	@$(DEV)/python -m pip install --quiet "matplotlib>=3.8"
	@status=0; $(DEV)/python -m tests.bench.bench || status=$$?; \
	$(DEV)/python -m tests.bench.plot bench.json docs/benchmark.png; exit $$status

test-abuse:
	@$(BUILD) dev
	@$(DEV)/python -m pytest -q tests/abuse

chaos:
	@$(BUILD) vllm smg model tiny
	@BRIDGE_WRITE_TABLE=1 $(DEV)/python -m pytest -q tests/chaos

soak:
	@$(BUILD) dev
	@$(DEV)/python -m tests.soak

test-clients:
	@$(BUILD) dev smg tiny
	@$(DEV)/python tests/clients/install.py
	@$(DEV)/python -m pytest -q tests/clients

check: lint
	@$(BUILD) vllm tiny
	@$(DEV)/python -m pytest -q tests/checks

lint:
	@$(BUILD) dev
	@$(DEV)/ruff check --quiet .
	@$(DEV)/ruff format --check --quiet .
	@$(DEV)/mypy -p bridge -p examples

clean:
	@rm -rf .envs .models .run .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
