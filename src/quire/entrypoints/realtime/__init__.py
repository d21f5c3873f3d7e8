"""OpenAI's realtime protocol: a conversation over a WebSocket."""
