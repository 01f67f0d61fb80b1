"""Code that runs in vLLM's Python: the companion."""
