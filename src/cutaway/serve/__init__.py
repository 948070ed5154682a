"""HTTP servers: the OpenAI-compatible API, the inspector API and its web page."""
