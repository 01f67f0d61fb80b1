"""Process lifecycle: spawn, watch, drain, and the control channel to the front end."""
