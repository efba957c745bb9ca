"""How the demo model is made: facts -> corpus -> tokenizer -> training -> a model folder."""
