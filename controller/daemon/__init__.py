"""The sidecar's loop and what it shows: HTTP, metrics, traces, logs, the web page."""
