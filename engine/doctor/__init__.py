"""An install's needs and what it has: facts gathered at the edges, findings and verdicts derived from them alone."""
