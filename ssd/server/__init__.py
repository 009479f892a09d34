"""`ssd serve`: the OpenAI-compatible HTTP server. Needs the extra `serve`."""
