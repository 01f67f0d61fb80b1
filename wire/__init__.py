"""What an engine's bytes mean, and the sockets they travel on. No processes, no policy."""
