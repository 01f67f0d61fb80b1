"""The daemon that runs LLM engines headless and serves them to gateways. See docs/architecture.md."""

__version__ = "0.1.0"
