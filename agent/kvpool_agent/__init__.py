"""The node agent of kvpool: it owns a node's segment and serves the engines of that node."""
