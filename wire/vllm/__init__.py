"""vLLM engine-core layouts and codecs."""
