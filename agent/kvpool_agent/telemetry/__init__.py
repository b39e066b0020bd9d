"""What the agent tells about itself: metrics, traces, logs. Nothing here decides anything."""
