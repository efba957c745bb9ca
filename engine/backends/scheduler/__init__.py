"""Which tokens of which sequences a step computes, and the KV pages they take; without torch."""
