"""The agent's outside: sockets, sessions, RPC and HTTP. It parses and bounds what callers send; transfers act on it."""
