"""The HTTP server: OpenAI's endpoints over an `EngineLoop`. Only this package and `jaxinfer.serve` import FastAPI."""
