"""SGLang as the engine: its server as a child, spoken to over HTTP on loopback."""
