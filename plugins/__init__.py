"""Code that runs inside an engine's process or Python environment."""
