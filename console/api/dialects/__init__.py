"""API dialects, one package each; `registry` knows which there are and which of them are on."""
