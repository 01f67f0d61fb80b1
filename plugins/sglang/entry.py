"""The entry point `sglang.srt.plugins`: SGLang calls `register` in each of its processes, before it builds anything."""

from __future__ import annotations

import os

HANDSHAKE_ENV = "BRIDGE_SGLANG_HANDSHAKE"
"""Address to dial, set by the launcher for the ranks it spawns. Unset: this plugin does nothing."""
ENGINE_INDEX_ENV = "BRIDGE_SGLANG_ENGINE_INDEX"
"""Identity of the first rank; a data-parallel rank adds its own number."""
PLUGIN_NAME = "headless-bridge"
"""Our name among SGLang's plugins, for its SGLANG_PLUGINS."""


def register() -> None:
    """Register the hooks if this process was started by our launcher. Imports nothing else otherwise."""
    address = os.environ.get(HANDSHAKE_ENV)
    if not address:
        return
    from bridge.plugins.sglang.hooks import register_hooks

    register_hooks(address, int(os.environ.get(ENGINE_INDEX_ENV, "0")))
