"""How each engine is launched."""
